"""What does each number format lose of the tensors of a training run?

Trains a small byte-level GPT in float32 on the Python language reference, and at several steps
casts every linear layer's weights, activations (its inputs), activation gradients dY and weight
gradients to each format. Measured with fpemu.stats: which share of the non-zero values becomes
zero (underflow), which becomes subnormal, which is saturated, and the SQNR. It answers:

  (a) which loss scale S keeps FP16, E5M2 and E4M3 gradients from vanishing, or overflowing
  (b) what scaling per tensor, per 128, 32 or 16 values changes
  (c) where the gradients' exponents lie, and where each format's range begins and ends
  (d) what stochastic rounding keeps, on average, of what rounding to nearest flushes
  (e) which layers' gradients a format flushes, from the first step to the last

Definitions, over all values of the tensors together (a layer's own share is the worst or in a
heat map): q is the dequantized cast of x; a value of -0 counts as zero.

  underflow       #{x != 0 and q == 0} / #{x != 0}
  subnormal       #{0 < |code's value| < smallest normal} / #{x}
  saturated       #{finite x whose scaled value exceeds the largest finite element} / #{x}
  sqnr_db         10 log10(sum x^2 / sum (x-q)^2) over one layer's values where x and q are finite
  kept            sum of |q| over the values that round-to-nearest flushes / sum of |x| over them
  bias            (sum q - sum x) / sum |x|
  magnitude_bias  sum (q - x) x / sum x^2

With --tensor FILE it studies your own tensors instead: no training. Results: tables here, a
record (JSON) in results/, figures in figures/ (drawn again by figures/underflow.py).
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import exponents, harness, model  # before torch: sets how its threads wait

# isort: split

import numpy as np
import torch
from torch import Tensor, nn

import fpemu
from fpemu import files
from fpemu.errors import FileFormatError

NAME = "underflow"

# The study ---------------------------------------------------------------------------------------

#: Which axis of a tensor its blocks run along: that of the first GEMM that reads it. With
#: Y[tokens, out] = X[tokens, in] W[out, in]^T, each is the tensor's last axis.
KINDS = {
    "weight": "W[out, in], blocks along in: the contraction of fprop",
    "activation": "X[tokens, in], blocks along in: the contraction of fprop",
    "gradient": "dY[tokens, out], blocks along out: the contraction of dgrad",
    "weight gradient": "dW[out, in], blocks along in: a result, read by no GEMM; blocks as W",
    "tensor": "the last axis of each tensor of the file",
}
GRADIENTS = ("gradient", "tensor")  # the kinds that (a), (c) and (d) look at

#: As in the docstring above; records carry them. A null is a ratio without a denominator.
DEFINITIONS = {
    "underflow": "#{x != 0 and q == 0} / #{x != 0}",
    "subnormal": "#{0 < |code's value| < smallest normal} / #{x}",
    "saturated": "#{finite x whose scaled value exceeds the largest finite element} / #{x}",
    "sqnr_db": "10 log10(sum x^2 / sum (x-q)^2) over one layer's values where x and q are finite",
    "kept": "sum of |q| over the values that round-to-nearest flushes / sum of |x| over them",
    "bias": "(sum q - sum x) / sum |x|",
    "magnitude_bias": "sum (q - x) x / sum x^2",
}

FORMATS = (
    "bf16", "fp16", "e5m2", "e4m3",  # as they are: loss scale 1
    "fp8_tensor_e5m2", "fp8_tensor_e4m3", "fp8_block_e4m3", "mxfp8_e4m3",  # one scale per tensor, 128, 32
    "mxfp4", "mxfp4/rceil", "nvfp4",  # per 32, 32, 16
)  # fmt: skip
#: Formats without a scale of their own, whose gradients need a loss scale 2**k.
LOSS_SCALED = ("fp16", "e5m2", "e4m3")
EXPONENTS = tuple(range(0, 25, 2))
ROUNDED = (
    "fp16", "e5m2", "e4m3", "fp8_tensor_e5m2", "fp8_tensor_e4m3",
    "mxfp8_e4m3", "mxfp4", "mxfp4/rceil", "nvfp4",
)  # fmt: skip
#: Block lengths for the distance to the block's maximum; 0 is the whole tensor.
DISTANCES = (0, 128, 32, 16)
#: Formats whose underflow in gradients is followed over training, layer by layer.
COURSE = ("fp16", "e5m2", "fp8_tensor_e4m3", "mxfp4", "nvfp4")
BLOCK = 16  # values of a block whose largest is followed, NVFP4's


COUNTS = ("size", "zeros", "underflow", "subnormal", "saturated", "nan", "inf")


@dataclass
class Tally:
    """One format on the tensors of one kind: pooled counts, and every tensor's own numbers."""

    names: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    shares: list[float] = field(default_factory=list)
    sqnrs: list[float] = field(default_factory=list)

    def add(self, name: str, stats: Any) -> None:
        """Add one tensor's `fpemu.Stats`."""
        for key in COUNTS:
            self.counts[key] += int(getattr(stats, key))
        self.names.append(name)
        self.shares.append(ratio(stats.underflow, stats.size - stats.zeros))
        self.sqnrs.append(float(stats.sqnr_db))

    def row(self) -> dict[str, Any]:
        """Counts, pooled shares, and the worst tensor beside them."""
        c = self.counts
        worst = max(range(len(self.names)), key=lambda i: self.shares[i])
        known = [s for s in self.sqnrs if not math.isnan(s)] or [math.nan]
        return {
            **c,
            "underflow_share": ratio(c["underflow"], c["size"] - c["zeros"]),
            "subnormal_share": ratio(c["subnormal"], c["size"]),
            "saturated_share": ratio(c["saturated"], c["size"]),
            "worst_share": self.shares[worst],
            "worst_layer": self.names[worst] if self.shares[worst] else None,
            "sqnr_db_median": statistics.median(known),
            "sqnr_db_worst": min(known),
        }


