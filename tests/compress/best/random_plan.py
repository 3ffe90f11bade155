"""Plans of models that do not exist, drawn at random: what is shown, predicted and solved for is the real thing."""

import random
from typing import Any

from compress.best import around
from compress.best.acceptance import Drafts
from compress.best.budgets import Budgets
from compress.best.candidates import Measured
from compress.best.contest import ORIGINAL, Way
from compress.best.costs import WIDTHS, Costs, key_of
from compress.best.further import LEARNED, ROTATED, Further
from compress.best.original import ESTIMATED, MEASURED
from compress.best.plan import Plan
from compress.best.predict import Known, Predicted, propose
from compress.best.quality import QualityModel
from compress.best.sizes import Sizes
from compress.best.space import OPTIONS, Unit
from compress.report.schema_speed import PLAIN

LAYERS = (
    ("self_attn.qkv", 384, 256),
    ("self_attn.o_proj", 256, 256),
    ("mlp.gate_up", 1408, 256),
    ("mlp.down", 256, 704),
)


def random_known(drawn: random.Random, blocks: int) -> Known:
    """What is known of a model of so many blocks whose layers take longer and damage less the more bits they have."""
    units = []
    for block in range(blocks):
        for layer, n, k in LAYERS:
            name = f"model.layers.{block}.{layer}"
            fitting = tuple(one for one in OPTIONS if k % (one.group_size or 1) == 0)
            units.append(Unit(name, (name,), (name,), ((n, k),), block, fitting))
    products, held, damages = {}, {}, []
    for unit in units:
        damage = 10 ** drawn.uniform(-4.5, -2.5)
        row = []
        for option in unit.options:
            fine = 1.0 - (0.5 if option.group_size == 32 else 0.3 if option.group_size == 64 else 0.0) * 0.6
            row.append(0.0 if option.keeps else damage * fine * 4.0 ** (8 - option.bits) / 256)
            size = int(unit.weights * (option.bits + (16 / option.group_size if option.group_size else 0)) / 8)
            held[key_of(unit, option)] = size
            products[key_of(unit, option)] = tuple(size / 2e7 * (1 + 0.02 * w) * drawn.uniform(1, 1.1) for w in WIDTHS)
        damages.append(tuple(row))
    parts = tuple(((f"{unit.prefixes[0]}.weight", "BF16", unit.shapes[0]),) for unit in units)
    costs = Costs(products, held, tuple(0.2 + 0.01 * width for width in WIDTHS), 2_000_000, (0.05,) * len(WIDTHS))
    drafts = (Drafts("lookup", (0.6,) * 8, tuple(0.35 * 0.6**d for d in range(8)), 0.002),)
    return Known(
        tuple(units),
        Sizes(parts, tuple(units)),
        costs,
        drafts,
        QualityModel(tuple(damages), tuple(units)),
        500_000,
    )


def random_plan(seed: int, blocks: int, budgets: Budgets, damage: float | None = None) -> Plan:
    """A plan within budgets of bytes, whose candidates were measured near what was predicted of them."""
    drawn = random.Random(seed)
    known = random_known(drawn, blocks)
    damage = 0.00044 * blocks if damage is None else damage
    chosen = [propose(known, budgets, share * damage)[0] for share in (1.3, 1.0, 0.9, 0.7)]
    made = list({one.key: one for one in chosen}.values())
    measured = [_measured(drawn, one) for one in made]
    refused = {measured[0].key: "breaks the budget of quality: perplexity +1.37 %"} if len(measured) > 1 else {}
    ways = [Way(ORIGINAL, PLAIN, 310.0)]
    for one, found in zip(made, measured, strict=True):
        if found.key not in refused:
            rate = one.pace.tokens_per_second * drawn.uniform(0.85, 1.05)
            ways += [Way(found.key, PLAIN, 0.8 * rate), Way(found.key, "lookup", rate)]
    winner = made[1 if refused else 0]
    about: dict[str, Any] = {"context": 512, "batch": 1, "eval_tokens": 16384, "damage_factor": 1.2}
    about |= {"product_share": 1.07, "rest_ms": [0.1] * 5, "prompt_tokens": 512}
    about["damages"] = drawn.choice((MEASURED, ESTIMATED))
    return Plan(
        f"model-{seed}",
        budgets,
        known.units,
        sum(2 * unit.weights for unit in known.units),
        tuple(measured),
        refused,
        tuple(ways),
        {one.model: drawn.uniform(50, 90) for one in ways} if budgets.ttft is not None else {},
        winner.key,
        around.front(known, budgets, winner.damage),
        around.prices(known, budgets, winner),
        about,
        (
            Further(LEARNED, "trains scales", "name: learned\n", "", drawn.uniform(1, 9000), drawn.randrange(10**10)),
            Further(ROTATED, "rotates the weights", why="integers gain <nothing> | by it"),
        ),
    )


def _measured(drawn: random.Random, one: Predicted) -> Measured:
    figure = one.figure * drawn.uniform(0.8, 1.2)
    return Measured(
        one.key,
        {unit: str(option) for unit, option in one.assignment.items()},
        {
            "disk": float(one.disk),
            "memory": float(one.memory),
            "figure": one.figure,
            "damage": one.damage,
            "tokens_per_second": one.pace.tokens_per_second,
        },
        one.disk,
        one.memory,
        (0.7 * figure, figure),
        figure,
        dict.fromkeys(WIDTHS, 1.0),
    )
