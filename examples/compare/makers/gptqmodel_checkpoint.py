"""GPTQModel: `python -m makers.gptqmodel_checkpoint JOB.json`.

Its process is started with GPTQMODEL_CPU_WORKERS=4: by default it refuses to run on two cores.
"""

from collections.abc import Mapping
from importlib.metadata import version

from makers.compression import Job, Stopwatch, serve


def compress(job: Job, stopwatch: Stopwatch) -> Mapping[str, str]:
    """Everything that the setting does not name is the library's default: true_sequential for one."""
    import torch
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.quantization import GPTQConfig

    setting = job.setting
    config = GPTQConfig(
        bits=setting["bits"],
        group_size=setting["group_size"],
        sym=setting["symmetric"],
        desc_act=setting["order"] == "inputs",
        act_group_aware=setting["order"] == "groups",
        damp_percent=setting["damping"],
        mse=2.0 if setting["search"] else 0.0,  # the power of the error that its search makes smallest
    )
    model = GPTQModel.load(str(job.model), config, device="cpu")
    # Lists, as its own examples give them. All have one length, so its sorting by length changes nothing.
    examples = [{"input_ids": window, "attention_mask": [1] * len(window)} for window in job.tokens()]
    with stopwatch:
        log = model.quantize(examples, batch_size=1, backend=BACKEND.AUTO)
    model.save(str(job.out))
    return {
        "version": f"gptqmodel {version('gptqmodel')}, torch {torch.__version__}",
        "layers": str(sum(map(len, log.values())) if isinstance(log, Mapping) else "unknown"),
    }


if __name__ == "__main__":
    serve(compress)
