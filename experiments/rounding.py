"""Bias and noise of every quantizer, and what they do to gradients. Stochastic rounding by exact law.

Casts Gaussian values and the tensors of a trained small GPT, several seeds of both, and measures the
magnitude bias sum (q-x) x / sum x^2 beside the SQNR. Expectations of stochastic rounding (SR) are
exact: how many random words round an element up is counted, not sampled (experiments/expectation.py).
It answers:

  map        where each quantizer lies, and which part of its bias and noise comes from the scale
             (values beyond the largest code), the dead zone (values whose nearest code is zero)
             and the grid (all others); the three sum to the whole
  scales     is NVFP4's stochastic rounding unbiased, its E4M3 scales being rounded to nearest?
             Block maxima that clip, their bias and that of the others, and what scales rounded up
             would change
  bits       how many random bits are enough, for each format and source dtype
  gemms      per GEMM and recipe: projection and cosine with the exact result, bias floor, SNR over
             draws, and how the mean over draws converges
  steps      the same for the weight gradient of a whole training step, beside the sqrt(3) rule of
             arXiv 2505.19115: quantized training loses its use where |g| < sqrt(3) sigma sqrt(d)

Intervals are Student's t, 95 %, over seeds (of data, or of training runs). Writes tables to the
terminal, a record (JSON) to results/local or, with --full, results/full (with --out DIR: to DIR), and
figures. Each seed is kept in runs/ there: stop it at any time, start it again, and it goes on.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import harness, model  # before torch: sets how its threads wait

# isort: split

import numpy as np
import torch
from torch import Tensor

import fpemu
from experiments import expectation, runs, underflow
from experiments.verdicts import interval
from fpemu.formats import BlockFormat, Format
from fpemu.recipes import GEMMS, OPERANDS, RECIPES, Operand, Recipe, linear_recipe, row_of

NAME = "rounding"
UP = expectation.UP
Row = Format | BlockFormat

# What is studied ---------------------------------------------------------------------------------

NEAREST_AND_STOCHASTIC = (
    "fp8_tensor_e4m3", "fp8_tensor_e5m2", "int8_tensor", "mxfp8_e4m3", "mxfp8_e4m3/rceil",
    "mxfp6_e2m3/rceil", "mxfp4", "mxfp4/rceil", "mxfp4/even", "nvfp4", UP,
)  # fmt: skip
NEAREST = (
    "fp8_block_e4m3", "mxfp8_e5m2/rceil", "mxfp6_e3m2/rceil", "mxint8", "mxfp4/ceil", "nvfp4/2d",
    "nvfp4/te-4over6-mae-256", "nvfp4/fouroversix-mse", "nvfp4/torchao", "mxfp4/qutlass-absmax",
    "mxfp4/microxcaling-nearest",
)  # fmt: skip
TOWARD_ZERO = ("mxfp4/rceil", "nvfp4")
#: Quantizers of the map: format and rounding. ``"rne"`` is a dialect's own tie rule.
QUANTIZERS: tuple[tuple[str | BlockFormat, str], ...] = (
    *((fmt, way) for fmt in NEAREST_AND_STOCHASTIC for way in ("rne", "sr")),
    *((fmt, "rne") for fmt in NEAREST),
    *((fmt, "rtz") for fmt in TOWARD_ZERO),
)
CAUSES = ("scale", "dead", "grid")

#: Formats of the question about scales.
SCALED = ("nvfp4", UP, "nvfp4/te-4over6-mae-256", "mxfp4", "mxfp4/rceil")

#: Formats of the question about random bits: MX and FP8 elements, NVFP4, and BF16 from float32.
BIT_FORMATS = ("nvfp4", "mxfp4/rceil", "e4m3", "fp8_tensor_e4m3", "mxfp8_e4m3/rceil", "bf16")
#: Gradients are far below E4M3's range without a scale: a loss scale, as one would have.
LOSS_SCALE = {"e4m3": 2.0**18}
SOURCES = ("float32", "bfloat16")
ULPS = 2.0**-20  # losses up to this, relative, are float32's roundings of a scale
ENOUGH = 1e-4  # of the magnitude: bias that too few random bits may add

_SR = Operand("nvfp4", rounding="sr")
#: Recipes of the question about gradients. The last three quantize nothing but dY.
ARMS: dict[str, Recipe] = {
    **{
        name: RECIPES[name]
        for name in ("bf16", "fp8_current", "fp8_block", "mxfp8", "int8", "mxfp4", "mxfp4_sr_rht")
    },
    "nvfp4 nearest": RECIPES["nvfp4"].without("sr", "rht", "2d"),
    "nvfp4 -sr": RECIPES["nvfp4"].without("sr"),
    "nvfp4 -rht": RECIPES["nvfp4"].without("rht"),
    "nvfp4": RECIPES["nvfp4"],
    "nvfp4 dy up": RECIPES["nvfp4"].change("*.dy", fmt=UP),
    "nvfp4 sr all": RECIPES["nvfp4"].change("*", rounding="sr"),
    "nvfp4_4over6": RECIPES["nvfp4_4over6"],
    "dy nvfp4 sr": linear_recipe("dy", None, None, _SR),
    "dy nvfp4/up sr": linear_recipe("dy", None, None, Operand(UP, rounding="sr")),
    "dy mxfp4 sr": linear_recipe("dy", None, None, Operand("mxfp4/rceil", rounding="sr")),
}
ROOT_3 = math.sqrt(3)

DEFINITIONS = {
    "bias": "sum (E[q] - x) x / sum x^2 over a tensor; E: exact, over the random words of SR",
    "noise": "sum E[(q - x)^2] / sum x^2; SQNR in dB is -10 log10 of its mean over tensors",
    "scale": "part of the sum over the values beyond the largest code (they clip), those of `dead`"
    " left out",
    "dead": "part over the values != 0 that the format rounds to zero when it rounds to nearest",
    "grid": "part over all other values; scale + dead + grid = the whole, for bias and for noise",
    "clipped": "block maxima beyond the largest code, by more than 2^-20 of themselves (roundings of"
    " float32 scales) / blocks that are not all zero",
    "worst": "largest loss of a clipped value, (|x| - |q|) / |x|",
    "maxima, others": "bias over the block maxima alone, and over all other values alone, each by"
    " its own sum x^2",
    "cut": "bias that n random bits add to that of 32: sum (E_n[q] - E_32[q]) x / sum x^2",
    "enough": f"smallest n with |cut| <= {ENOUGH:g}, and the smallest n with no cut at all",
    "projection": "<E g', g> / |g|^2, g exact (float64), g' of the recipe",
    "floor": "|E g' - g| / |g|: what no number of draws removes",
    "snr": "|E g'|^2 / Tr Var g' over draws; null without random words",
    "ratio": "|g| / sqrt(E |g' - g|^2), to compare with sqrt(3); gradients of one batch",
    "cosine": "of one draw with g, mean over draws",
    "interval": "mean, low and high: Student's t over seeds, 95 %; seeds: the value of each",
}


@dataclass(frozen=True)
class Budget:
    """How much to do."""

    shape: model.Shape
    training: model.Training
    blocks: tuple[int, ...]  # transformer blocks whose linear layers are studied
    windows: int  # of text that they are studied on
    seeds: int
    gaussian: tuple[int, int]  # shape of each Gaussian tensor
    draws: int  # of each GEMM
    step_draws: int  # of each whole training step


QUICK = Budget(
    model.Shape(width=128, layers=1), model.Training(steps=20, warmup=5, batch=2),
    blocks=(0,), windows=2, seeds=2, gaussian=(32, 128), draws=2, step_draws=2,
)  # fmt: skip
DEFAULT = Budget(
    model.Shape(width=128, layers=3), model.Training(steps=200, batch=4),
    blocks=(0, 2), windows=2, seeds=6, gaussian=(128, 256), draws=8, step_draws=4,
)  # fmt: skip
FULL = Budget(
    model.Shape(width=256, layers=4), model.Training(steps=300, batch=8),
    blocks=(0, 3), windows=4, seeds=8, gaussian=(256, 256), draws=32, step_draws=16,
)  # fmt: skip


def name_of(fmt: str | Row) -> str:
    return fmt if isinstance(fmt, str) else fmt.name


# One tensor and one quantizer --------------------------------------------------------------------


def outside(x: np.ndarray, fmt: str | Row, axis: int = -1) -> np.ndarray:
    """Where the value that is cast lies beyond the format's largest: no gradient passes there."""
    t = torch.tensor(x, requires_grad=True)
    fpemu.quantize(t, fmt, axis=axis).sum().backward()
    assert t.grad is not None
    return (t.grad == 0).numpy()


