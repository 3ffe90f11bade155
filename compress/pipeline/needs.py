"""What a whole run takes: its passes over blocks, the stages that train and a rotation, in one forecast."""

from compress.model.plan import Plan, make_plan
from compress.pipeline import forecast, forecast_training, passes, rotated
from compress.pipeline.forecast import Forecast
from compress.pipeline.inputs import RunInputs
from compress.pipeline.passes import Pass
from runtime.checkpoints.rotation import RotationRecord


def forecast_run(inputs: RunInputs, plan: Plan, planned: Pass | None, rotation: RotationRecord | None) -> Forecast:
    """The forecast of a run whose parts are planned.

    plan     of what is packed in the end; planned: the first pass over blocks, None where training comes before it.
    rotation what the stage rotate comes to, None where there is none.
    """
    copied = 0 if inputs.draft is None else sum(file.stat().st_size for file in inputs.draft.weight_files)
    need = forecast.forecast(inputs.target, plan, None if planned is None else planned.blocks, copied)
    sizes = forecast_training.Sizes.of(inputs.target, plan, inputs.structure, inputs.draft)
    need = forecast_training.with_training(need, inputs.context.recipe, sizes)
    if rotation is not None:
        need = forecast.with_rotation(need, inputs.target, inputs.structure, rotation.untied)
    return need


def forecast_recipe(inputs: RunInputs) -> Forecast:
    """The forecast of a run of the context's recipe, of which nothing is planned yet.

    Raises UserError for what a stage cannot do with this model.
    """
    recipe, rotation = inputs.context.recipe, rotated.check(inputs)
    first = passes.first_stages(recipe)
    planned = None if first is None else passes.plan_pass(inputs.target, first, inputs)
    if planned is not None and not passes.weights_trained(recipe):
        return forecast_run(inputs, planned.plan, planned, rotation)
    plan = make_plan(inputs.target.shapes(), inputs.structure, recipe.quantize, changed=recipe.changes)
    return forecast_run(inputs, plan, planned, rotation)
