"""What experiments/loss_curves.py runs: arms, budgets, studies, and what was claimed beforehand.

All of it is data. A study is a list of points (see `experiments.learning`); points that two studies
share are one run. Seeds of `TUNING` chose the learning rate and appear in no claim; docs/
analysis_plan.md says how the claims are judged, and was written before the seeds of `FULL` ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fpemu.recipes import RECIPES, Recipe, get_recipe, linear_recipe

Point = dict[str, Any]

VERSION = 1  # of what a point means; raise it and everything is run again
TUNING = (1, 2)

# Arms --------------------------------------------------------------------------------------------

_NVFP4, _BF16 = RECIPES["nvfp4"], RECIPES["bf16"]


def _only(gemm: str) -> Recipe:
    """NVFP4's recipe in one GEMM; the other two in BF16."""
    others = {name: getattr(_BF16, name) for name in ("fprop", "dgrad", "wgrad") if name != gemm}
    return replace(_NVFP4, name=f"nvfp4 {gemm}", **others)


#: Recipes by the names that records use: those of fpemu, and ablations.
ARMS: dict[str, str | Recipe] = {
    **{name: name for name in RECIPES},
    "nvfp4_naive": linear_recipe("nvfp4_naive", "nvfp4", "nvfp4", "nvfp4"),
    "nvfp4-sr": _NVFP4.without("sr"),
    "nvfp4-rht": _NVFP4.without("rht"),
    "nvfp4-2d": _NVFP4.without("2d"),
    "nvfp4-keep": _NVFP4.without("keep"),
    "nvfp4+sr_forward": _NVFP4.change("*", rounding="sr"),
    "nvfp4_fprop": _only("fprop"),
    "nvfp4_dgrad": _only("dgrad"),
    "nvfp4_wgrad": _only("wgrad"),
}
RECIPE_ARMS = (
    "bf16", "fp32", "fp16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "mxfp4",
    "mxfp4_sr_rht", "nvfp4_naive", "nvfp4", "nvfp4_4over6", "int8",
)  # fmt: skip
ABLATION_ARMS = (
    "bf16", "nvfp4", "nvfp4-sr", "nvfp4-rht", "nvfp4-2d", "nvfp4-keep", "nvfp4+sr_forward",
    "nvfp4_fprop", "nvfp4_dgrad", "nvfp4_wgrad",
)  # fmt: skip
TOKEN_ARMS = ("bf16", "nvfp4", "mxfp4_sr_rht")
HYBRID_ARMS = ("bf16", "fp8_block", "mxfp8", "mxfp4_sr_rht", "nvfp4")
SWITCHES = ("forward", "backward", "both")
SUMS = ("float32", "fast", "promoted")
#: NVFP4 in one part of the hybrid alone, the others in BF16; in all parts; no layer is kept.
PART_ARM = "nvfp4-keep"
#: The proxy's: a recipe for its matrices, a format for its layer-norm weights. OCP's MX scale.
PROXY_ARMS: dict[str, tuple[str | Recipe, str | None]] = {
    "fp32": ("fp32", None),
    "mx matrices": (linear_recipe("mxfp8 ocp", *["mxfp8_e4m3"] * 3), None),
    "mx matrices and norms": (linear_recipe("mxfp8 ocp", *["mxfp8_e4m3"] * 3), "mxfp8_e4m3"),
    "mx norms": ("fp32", "mxfp8_e4m3"),
}


def recipe(arm: str) -> Recipe:
    return get_recipe(ARMS[arm], "loss_curves")


#: The prediction: signal to noise of a recipe's GEMMs in dB (`experiments.prediction`), from the
#: study `predict`, written down before a fresh seed ran. FP32 adds no noise.
PREDICTED: dict[str, float] = {
    "fp16": 56.57, "bf16": 52.58, "fp8_block": 28.52, "mxfp8": 28.52, "fp8_delayed": 25.58,
    "fp8_current": 25.58, "int8": 22.94, "nvfp4_4over6": 18.04, "nvfp4_naive": 17.80,
    "nvfp4": 17.15, "mxfp4_sr_rht": 15.69, "mxfp4": 15.55,
}  # fmt: skip