@dataclass
class Part:
    """The gradients of the layers of one name: zeros, exponents, and those of block maxima."""

    zeros: int = 0
    counts: Any = 0
    maxima: Any = 0


def ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else 0.0


@dataclass
class Study:
    """Measures tensors one at a time and keeps only counts and sums of them.

    Parameters
    ----------
    formats : tuple of str
        Formats of part (b).
    seed : int
        Seeds stochastic rounding.
    draws : int
        Stochastic roundings of each tensor in part (d).
    layers : tuple of str
        Names of the tensors of a kind, in the order of the record's per-layer rows.
    advance : callable
        Told when a tensor is done.
    """

    formats: tuple[str, ...] = FORMATS
    seed: int = 0
    draws: int = 16
    layers: tuple[str, ...] = ()
    advance: Callable[..., None] = lambda *_: None
    tallies: dict[tuple[int, str, str], Tally] = field(default_factory=dict)
    scaled: dict[tuple[int, str, int], Tally] = field(default_factory=dict)
    exponents: dict[tuple[int, str], np.ndarray] = field(default_factory=dict)
    zeros: dict[tuple[int, str], int] = field(default_factory=dict)
    distances: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    rounded: dict[tuple[int, str], list[Drawn]] = field(default_factory=dict)
    parts: dict[tuple[int, str], Part] = field(default_factory=dict)
    course: dict[tuple[int, str], dict[str, float]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    streams: int = 0

    def add(self, step: int, kind: str, name: str, x: np.ndarray, deep: bool) -> None:
        """Measure one tensor; `deep` adds part (d), which casts it a hundred times more."""
        for fmt in self.formats:
            if x.ndim < 2 and getattr(fpemu.get_format(fmt), "is_2d", False):
                self.skipped.append(f"{name}: {fmt} needs two axes, got shape {list(x.shape)}")
                continue
            tally = self.tallies.setdefault((step, kind, fmt), Tally())
            tally.add(name, fpemu.stats(x, fmt))
        counts = exponents.exponent_counts(x)
        self.exponents[step, kind] = self.exponents.get((step, kind), 0) + counts
        zeros = int((x == 0).sum())
        self.zeros[step, kind] = self.zeros.get((step, kind), 0) + zeros
        if kind == "gradient":
            part = self.parts.setdefault((step, name.rpartition(".")[2]), Part())
            part.zeros += zeros
            part.counts = part.counts + counts
            part.maxima = part.maxima + exponents.maximum_counts(x, BLOCK)
        if kind in GRADIENTS:
            for block in DISTANCES:
                far = exponents.distance_counts(x, block)
                self.distances[step, block] = self.distances.get((step, block), 0) + far
            self.sweep_loss_scale(step, name, x)
            if deep:
                self.round_both_ways(step, name, x)
        self.advance()

    def follow(self, step: int, name: str, x: np.ndarray) -> None:
        """Part (e): the gradient of one layer."""
        for fmt in COURSE:
            if fmt in self.formats:
                stats = fpemu.stats(x, fmt)
                share = ratio(stats.underflow, stats.size - stats.zeros)
                self.course.setdefault((step, fmt), {})[name] = share

    def sweep_loss_scale(self, step: int, name: str, x: np.ndarray) -> None:
        """Part (a). Multiplying by 2**k is exact, so it equals scaling the loss by 2**k.

        (Every gradient is linear in the loss, and a power of two moves exponents only; float32
        gradients this small neither overflow nor lose bits by it.)
        """
        for k in EXPONENTS:
            values = times_power_of_two(x, k)
            for fmt in LOSS_SCALED:
                tally = self.scaled.setdefault((step, fmt, k), Tally())
                tally.add(name, fpemu.stats(values, fmt))

    def round_both_ways(self, step: int, name: str, x: np.ndarray) -> None:
        """Part (d), for finite tensors."""
        if not np.isfinite(x).all():
            self.skipped.append(f"{name}: stochastic rounding, as it holds NaN or infinity")
            return
        for fmt in ROUNDED:
            self.streams += 1  # no two tensors or formats share random words
            stream = self.streams << 16
            drawn = draw_roundings(x, fmt, self.seed, stream, self.draws)
            self.rounded.setdefault((step, fmt), []).append(replace(drawn, name=name))

    def metrics(self) -> dict[str, Any]:
        """Everything measured, as rows."""
        tables: dict[str, Any] = {"by_format": [], "loss_scale": [], "by_layer": [], "rounding": []}
        for (step, kind, fmt), tally in self.tallies.items():
            tables["by_format"].append({"step": step, "kind": kind, "format": fmt, **tally.row()})
        for (step, fmt, k), tally in self.scaled.items():
            tables["loss_scale"].append(
                {"step": step, "format": fmt, "log2_scale": k, **tally.row()}
            )
        last = max((step for step, _, _ in self.tallies), default=0)
        layers = self.layers if len(self.layers) <= MOST_LAYERS else ()
        for (step, kind, fmt), tally in self.tallies.items():
            if step == last and layers:
                share = dict(zip(tally.names, tally.shares, strict=True))
                row = {"kind": kind, "format": fmt, "underflow": [share.get(n) for n in layers]}
                tables["by_layer"].append(row)
        for (step, fmt), drawn in self.rounded.items():
            tables["rounding"].append({"step": step, "format": fmt, **rounding_row(drawn)})
        histograms = [
            {
                "step": step,
                "kind": kind,
                "zeros": self.zeros[step, kind],
                "lowest": exponents.LOWEST,
                "counts": counts.tolist(),
            }
            for (step, kind), counts in self.exponents.items()
        ]
        below = [
            {"step": step, "block": block, "counts": counts.tolist()}
            for (step, block), counts in self.distances.items()
        ]
        parts = [
            {"step": step, "part": name, "zeros": part.zeros, "lowest": exponents.LOWEST,
             "counts": part.counts.tolist(), "maxima": part.maxima.tolist()}
            for (step, name), part in self.parts.items()
        ]  # fmt: skip
        course = [
            {"step": step, "format": fmt, "underflow": [shares.get(n) for n in layers]}
            for (step, fmt), shares in self.course.items()
        ]
        return {
            **tables,
            "layers": list(layers),
            "histograms": histograms,
            "parts": parts,
            "course": course,
            "below_maximum": below,
            "skipped": self.skipped[:MOST_LAYERS],
            "formats": {
                f: ranges(f) for f in dict.fromkeys((*self.formats, *LOSS_SCALED, *ROUNDED))
            },
            "definitions": DEFINITIONS,
            "axes": {kind: KINDS[kind] for _, kind in dict.fromkeys(self.exponents)},
        }


#: A record keeps per-layer numbers of at most this many layers (files may hold thousands).
MOST_LAYERS = 64


def ranges(name: str) -> dict[str, Any]:
    """What a figure must know about a format: its element's range and what shares a scale."""
    row = fpemu.get_format(name)
    if isinstance(row, fpemu.BlockFormat):
        element = row.element
        shared = "tensor" if row.block is None else "x".join(str(size) for size in row.block)
    else:
        element, shared = row, "unscaled"
    return {
        "element": element.name,
        "shared": shared,
        "max": element.max,
        "min_normal": element.min_normal,
        "min_subnormal": element.min_subnormal,
    }


def times_power_of_two(x: np.ndarray, k: int) -> np.ndarray:
    """``x * 2**k``, exact; in float64 where float32 would overflow."""
    if x.dtype == np.float32 and np.fmax.reduce(np.abs(x), axis=None) >= 2.0 ** (127 - k):
        x = x.astype(np.float64)
    with np.errstate(over="ignore"):  # a float64 beyond 2**1000 becomes infinity, and counts as one
        return x * x.dtype.type(2.0**k)


# Rounding to nearest against stochastic rounding -------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """Sums of one tensor rounded to nearest (index 0) and stochastically (the rest).

    `flushed` is the sum of |x| over the values that rounding to nearest sends to zero, `kept` the
    sum of q * sign(x) over the same values; `signed` is the sum of q and `product` that of q * x.
    """

    flushed: float
    absolute: float
    total: float
    energy: float
    kept: np.ndarray
    signed: np.ndarray
    product: np.ndarray
    name: str = ""


def draw_roundings(x: np.ndarray, fmt: str, seed: int, stream: int, draws: int) -> Drawn:
    """Round once to nearest and `draws` times stochastically, and add up what matters."""
    q = fpemu.quantize(x, fmt)
    sign = np.where((q == 0) & (x != 0), np.sign(x), np.zeros_like(x))
    kept, signed, product = np.zeros((3, draws + 1))
    for i in range(draws + 1):
        if i > 0:
            fpemu.quantize(x, fmt, rounding="sr", seed=seed, stream=stream + i, out=q)
        kept[i], signed[i], product[i] = dot(q, sign), total(q), dot(q, x)
    return Drawn(
        flushed=dot(x, sign),
        absolute=total(np.abs(x)),
        total=total(x),
        energy=dot(x, x),
        kept=kept,
        signed=signed,
        product=product,
    )


def total(x: np.ndarray) -> float:
    return float(x.sum(dtype=np.float64))


def dot(x: np.ndarray, y: np.ndarray) -> float:
    """Sum of products in float64 (and without BLAS, whose threads would fight fpemu's)."""
    return float(np.einsum("i,i->", x.ravel(), y.ravel(), dtype=np.float64))


def rounding_row(drawn: Sequence[Drawn]) -> dict[str, Any]:
    """Pooled over tensors, draw by draw; then mean and standard error over the draws."""

    def pooled(parts: str) -> Any:
        return sum(getattr(d, parts) for d in drawn)

    flushed, absolute, energy = pooled("flushed"), pooled("absolute"), pooled("energy")
    row: dict[str, Any] = {
        "draws": len(drawn[0].kept) - 1,
        "flushed_share": ratio(flushed, absolute),  # of the sum of |x|
    }
    measures = {
        "kept": pooled("kept") / flushed if flushed else None,
        "bias": (pooled("signed") - pooled("total")) / absolute if absolute else None,
        "magnitude_bias": pooled("product") / energy - 1 if energy else None,
    }
    for key, values in measures.items():
        row[f"{key}_rne"] = None if values is None else values[0]
        row[f"{key}_sr"] = None if values is None else values[1:].mean()
        row[f"{key}_sr_se"] = None if values is None else standard_error(values[1:])
    for way, chosen in (("rne", slice(0, 1)), ("sr", slice(1, None))):
        biases = {d.name: d.product[chosen].mean() / d.energy - 1 for d in drawn if d.energy}
        worst = max(biases, key=lambda name: abs(biases[name]), default="")
        row[f"worst_{way}"], row[f"worst_{way}_layer"] = biases.get(worst), worst or None
    return row


def standard_error(draws: np.ndarray) -> float | None:
    return float(draws.std(ddof=1) / len(draws) ** 0.5) if len(draws) > 1 else None


# Capturing a training run ------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """How much to do."""

    shape: model.Shape
    training: model.Training
    captures: int
    draws: int
    held_out: int = 1 << 16  # bytes


DEFAULT = Budget(model.Shape(), model.Training(), captures=4, draws=16)
FULL = Budget(
    model.Shape(width=384, layers=6, heads=6), model.Training(steps=600), captures=4, draws=16
)
QUICK = Budget(
    model.Shape(width=128, layers=2), model.Training(steps=30, warmup=5), captures=2, draws=8
)


BUDGETS = {"quick": QUICK, "default": DEFAULT, "full": FULL}


def capture_steps(steps: int, captures: int) -> list[int]:
    """The first step, the last one, and others evenly between."""
    return sorted({round(i * (steps - 1) / max(1, captures - 1)) for i in range(captures)})


def course_steps(steps: int) -> list[int]:
    """The steps after which 1, 2, 4, ... are done, and the last one."""
    return sorted({(1 << k) - 1 for k in range((steps - 1).bit_length())} | {steps - 1})


def watch(gpt: model.GPT, add: Callable[[str, str, Tensor], None]) -> Callable[[], None]:
    """Hand every linear layer's four tensors to `add(kind, layer, tensor)` as they appear.

    Nothing is stored: each tensor is measured inside its hook, while autograd holds it anyway.

    Returns
    -------
    callable
        Takes the hooks off again.
    """
    handles = []
    for name, linear in gpt.linears().items():

        def forward(
            layer: nn.Linear, inputs: tuple[Tensor, ...], _: Tensor, name: str = name
        ) -> None:
            add("weight", name, layer.weight)
            add("activation", name, inputs[0].flatten(0, -2))

        def backward(_: nn.Module, __: Any, outputs: tuple[Tensor, ...], name: str = name) -> None:
            add("gradient", name, outputs[0].flatten(0, -2))

        def weight_gradient(weight: Tensor, name: str = name) -> None:
            assert weight.grad is not None
            add("weight gradient", name, weight.grad)

        handles += [
            linear.register_forward_hook(forward),
            linear.register_full_backward_hook(backward),
            linear.weight.register_post_accumulate_grad_hook(weight_gradient),
        ]

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return stop


def study_training(
    budget: Budget, formats: tuple[str, ...], seed: int, device: str
) -> dict[str, Any]:
    """Train, capture, measure."""
    text = model.corpus()
    plan = budget.training
    steps = capture_steps(plan.steps, budget.captures)
    course = course_steps(plan.steps)
    linears = 4 * budget.shape.layers + 1
    study = Study(formats, seed, budget.draws)
    stop: list[Callable[[], None]] = []

    with harness.progress("underflow", plan.steps + 4 * linears * len(steps)) as advance:
        study.advance = advance

        def before(step: int, gpt: model.GPT) -> None:
            def take(kind: str, name: str, x: Tensor) -> None:
                if step in steps:
                    study.add(step, kind, name, widened(x), deep=step == steps[-1])
                if step in course and kind == "gradient":
                    study.follow(step, name, widened(x))

            study.layers = tuple(gpt.linears())
            if step in steps or step in course:
                stop.append(watch(gpt, take))

        def after(step: int, loss: float) -> None:
            if stop:
                stop.pop()()
            advance(1, f"loss {loss:.2f}")

        gpt, losses = model.train(budget.shape, plan, text, seed, device, before, after)
    return {
        "parameters": sum(p.numel() for p in gpt.parameters()),
        "text": {
            "name": text.name,
            "bytes": len(text.train) + len(text.held_out),
            "sha256": text.sha256,
        },
        "train_loss": losses,
        "held_out_loss": model.held_out_loss(
            gpt, text.held_out, device, plan.batch, budget.held_out
        ),
        **study.metrics(),
    }


# A user's tensors --------------------------------------------------------------------------------


def is_float(x: Any) -> bool:
    """Whether x holds float values that the study can widen: no complex, no packed FP4 pairs."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind == "f" and x.dtype.itemsize <= 8 and x.size > 0
    pairs = getattr(torch, "float4_e2m1fn_x2", None)
    return (
        x.is_floating_point() and x.layout == torch.strided and x.numel() > 0 and x.dtype != pairs
    )


def widened(x: Any) -> np.ndarray:
    """A C-order array in native byte order: float64 as it is, all narrower as float32 (exact)."""
    if isinstance(x, Tensor):
        x = x.detach().cpu()
        x = (x if x.dtype == torch.float64 else x.float()).numpy()
    return np.ascontiguousarray(x, dtype=np.float64 if x.dtype.itemsize == 8 else np.float32)


def float_names(path: Path) -> list[str]:
    """Names of a file's float tensors; reads through the file once, so that damage shows now.

    Raises
    ------
    FileFormatError
        Where the file is damaged or of an unknown kind, or holds no float tensor.
    FileNotFoundError, IsADirectoryError
    """
    found, others = [], []
    for name, x in files.tensors(path):
        if is_float(x):
            found.append(name)
        else:
            others.append(f"{name}: {x.dtype} of shape {list(x.shape)}")
    if not found:
        raise FileFormatError(
            f"--tensor {path}: no float tensor with elements, got {'; '.join(others[:3]) or 'nothing'};"
            " allowed are float16, bfloat16, float32, float64 and 8-bit floats. Convert before saving."
        )
    return found


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def study_file(
    path: Path, names: list[str], formats: tuple[str, ...], seed: int, draws: int
) -> dict[str, Any]:
    """The same measurements on a file's float tensors, one loaded at a time."""
    study = Study(formats, seed, draws, tuple(names))
    with harness.progress("underflow", len(names)) as advance:
        study.advance = advance
        for name, x in files.tensors(path):
            if is_float(x):
                study.add(0, "tensor", name, widened(x), deep=True)
    if not study.tallies:
        raise ValueError(
            f"--formats {','.join(formats)}: no tensor of {path.name} fits, {study.skipped[0]}."
            " Name a format with 1D blocks too, for example nvfp4."
        )
    return study.metrics()


# Tables ------------------------------------------------------------------------------------------


#: Column headings: a word and the usual letter.
HEADINGS = {
    "weight": "weight W", "activation": "input X", "gradient": "gradient dY",
    "weight gradient": "dW", "tensor": "tensor",
}  # fmt: skip


def with_worst(row: dict[str, Any] | None) -> str:
    """Pooled share and, in brackets, the worst layer's, in percent."""
    if row is None:
        return "-"
    return f"{harness.percent(row['underflow_share'])} ({harness.percent(row['worst_share'])})"


def decibels(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "exact" if value > 0 else "-"


def show(metrics: dict[str, Any], out: Any) -> None:
    """The last capture's tables."""
    rows = metrics["by_format"]
    last = max(row["step"] for row in rows)
    cell = {(row["kind"], row["format"]): row for row in rows if row["step"] == last}
    kinds = [kind for kind in KINDS if any(kind == k for k, _ in cell)]
    formats = list(dict.fromkeys(f for _, f in cell))
    kind = "gradient" if "gradient" in kinds else kinds[0]
    what, when = ("gradients dY", f", step {last + 1}") if kind == "gradient" else ("tensors", "")
    if len(kinds) > 1:
        body = [[f, *(with_worst(cell.get((k, f))) for k in kinds)] for f in formats]
        columns = ["format", *(HEADINGS[k] for k in kinds)]
        title = f"Non-zero values that become zero, %, all layers (worst layer){when}"
        out.print(harness.table(title, columns, body))
    body = []
    for f in formats:
        row = cell[kind, f]
        shares = [harness.percent(row[f"{key}_share"]) for key in ("subnormal", "saturated")]
        sqnr = f"{decibels(row['sqnr_db_median'])} ({decibels(row['sqnr_db_worst'])})"
        body.append([f, with_worst(row), *shares, sqnr])
    columns = ["format", "zero %", "subnormal %", "saturated %", "SQNR dB, median"]
    out.print(harness.table(f"All {what}; in brackets the worst{when}", columns, body))
    show_loss_scales([r for r in metrics["loss_scale"] if r["step"] == last], what, when, out)
    show_roundings([r for r in metrics["rounding"] if r["step"] == last], when, out)
    first = cell[kind, formats[0]]
    if first["nan"] or first["inf"]:
        out.print(f"The {what} hold {first['nan']} NaN and {first['inf']} infinite values.")
    for line in metrics["skipped"][:5]:
        out.print(f"skipped {line}")
    out.print(verdict(cell, kind, formats))


def show_loss_scales(rows: list[dict[str, Any]], what: str, when: str, out: Any) -> None:
    cell = {(row["format"], row["log2_scale"]): row for row in rows}
    body = []
    for k in EXPONENTS:
        line = [f"2^{k}"]
        for fmt in LOSS_SCALED:
            row = cell[fmt, k]
            line += [with_worst(row), harness.percent(row["saturated_share"])]
        body.append(line)
    columns = ["scale", *(c for fmt in LOSS_SCALED for c in (f"{fmt}: zero %", "over"))]
    out.print(harness.table(f"Loss scale for unscaled formats, {what}{when}", columns, body))
    out.print(
        "over: beyond the largest finite value, % (FP16: infinity, the step is lost)\n", style="dim"
    )


def show_roundings(rows: list[dict[str, Any]], when: str, out: Any) -> None:
    body = []
    for row in rows:
        nearest = row["magnitude_bias_rne"]
        body.append(
            [
                row["format"],
                harness.percent(row["flushed_share"]),
                plus_minus(row["kept_sr"], row["kept_sr_se"], 2),
                "-" if nearest is None else f"{100 * nearest:+.3f}",
                plus_minus(row["magnitude_bias_sr"], row["magnitude_bias_sr_se"], 3),
            ]
        )
    if not body:
        return
    columns = ["format", "flushed %", "SR keeps %", "bias RNE %", "bias SR %"]
    out.print(harness.table(f"Rounding to nearest (RNE), stochastic (SR){when}", columns, body))
    out.print(
        "flushed: part of sum |x| that RNE sends to zero. SR keeps: of that part, on\n"
        "average. bias: of the projection on x, sum (q-x)x / sum x^2.\n"
        f"±: one standard error over {rows[0]['draws']} draws.\n",
        style="dim",
    )


def plus_minus(value: float | None, error: float | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.{digits}f}".removeprefix("+" if digits == 2 else "") + (
        f" ± {100 * error:.{digits}f}" if error is not None else ""
    )


def verdict(cell: dict[tuple[str, str], dict[str, Any]], kind: str, formats: list[str]) -> str:
    """One sentence: the format that loses most, and where."""
    fmt = max(formats, key=lambda f: cell[kind, f]["worst_share"])
    row = cell[kind, fmt]
    if not row["underflow"]:
        return "No format sends a non-zero value to zero."
    return (
        f"Worst: {fmt} sends {harness.percent(row['worst_share'])} % of the non-zero values of"
        f" {row['worst_layer']} ({kind}) to zero."
    )


# Command line ------------------------------------------------------------------------------------

EXAMPLES = """
python experiments/underflow.py                       # about three minutes on two cores
python experiments/underflow.py --quick               # under a minute
python experiments/underflow.py --full                # a larger model, longer: the paper's record
python experiments/underflow.py --tensor grads.safetensors
python experiments/underflow.py --tensor dy.npy --formats nvfp4,mxfp4/even,mxfp8_e5m2
"""


def format_list(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError("--formats needs names, for example nvfp4,mxfp4")
    for name in names:
        try:
            fpemu.get_format(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return tuple(dict.fromkeys(names))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.arguments(
        __doc__ or "",
        EXAMPLES,
        full="the budget of the paper, into results/full: a quarter of an hour",
    )
    parser.add_argument(
        "--tensor",
        type=Path,
        metavar="FILE",
        help="study the float tensors of a .npy, .npz, .safetensors or .pt file",
    )
    parser.add_argument(
        "--formats",
        type=format_list,
        default=FORMATS,
        metavar="A,B",
        help="formats to compare; 'fpemu formats' lists them (default: eleven, see the table)",
    )
    args = harness.parse(parser, argv)
    if args.tensor is not None and args.device != "cpu":
        parser.error(
            "--device is for training; --tensor FILE is measured on the CPU. Leave it out."
        )
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, record, draw. Returns the exit status."""
    args = parse(argv)
    budget = BUDGETS[args.budget]
    point: dict[str, Any] = {
        "budget": args.budget,
        "seed": args.seed,
        "formats": list(args.formats),
        "rounded": list(ROUNDED),
        "draws": budget.draws,
    }
    if args.tensor is not None:
        try:
            names = float_names(args.tensor)
        except (FileFormatError, OSError) as error:
            print(f"underflow: {error}", file=sys.stderr)
            return 2
        name = f"{NAME}_tensor"
        point |= {
            "file": args.tensor.name,
            "sha256": sha256(args.tensor),
            "tensors": len(names),
        }
    else:
        name = NAME
        steps = capture_steps(budget.training.steps, budget.captures)
        point |= {
            "model": asdict(budget.shape),
            "training": asdict(budget.training),
            "steps": steps,
        }
    # The default is what `make underflow` runs: its record is committed too.
    path = harness.home(args) / f"{name}.json" if args.full else harness.record_path(args, name)
    with harness.recording(path, NAME, point, args.argv, args.device) as metrics:
        if args.tensor is not None:
            metrics |= study_file(args.tensor, names, args.formats, args.seed, budget.draws)
        else:
            metrics |= study_training(budget, args.formats, args.seed, args.device)
    out = harness.console()
    show(metrics, out)
    from figures import underflow as drawing

    place = harness.drawings(args) if args.full else harness.figures_dir(args)
    figures = drawing.draw(path, place)
    out.print(
        f"record  {harness.shown(path)}\nfigures {harness.shown(figures[0].parent)}/{name}_*.pdf, .png"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