def causes(x: np.ndarray, fmt: str | Row, axis: int = -1) -> dict[str, np.ndarray]:
    """Masks that part the elements by what happens to them (`DEFINITIONS`)."""
    nearest = fpemu.quantize(x, fmt, axis=axis, dtype="float64")
    dead = (x != 0) & (nearest == 0)
    scale = outside(x, fmt, axis) & ~dead
    return {"scale": scale, "dead": dead, "grid": ~(scale | dead)}


def moments(
    x: np.ndarray, fmt: str | Row, rounding: str, axis: int = -1
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of every quantized element, float64."""
    if rounding == "sr":
        rounded = expectation.chances(x, fmt, axis)
        return expectation.mean(rounded), expectation.variance(rounded)
    q = fpemu.quantize(x, fmt, rounding=rounding, axis=axis, dtype="float64")
    return q, np.zeros_like(q)


def split(x: np.ndarray, fmt: str | Row, rounding: str, axis: int = -1) -> dict[str, float]:
    """Bias and noise of a tensor, each as a whole and by cause."""
    mean, variance = moments(x, fmt, rounding, axis)
    wide = x.astype(np.float64)
    energy = float((wide**2).sum())
    shift = (mean - wide) * wide / energy
    noise = ((mean - wide) ** 2 + variance) / energy
    row = {"bias": float(shift.sum()), "noise": float(noise.sum())}
    for cause, where in causes(x, fmt, axis).items():
        row[cause] = float(shift[where].sum())
        row[f"{cause} noise"] = float(noise[where].sum())
    return row


def by_blocks(x: np.ndarray, size: int, axis: int) -> np.ndarray:
    """x with its blocks as rows."""
    return np.moveaxis(x, axis, -1).reshape(-1, size)


def maxima(x: np.ndarray, fmt: str | BlockFormat, rounding: str, axis: int) -> dict[str, float]:
    """What happens to the largest value of each block, and to all others."""
    row = fpemu.get_format(fmt)
    assert isinstance(row, BlockFormat) and row.block is not None
    size = row.block[-1]
    mean, variance = (by_blocks(a, size, axis) for a in moments(x, row, rounding, axis))
    clips = by_blocks(outside(x, row, axis), size, axis)
    values = by_blocks(x, size, axis).astype(np.float64)
    used = (values != 0).any(axis=1)
    mean, variance, clips, values = (a[used] for a in (mean, variance, clips, values))
    largest = np.zeros(values.shape, bool)
    np.put_along_axis(largest, np.abs(values).argmax(axis=1)[:, None], True, axis=1)
    shift, energy = (mean - values) * values, values**2
    lost = np.zeros(values.shape)
    lost[clips] = 1 - np.abs(mean[clips]) / np.abs(values[clips])
    return {
        "clipped": float((lost > ULPS)[largest].mean()),
        "worst": float(lost.max()),
        "maxima": float(shift[largest].sum() / energy[largest].sum()),
        "others": float(shift[~largest].sum() / energy[~largest].sum()),
        "bias": float(shift.sum() / energy.sum()),
        "noise": float(((mean - values) ** 2 + variance).sum() / energy.sum()),
    }


def bits_row(x: np.ndarray, fmt: str) -> dict[str, Any]:
    """What n random bits, 1 to 32, add to the bias; and the bias of 32.

    ``uniform``: what fractions spread evenly over a step would make of it, -2^-(n+1) steps.
    """
    rounded = expectation.chances(x, fmt)
    wide = x.astype(np.float64)
    energy = float((wide**2).sum())
    whole = expectation.mean(rounded)
    cut = [
        float(((expectation.mean(rounded, n) - whole) * wide).sum() / energy) for n in range(1, 33)
    ]
    step = np.abs(rounded.up - rounded.down)
    reach = float((step * np.abs(wide)).sum() / energy)
    return {
        "cut": cut,
        "uniform": [-reach * 2.0 ** -(n + 1) for n in range(1, 33)],
        "bias": float(((whole - wide) * wide).sum() / energy),
    }


# GEMMs -------------------------------------------------------------------------------------------

Mats = dict[str, Tensor]  # "x", "w", "dy": float32


def arrange(gemm: str, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The stored operands of a GEMM as the two matrices that it multiplies."""
    return {"fprop": (a, b.T), "dgrad": (a, b), "wgrad": (a.T, b)}[gemm]


def operand_moments(x: Tensor, name: str, operand: Operand) -> tuple[Tensor, Tensor]:
    """Mean and variance of an operand, in the basis that the GEMM multiplies in."""
    values = x.numpy()
    axis = OPERANDS[name] if operand.blocks == "contraction" else -1 - OPERANDS[name]
    turn = operand.transform
    if turn is not None:
        values = fpemu.hadamard(values, size=turn.size, signs=turn.signs, axis=OPERANDS[name])
    fmt = row_of(operand)
    if fmt is None:
        mean = values.astype(np.float64)
        return torch.from_numpy(mean), torch.zeros_like(torch.from_numpy(mean))
    return tuple(torch.from_numpy(a) for a in moments(values, fmt, operand.rounding, axis))  # type: ignore[return-value]


def gemm_moments(
    recipe: Recipe, gemm: str, mats: Mats, known: dict[Any, tuple[Tensor, Tensor]]
) -> tuple[Tensor, float]:
    """Mean of a GEMM's result over the random words, and the sum of its elements' variances.

    Both are exact, as the words of the two operands are independent. `known` keeps the moments of
    operands that recipes share.
    """
    found = []
    for tensor in GEMMS[gemm]:
        name = f"{gemm}.{tensor}"
        operand = recipe.operand(name)
        key = (tensor, OPERANDS[name], operand)
        if key not in known:
            known[key] = operand_moments(mats[tensor], name, operand)
        found.append(known[key])
    (a, va), (b, vb) = found
    a, b = arrange(gemm, a, b)
    va, vb = arrange(gemm, va, vb)
    mean = a @ b
    variance = float((va @ b**2 + a**2 @ vb + va @ vb).sum())
    out = getattr(recipe, gemm).out
    if out is not None:  # only recipes without random words round their results
        mean = fpemu.quantize(mean, out, dtype=torch.float64)
    return mean, variance


def exact_gemms(mats: Mats) -> Mats:
    """The three products in float64."""
    wide = {name: m.double() for name, m in mats.items()}
    return {
        gemm: torch.matmul(*arrange(gemm, *(wide[t] for t in tensors)))
        for gemm, tensors in GEMMS.items()
    }


def drawn_gemms(recipe: Recipe, mats: Mats, seed: int) -> Mats:
    """The three products as the training layer computes them, one draw."""
    x = mats["x"].clone().requires_grad_()
    w = mats["w"].clone().requires_grad_()
    y = fpemu.nn.linear(x, w, recipe=recipe, seed=seed)
    y.backward(mats["dy"])
    assert x.grad is not None and w.grad is not None
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": w.grad}


def compared(g: Tensor, mean: Tensor, variance: float) -> dict[str, float | None]:
    """A result's mean and variance against the exact one."""
    energy = float((g * g).sum())
    floor = float(((mean - g) ** 2).sum()) / energy
    error = floor + variance / energy
    return {
        "projection": float((mean * g).sum()) / energy,
        "floor": floor**0.5,
        "error": error**0.5,
        "ratio": error**-0.5 if error else None,
        "snr": float((mean * mean).sum()) / variance if variance else None,
    }


def gemm_rows(mats: Mats, seed: int, draws: int) -> Iterator[dict[str, Any]]:
    """Every arm and GEMM of a layer: exact moments, and draws of the training layer beside them.

    ``sampled``: |mean of n draws - g| / |g| for n = 1, 2, 4, ...
    """
    exact = exact_gemms(mats)
    known: dict[Any, tuple[Tensor, Tensor]] = {}
    for arm, recipe in ARMS.items():
        chance = {
            gemm: any(recipe.operand(f"{gemm}.{t}").rounding == "sr" for t in tensors)
            for gemm, tensors in GEMMS.items()
        }
        sums = {gemm: torch.zeros_like(g) for gemm, g in exact.items()}
        cosines: dict[str, list[float]] = {gemm: [] for gemm in GEMMS}
        errors: dict[str, list[float]] = {gemm: [] for gemm in GEMMS}
        for n in range(1, 1 + (draws if any(chance.values()) else 1)):
            for gemm, result in drawn_gemms(recipe, mats, seed * 1000 + n).items():
                g = exact[gemm]
                sums[gemm] += result.double()
                cosines[gemm].append(cosine(result.double(), g))
                if n & (n - 1) == 0:
                    errors[gemm].append(float((sums[gemm] / n - g).norm() / g.norm()))
        for gemm, g in exact.items():
            mean, variance = gemm_moments(recipe, gemm, mats, known)
            yield {
                "arm": arm, "gemm": gemm, **compared(g, mean, variance),
                "cosine": sum(cosines[gemm]) / len(cosines[gemm]),
                "sampled": errors[gemm] if chance[gemm] else None,
            }  # fmt: skip


def cosine(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum() / (a.norm() * b.norm()))


def step_rows(
    gpt: model.GPT, batch: tuple[Tensor, Tensor], seed: int, draws: int
) -> Iterator[dict[str, Any]]:
    """The weight gradient of a whole step, all linear layers of the blocks together.

    Forward and backward pass are the recipe's, so the noise of every GEMM before it is in it. The
    variance is the unbiased estimate from the draws, and the floor, where there are draws, is
    estimated too: |mean - g|^2 - variance / draws.
    """

    def gradient(net: model.GPT) -> Tensor:
        net.zero_grad()
        model.next_byte_loss(net, *batch).backward()
        grads = [p.weight.grad for n, p in net.linears().items() if n != "head"]
        return torch.cat([p.flatten() for p in grads if p is not None]).double()

    g = gradient(gpt)
    energy = float((g * g).sum())
    for arm, recipe in ARMS.items():
        net = copy.deepcopy(gpt)
        fpemu.nn.convert(net.blocks, recipe, keep=(), seed=seed, verbose=False)
        random = any(row.rounding == "sr" for row in recipe.operands().values())
        results = torch.stack([gradient(net) for _ in range(draws if random else 1)])
        mean = results.mean(0)
        variance = float(results.var(0).sum()) if random else 0.0
        floor = float(((mean - g) ** 2).sum()) - variance / len(results)
        error = float(((results - g) ** 2).sum(1).mean())
        yield {
            "arm": arm,
            "projection": float((mean * g).sum()) / energy,
            "cosine": sum(cosine(r, g) for r in results) / len(results),
            "floor": (max(floor, 0.0) / energy) ** 0.5,
            "ratio": (energy / error) ** 0.5 if error else None,
            "snr": float((mean * mean).sum()) / variance if variance else None,
        }


# One seed ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Captured:
    """A trained GPT, one more batch, and the tensors of its forward and backward pass by layer."""

    gpt: model.GPT
    batch: tuple[Tensor, Tensor]
    layers: dict[str, Mats]
    loss: float


def capture(budget: Budget, text: model.Corpus, seed: int, device: str) -> Captured:
    """Train, and keep X, W and dY of the chosen blocks' linear layers for a batch that follows."""
    plan, short = budget.training, {"weight": "w", "activation": "x", "gradient": "dy"}
    layers: dict[str, Mats] = {}

    def keep(kind: str, name: str, tensor: Tensor) -> None:
        block = name.split(".")[0]
        if kind in short and block.isdecimal() and int(block) in budget.blocks:
            layers.setdefault(name, {})[short[kind]] = tensor.detach().clone()

    gpt, losses = model.train(budget.shape, plan, text, seed, device)
    gpt.cpu()
    order = torch.Generator().manual_seed(seed + (2 << 32))
    starts = torch.randint(
        len(text.train) - budget.shape.context, (budget.windows,), generator=order
    )
    batch = model.windows(text.train, starts, budget.shape.context)
    stop = underflow.watch(gpt, keep)
    model.next_byte_loss(gpt, *batch).backward()
    stop()
    return Captured(gpt, batch, layers, losses[-1])


#: Deviations of the Gaussian tensors, evenly over a binade: what a power-of-two scale does to a
#: block depends on where in its binade the block's largest value lies.
SIGMAS = tuple(2.0 ** (k / 8) for k in range(8))


def gaussians(shape: tuple[int, int], seed: int) -> list[np.ndarray]:
    """A tensor for each of `SIGMAS`."""
    rng = np.random.default_rng([seed, 1])
    return [np.float32(s) * rng.standard_normal(shape, dtype=np.float32) for s in SIGMAS]


def tensors_of(captured: Captured, gaussian: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Tensors by kind, blocks along the last axis (that of the first GEMM that reads them)."""
    layers = captured.layers.values()
    return {
        "gaussian": gaussian,
        "gradient": [m["dy"].numpy() for m in layers],
        "activation": [m["x"].numpy() for m in layers],
        "weight": [m["w"].numpy() for m in layers],
    }


def averaged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over tensors, key by key; lists element by element; None where any is None."""
    return {key: _average([row[key] for row in rows]) for key in rows[0]}


def _average(values: Sequence[Any]) -> Any:
    if any(v is None for v in values):
        return None
    if isinstance(values[0], list):
        return [sum(column) / len(values) for column in zip(*values, strict=True)]
    return sum(values) / len(values)


def map_rows(tensors: dict[str, list[np.ndarray]]) -> Iterator[dict[str, Any]]:
    for kind, arrays in tensors.items():
        for fmt, rounding in QUANTIZERS:
            row = averaged([split(x, fmt, rounding) for x in arrays])
            yield {"data": kind, "format": name_of(fmt), "rounding": rounding, **row}


#: Views of dY: what each GEMM quantizes, and along which axis.
VIEWS = {"dgrad": -1, "wgrad": 0, "wgrad rotated": 0}


def scale_rows(tensors: dict[str, list[np.ndarray]]) -> Iterator[dict[str, Any]]:
    data = {"gaussian": [(x, -1) for x in tensors["gaussian"]]}
    for view, axis in VIEWS.items():
        turned = [
            fpemu.hadamard(x, size=16, signs="te", axis=0) if view.endswith("rotated") else x
            for x in tensors["gradient"]
        ]
        data[f"gradient, {view}"] = [(x, axis) for x in turned]
    for kind, cases in data.items():
        for fmt in SCALED:
            for rounding in ("rne", "sr"):
                row = averaged([maxima(x, fmt, rounding, axis) for x, axis in cases])
                yield {"data": kind, "format": name_of(fmt), "rounding": rounding, **row}


def bit_rows(tensors: dict[str, list[np.ndarray]]) -> Iterator[dict[str, Any]]:
    for kind in ("gaussian", "gradient"):
        for source in SOURCES:
            for fmt in BIT_FORMATS:
                if (fmt, source) == ("bf16", "bfloat16"):
                    continue  # nothing to round
                scale = LOSS_SCALE.get(fmt, 1.0) if kind == "gradient" else 1.0
                arrays = [x * np.float32(scale) for x in tensors[kind]]
                if source == "bfloat16":
                    arrays = [fpemu.quantize(x, "bf16") for x in arrays]
                row = averaged([bits_row(x, fmt) for x in arrays])
                yield {"data": kind, "source": source, "format": fmt, **row}


def measure(budget: Budget, text: model.Corpus, seed: int, device: str) -> dict[str, Any]:
    """Everything about one seed: rows of every question."""
    captured = capture(budget, text, seed, device)
    tensors = tensors_of(captured, gaussians(budget.gaussian, seed))
    gemms: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number, mats in enumerate(captured.layers.values()):
        for row in gemm_rows(mats, seed * 1000 + number, budget.draws):
            gemms.setdefault((row.pop("arm"), row.pop("gemm")), []).append(row)
    return {
        "map": list(map_rows(tensors)),
        "scales": list(scale_rows(tensors)),
        "bits": list(bit_rows(tensors)),
        "gemms": [
            {"arm": arm, "gemm": gemm, **averaged(rows)} for (arm, gemm), rows in gemms.items()
        ],
        "steps": list(step_rows(captured.gpt, captured.batch, seed, budget.step_draws)),
        "loss": captured.loss,
    }


# All seeds ---------------------------------------------------------------------------------------

KEYS = ("data", "format", "rounding", "source", "arm", "gemm")


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and interval over seeds, and the seeds' values."""
    mean, low, high = interval(values)
    return {"mean": mean, "low": low, "high": high, "seeds": list(values)}


def pooled(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of every seed as one: numbers as `spread`, lists as means."""
    first = rows[0]
    one: dict[str, Any] = {key: first[key] for key in KEYS if key in first}
    for key in first:
        values = [row[key] for row in rows]
        if key in one:
            continue
        if any(v is None for v in values):
            one[key] = None
        else:
            one[key] = _average(values) if isinstance(first[key], list) else spread(values)
    return one


def decibels(noise: float) -> float:
    return -10 * math.log10(noise) if noise > 0 else math.inf


def finished(tables: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Adds what follows from the pooled numbers: SQNR, and how many bits are enough."""
    for row in (*tables["map"], *tables["scales"]):
        row["sqnr_db"] = decibels(row["noise"]["mean"])
    for row in tables["bits"]:
        row["enough"] = first_bits(row["cut"], ENOUGH)
        row["all"] = first_bits(row["cut"], 0.0)
    return tables


def first_bits(cut: Sequence[float], limit: float) -> int | None:
    """The number of random bits from which on the cut stays within a limit; None above 31."""
    fits = [abs(c) <= limit for c in cut]
    n = len(fits)
    while n and fits[n - 1]:
        n -= 1
    return n + 1 if n + 1 < len(cut) else None


def points_of(budget: Budget, seed: int, device: str) -> list[dict[str, Any]]:
    """The run of each seed as plain values: whatever its result depends on, this code included."""
    code = hashlib.sha256()
    for module in (Path(__file__), Path(str(expectation.__file__))):
        code.update(module.read_bytes())
    common = {**asdict(budget), "text": model.corpus().sha256, "code": code.hexdigest()[:16]}
    del common["seeds"]
    return [
        {"task": NAME, "seed": seed * 1000 + k, "device": device, **common}
        for k in range(budget.seeds)
    ]


def compute(point: dict[str, Any]) -> dict[str, Any]:
    """The metrics of one run."""
    fields = {key: point[key] for key in Budget.__dataclass_fields__ if key in point}
    budget = Budget(
        **{
            **fields,
            "shape": model.Shape(**point["shape"]),
            "training": model.Training(**point["training"]),
            "seeds": 1,
        }
    )
    return measure(budget, model.corpus(), point["seed"], point["device"])


def measured(
    points: Sequence[dict[str, Any]],
    folder: Path,
    argv: Sequence[str],
    device: str,
    workers: int = 1,
) -> list[dict[str, Any]]:
    """The records of all runs. Those that are in `folder` are read, so that a run can go on.

    Parameters
    ----------
    workers : int
        Processes, of one thread each: most of the work is in Python.

    Raises
    ------
    RuntimeError
        Where a run failed; it is tried again next time.
    """
    runs.forget_failures(folder, points)
    runs.pool(folder, points, compute, NAME, argv, device, workers)
    found = []
    for point in points:
        record = runs.read(folder, point)
        if record is None or record["status"] != "ok":
            said = record["error"] if record else "its process ended before it"
            raise RuntimeError(f"seed {point['seed']}: {said}")
        found.append(record)
    return found


def collected(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All seeds as one: every table pooled, and where each run came from."""
    found = [record["metrics"] for record in records]
    tables = {
        key: [pooled(rows) for rows in zip(*(f[key] for f in found), strict=True)]
        for key in ("map", "scales", "bits", "gemms", "steps")
    }
    origins = [record["provenance"] for record in records]
    return {
        **finished(tables),
        "loss": spread([f["loss"] for f in found]),
        "runs": [
            {"seed": r["point"]["seed"], "seconds": o["seconds"], "git": o["git"]}
            for r, o in zip(records, origins, strict=True)
        ],
        "definitions": DEFINITIONS,
    }


# Tables ------------------------------------------------------------------------------------------


def percent(value: float) -> str:
    """A signed share in percent, at most six characters; float32's roundings show as 0."""
    return "0" if abs(value) < 5e-7 else f"{100 * value:+.2f}"


def tiny_percent(value: float) -> str:
    """A signed share in percent, whatever its size, at most six characters."""
    return "0" if value == 0 else f"{100 * value:.{'2f' if abs(value) > 5e-5 else '0e'}}"


def with_interval(cell: dict[str, Any]) -> str:
    """Mean and half of the interval, percent."""
    half = 100 * (cell["high"] - cell["mean"])
    return "0" if abs(cell["mean"]) < 5e-7 else f"{100 * cell['mean']:+.3f} ± {half:.3f}"


def show(metrics: dict[str, Any], out: Any) -> None:
    show_map(metrics["map"], out)
    show_scales(metrics["scales"], out)
    show_bits(metrics["bits"], out)
    show_gemms(metrics["gemms"], metrics["steps"], out)
    for line in verdicts(metrics):
        out.print(line, markup=False)


def show_map(rows: list[dict[str, Any]], out: Any) -> None:
    cell = {(row["data"], row["format"], row["rounding"]): row for row in rows}
    body = []
    for data, fmt, way in cell:
        if data == "gradient":
            row, gaussian = cell[data, fmt, way], cell["gaussian", fmt, way]
            parts = [percent(row[key]["mean"]) for key in ("bias", *CAUSES)]
            db = f"{row['sqnr_db']:.1f}"
            body.append([fmt, way, db, *parts, percent(gaussian["bias"]["mean"])])
    columns = ["gradients dY", "", "dB", "bias %", "scale", "dead", "grid", "Gauss"]
    out.print(
        harness.table("Magnitude bias, its parts, and that of Gaussian values", columns, body)
    )


def show_scales(rows: list[dict[str, Any]], out: Any) -> None:
    short = {"nvfp4/te-4over6-mae-256": "4over6", "gradient, wgrad rotated": "wgrad RHT"}
    body = [
        [
            ", ".join(
                short.get(row[key], row[key].removeprefix("gradient, ")) for key in ("format", "data")
            ),
            harness.percent(row["clipped"]["mean"]), percent(-row["worst"]["mean"]),
            percent(row["maxima"]["mean"]), percent(row["others"]["mean"]),
            with_interval(row["bias"]), f"{row['sqnr_db']:.1f}",
        ]
        for row in rows if row["rounding"] == "sr"
    ]  # fmt: skip
    columns = ["", "clip %", "worst", "maxima", "others", "bias %", "dB"]
    out.print(
        harness.table("Stochastic rounding, exact: block maxima and the others", columns, body)
    )


def show_bits(rows: list[dict[str, Any]], out: Any) -> None:
    body = [
        [
            f"{row['format']}, {row['source'].replace('loat', 'p').replace('bfp', 'bf')}",
            *(tiny_percent(row["cut"][n - 1]) for n in (1, 2, 4, 8, 16)),
            *("-" if row[key] is None else str(row[key]) for key in ("enough", "all")),
        ]
        for row in rows if row["data"] == "gradient"
    ]  # fmt: skip
    columns = ["dY: %, n bits", "1", "2", "4", "8", "16", "enough", "all"]
    out.print(harness.table("Bias that n random bits add", columns, body))
    out.print(
        f"enough: from this n on at most {100 * ENOUGH:g} %; all: nothing; -: not below 32\n",
        style="dim",
    )


def show_gemms(gemms: list[dict[str, Any]], steps: list[dict[str, Any]], out: Any) -> None:
    cell = {(row["arm"], row["gemm"]): row for row in gemms}
    body = []
    for row in steps:
        line = [row["arm"]]
        for gemm in ("dgrad", "wgrad"):
            one = cell[row["arm"], gemm]
            line += [percent(one["projection"]["mean"] - 1), f"{100 * one['floor']['mean']:.2f}"]
        line += [f"{cell[row['arm'], 'wgrad']['cosine']['mean']:.4f}"]
        line += [f"{row['cosine']['mean']:.4f}"]
        line += ["-" if row["ratio"] is None else f"{row['ratio']['mean']:.1f}"]
        body.append(line)
    columns = ["", "dgrad p", "floor", "wgrad p", "floor", "cosine", "step", "|g|/err"]
    out.print(harness.table("Gradients against the exact ones, mean over layers", columns, body))
    out.print(
        "p: projection - 1 of the mean over draws, %; floor: |E g' - g| / |g|, %; cosine:\n"
        "of one draw of wgrad; step: of a whole step's weight gradient, with |g|/err;\n"
        f"below {ROOT_3:.2f} = sqrt(3), says the rule, quantized training loses its use.\n",
        style="dim",
    )


def verdicts(metrics: dict[str, Any]) -> Iterator[str]:
    """What the numbers say, a line each."""
    cell = {(r["data"], r["format"], r["rounding"]): r for r in metrics["scales"]}
    for data in ("gaussian", "gradient, dgrad"):
        row, up = cell[data, "nvfp4", "sr"], cell[data, UP.name, "sr"]
        biased = row["bias"]["high"] < 0 or row["bias"]["low"] > 0
        yield (
            f"NVFP4 SR, {data}: {'biased' if biased else 'no bias resolved'},"
            f" {with_interval(row['bias'])} %;\n {harness.percent(row['clipped']['mean'])} % of block"
            f" maxima clip; with scales rounded up {percent(up['bias']['mean'])} %,"
            f" {row['sqnr_db'] - up['sqnr_db']:.2f} dB less"
        )
    low = [r["arm"] for r in metrics["steps"] if r["ratio"] and r["ratio"]["mean"] < ROOT_3]
    yield f"Below sqrt(3): {', '.join(low) or 'no recipe'}"


# The script --------------------------------------------------------------------------------------

EXAMPLES = """
python experiments/rounding.py --quick          # under two minutes on two cores
python experiments/rounding.py                  # under fifteen
python experiments/rounding.py --full           # an hour or two; start it again to go on
python figures/rounding.py results/full/rounding.json
"""
BUDGETS = {"quick": QUICK, "default": DEFAULT, "full": FULL}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.arguments(__doc__ or "", EXAMPLES, full="the budget of the paper")
    runs.add_workers(parser)
    return harness.parse(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, record, draw. Returns the exit status."""
    args = parse(argv)
    budget, home = BUDGETS[args.budget], harness.home(args)
    path = home / f"{NAME}.json"
    point = {
        "budget": args.budget, "seed": args.seed, **asdict(budget),
        "arms": {name: {o: str(row) for o, row in arm.operands().items()} for name, arm in ARMS.items()},
    }  # fmt: skip
    with harness.recording(path, NAME, point, args.argv, args.device) as metrics:
        points = points_of(budget, args.seed, args.device)
        metrics |= collected(measured(points, home / "runs", args.argv, args.device, args.workers))
    out = harness.console()
    show(harness.plain(metrics), out)
    from figures import rounding as drawing

    drawn = drawing.draw(path, harness.drawings(args))
    out.print("\n".join(f"  {harness.shown(p)}" for p in [path, *drawn]), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