# Budgets -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """How much is run.

    Parameters
    ----------
    gpt, hybrid, proxy : dict
        Sizes of the models.
    steps, warmup, batch : int
        Of a run of normal length; a batch is so many windows of ``context`` bytes.
    lengths : tuple of float
        Lengths of the token study, in runs of normal length.
    rate : float
        The learning rate of every study but tune, chaos and proxy.
    rates : tuple of float
        Those of tune and chaos.
    seeds : tuple of int
        Fresh ones, paired over arms.
    few : int
        How many of them the hybrid takes; the chaos study takes one more at other rates.
    held_out : int
        Bytes of each kind of text that a run is judged on.
    """

    name: str
    gpt: dict[str, int]
    hybrid: dict[str, Any]
    proxy: dict[str, int]
    steps: int
    hybrid_steps: int
    sums_steps: int
    proxy_steps: int
    warmup: int
    batch: int
    seeds: tuple[int, ...]
    few: int
    held_out: int = 1 << 13
    lengths: tuple[float, ...] = (0.5, 1.0, 1.5)
    rate: float = 1e-3
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    proxy_rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    proxy_seeds: int = 4


FULL = Budget(
    "full",
    gpt={"width": 128, "layers": 3, "heads": 4, "context": 128},
    hybrid={"width": 128, "pattern": "MFMFAF", "context": 128},
    proxy={"width": 128, "layers": 4},
    steps=480,
    hybrid_steps=300,
    sums_steps=120,
    proxy_steps=600,
    warmup=40,
    batch=8,
    seeds=(11, 12, 13, 14, 15, 16),
    few=3,
    held_out=1 << 15,
)
DEFAULT = Budget(
    "default",
    gpt={"width": 64, "layers": 2, "heads": 2, "context": 64},
    hybrid={"width": 64, "pattern": "MFAF", "context": 64, "head_size": 8, "state": 8},
    proxy={"width": 64, "layers": 2},
    steps=150,
    hybrid_steps=60,
    sums_steps=60,
    proxy_steps=150,
    warmup=20,
    batch=8,
    seeds=(31, 32, 33),
    few=2,
    proxy_seeds=2,
)
QUICK = Budget(
    "quick",
    gpt={"width": 32, "layers": 1, "heads": 2, "context": 32},
    hybrid={"width": 32, "pattern": "MFA", "context": 32, "head_size": 4, "state": 8},
    proxy={"width": 32, "layers": 1},
    steps=20,
    hybrid_steps=4,
    sums_steps=4,
    proxy_steps=20,
    warmup=4,
    batch=4,
    seeds=(21, 22),
    few=2,
    rates=(1e-3, 3e-3),
    proxy_rates=(1e-3, 1e-2),
    proxy_seeds=2,
)

# Points ------------------------------------------------------------------------------------------


def point(budget: Budget, arm: str, seed: int, **changes: Any) -> Point:
    """A GPT run of normal length, but for `changes`."""
    made: Point = {
        "version": VERSION,
        "task": "gpt",
        "model": budget.gpt,
        "arm": arm,
        "scaler": "dynamic" if arm == "fp16" else "none",
        "rate": budget.rate,
        "steps": budget.steps,
        "batch": budget.batch,
        "warmup": budget.warmup,
        "held_out": budget.held_out,
        "seed": seed,
        "rounding": seed,
        "perturb": "none",
        "switch": "none",
        "sums": "library",
        "device": "cpu",
    }
    return {**made, **changes}


#: Letters of the hybrid's pattern.
PARTS = {"M": "Mamba", "A": "attention", "F": "feed-forward"}


def cell(p: Point) -> str:
    """What runs of several seeds have in common, in words: the arm and what was done to it.

    >>> cell(point(QUICK, "nvfp4", 1, switch="forward"))
    'nvfp4, forward bf16 at the end'
    """
    words = [p["arm"]]
    words += [f"{p['switch']} bf16 at the end"] if p["switch"] != "none" else []
    words += [f"in {PARTS[p['only']]} alone"] if "only" in p else []
    words += [f"{p['sums']} sums"] if p["sums"] != "library" else []
    words += ["one ulp"] if p["perturb"] == "ulp" else []
    return ", ".join(words)


#: FP32, and FP32 from one ulp beside: the chaos floor of a study of runs of normal length.
FLOOR: tuple[dict[str, Any], ...] = ({"arm": "fp32"}, {"arm": "fp32", "perturb": "ulp"})


def _grid(budget: Budget, rows: Sequence[dict[str, Any]], **fields: Any) -> list[Point]:
    """Every row, with every fresh seed."""
    return [point(budget, seed=seed, **row, **fields) for seed in budget.seeds for row in rows]


def _arms(*names: str) -> list[dict[str, Any]]:
    return [{"arm": name} for name in names]


def recipes(budget: Budget) -> list[Point]:
    return _grid(budget, [*_arms(*RECIPE_ARMS), FLOOR[1]])


def ablations(budget: Budget) -> list[Point]:
    return _grid(budget, [*_arms(*ABLATION_ARMS), *FLOOR])


def tune(budget: Budget) -> list[Point]:
    return [
        point(budget, arm, seed, rate=rate)
        for rate in budget.rates for seed in TUNING for arm in ("bf16", "fp32")
    ]  # fmt: skip


def predict(budget: Budget) -> list[Point]:
    """BF16 on a tuning seed; its tensors are then cast by every recipe."""
    return [point(budget, "bf16", TUNING[0], task="qsnr")]


def chaos(budget: Budget) -> list[Point]:
    rows = (("fp32", "none"), ("bf16", "none"), ("fp32", "ulp"))
    return [
        point(budget, arm, seed, rate=rate, perturb=perturb)
        for rate in sorted(budget.rates, key=lambda r: r != budget.rate)
        for seed in (budget.seeds if rate == budget.rate else budget.seeds[: budget.few + 1])
        for arm, perturb in rows
    ]


def tokens(budget: Budget) -> list[Point]:
    rows = [
        {"arm": arm, "steps": round(length * budget.steps)}
        for length in budget.lengths for arm in TOKEN_ARMS
    ]  # fmt: skip
    return _grid(budget, [*rows, *FLOOR])


def switch(budget: Budget) -> list[Point]:
    rows = [{"arm": "nvfp4", "switch": which} for which in SWITCHES]
    return _grid(budget, [*_arms("bf16", "nvfp4"), *rows, *FLOOR])


def hybrid(budget: Budget) -> list[Point]:
    few = replace(budget, seeds=budget.seeds[: budget.few])
    fields = {"task": "hybrid", "model": budget.hybrid, "steps": budget.hybrid_steps}
    alone = [
        {"arm": PART_ARM, "only": letter} for letter in PARTS if letter in budget.hybrid["pattern"]
    ]
    rows = [*_arms(*HYBRID_ARMS, PART_ARM), *alone, {"arm": "bf16", "perturb": "ulp"}]
    return _grid(few, rows, **fields)


def parts(budget: Budget) -> list[Point]:
    """BF16 on both models; the tensors at the end are then measured (2: weight gradients, too)."""
    few = replace(budget, seeds=budget.seeds[: budget.few])
    models = ((budget.gpt, budget.steps), (budget.hybrid, budget.hybrid_steps))
    return [
        p for sizes, steps in models
        for p in _grid(few, _arms("bf16"), task="parts", model=sizes, steps=steps, version=2)
    ]  # fmt: skip


def accumulation(budget: Budget) -> list[Point]:
    rows = [{"arm": "fp8", "sums": how} for how in SUMS]
    moved = {"arm": "fp8", "sums": "float32", "perturb": "ulp"}
    return _grid(budget, [*rows, moved], steps=budget.sums_steps)


def proxy(budget: Budget) -> list[Point]:
    return [
        {
            "version": VERSION, "task": "proxy", "model": budget.proxy, "arm": arm, "rate": rate,
            "steps": budget.proxy_steps, "batch": 256, "seed": seed, "rounding": seed,
            "device": "cpu",
        }
        for seed in range(budget.seeds[0], budget.seeds[0] + budget.proxy_seeds)
        for rate in budget.proxy_rates
        for arm in PROXY_ARMS
    ]  # fmt: skip


#: In the order in which they run.
STUDIES: dict[str, Callable[[Budget], list[Point]]] = {
    "recipes": recipes,
    "ablations": ablations,
    "tokens": tokens,
    "chaos": chaos,
    "switch": switch,
    "accumulation": accumulation,
    "hybrid": hybrid,
    "parts": parts,
    "proxy": proxy,
    "tune": tune,
    "predict": predict,
}


# What was claimed beforehand ---------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """The loss of cell `arm` is worse or better than that of `reference`, or equal to it."""

    study: str
    arm: str
    says: str  # "worse", "better" or "equal"
    reference: str


_ENDS = {which: f"nvfp4, {which} bf16 at the end" for which in SWITCHES}
CLAIMS = (
    *(
        Claim("recipes", arm, "equal", "bf16")
        for arm in ("fp32", "fp16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8")
    ),
    *(
        Claim("recipes", arm, "worse", "bf16")
        for arm in ("int8", "mxfp4", "nvfp4_naive", "nvfp4")
    ),
    Claim("recipes", "mxfp4", "worse", "nvfp4_naive"),
    Claim("recipes", "mxfp4_sr_rht", "worse", "nvfp4"),
    Claim("recipes", "nvfp4_4over6", "better", "nvfp4"),
    *(
        Claim("ablations", arm, "worse", "nvfp4")
        for arm in ("nvfp4-sr", "nvfp4-rht", "nvfp4-2d", "nvfp4-keep", "nvfp4+sr_forward")
    ),
    *(
        Claim("ablations", arm, "worse", "bf16")
        for arm in ("nvfp4_fprop", "nvfp4_dgrad", "nvfp4_wgrad")
    ),
    *(Claim("switch", _ENDS[which], "better", "nvfp4") for which in SWITCHES),
    Claim("accumulation", "fp8, fast sums", "worse", "fp8, float32 sums"),
    Claim("accumulation", "fp8, promoted sums", "equal", "fp8, float32 sums"),
)  # fmt: skip
