"""When does an integer format beat a float of as many bits? By the crest factor of a block.

Blocks of a given crest factor are made in three ways and cast to both. Where the integer's SQNR falls
below the float's is the crossing; beside ours stand the published ones and their formula
(arXiv 2510.25602). Definitions of the terms: `experiments.outliers.DEFINITIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

import fpemu
from experiments import harness
from experiments.measures import crest, interval, level
from experiments.scalings import by_scale, named
from fpemu.formats import E2M1, E2M3, E4M3, E8M0, INT8, BlockFormat, Format


class Pair(NamedTuple):
    """An integer and a float format of as many bits, and where they are said to cross.

    `overhead` is how much larger than needed a scale is on average in the published model: 1.5 for
    powers of two, 1.05 for E4M3, 1 for float32. `exact` says that a block's largest value is taken to
    be without error.
    """

    name: str
    block: int
    integer: BlockFormat
    floating: BlockFormat
    overhead: float
    exact: bool
    published: float | None


#: Chen et al. 2025 (arXiv 2510.25602), figure 3 and section 4: INT wins below this crest factor.
PUBLISHED = {"8-bit MX": 7.55, "6-bit MX": 1.96, "4-bit MX": 2.04, "4-bit NV": 2.39}


def integer(bits: int, low: bool = False) -> Format:
    """A symmetric integer: of steps of 1, or with its largest value just below 2 (MX)."""
    bias = 0 if low else 2 - bits
    return Format(f"int{bits}{'*2^-' + str(bits - 2) if low else ''}", 0, bits - 1, bias=bias)


def pairs() -> list[Pair]:
    def mx(bits: int, block: int) -> BlockFormat:
        return BlockFormat(f"mxint{bits}", integer(bits, True), (block,), E8M0, "mx_rceil")

    def mxfp(name: str, element: Format, block: int) -> BlockFormat:
        return BlockFormat(name, element, (block,), E8M0, "mx_rceil")

    nv = BlockFormat("nvint4", integer(4), (16,), E4M3, "nvfp4", tensor_scaled=True)
    e4m3_512, int8_512 = by_scale("e4m3", E4M3, (512,)), by_scale("int8", INT8, (512,))
    rows = [
        ("8-bit MX", 32, mx(8, 32), mxfp("mxfp8", E4M3, 32), 1.5, False),
        ("8-bit E8M0", 128, mx(8, 128), mxfp("mxfp8", E4M3, 128), 1.5, False),
        ("8-bit FP32", 512, int8_512, e4m3_512, 1.0, False),
        ("6-bit MX", 32, mx(6, 32), mxfp("mxfp6", E2M3, 32), 1.5, False),
        ("4-bit MX", 32, mx(4, 32), mxfp("mxfp4", E2M1, 32), 1.5, False),
        ("4-bit NV", 16, nv, named("nvfp4"), 1.05, True),
    ]
    return [Pair(*row, PUBLISHED.get(row[0])) for row in rows]


def model_crossing(pair: Pair, steps: float) -> float | None:
    """Where the published model of Gaussian blocks has the two SQNR cross.

    With k the crest factor, r the overhead and g the block, an integer whose largest value is `steps`
    steps has the noise ``(r k / steps)^2 / 12``, times ``1 - 1/g`` where the largest value is exact.
    A float of M mantissa bits has ``w / (24 4^M) + (r k step / max)^2 p / 12``: w is the signal in
    normal numbers (less ``k^2 / g`` where the largest value is exact), p the share of subnormal
    values. Source: arXiv 2510.25602, theorems 1 and 2, whose integer of b bits has 2^(b-1) steps.
    """
    e = pair.floating.element
    highest = 0.99 * math.sqrt(pair.block) if pair.exact else 64.0

    def ratio(k: float) -> float:
        """Noise of the float over that of the integer, less 1."""
        scale = pair.overhead * k
        edge = e.min_normal * scale / e.max
        below = math.erf(edge / math.sqrt(2))
        inside = below - 2 * edge * math.exp(-edge * edge / 2) / math.sqrt(2 * math.pi)
        normal = 1 - inside - (k * k / pair.block if pair.exact else 0)
        of_float = (
            normal / (24 * 4.0**e.man_bits) + (scale * e.min_subnormal / e.max) ** 2 / 12 * below
        )
        of_integer = (scale / steps) ** 2 / 12 * (1 - 1 / pair.block if pair.exact else 1)
        return of_float / of_integer - 1

    if ratio(1.0) * ratio(highest) > 0:
        return None
    return float(optimize.brentq(ratio, 1.0, highest))


def rule(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How often the model tells from a tensor's crest whether INT8 beats E4M3 with one scale."""
    pair = next(pair for pair in pairs() if pair.overhead == 1)
    at = model_crossing(pair, pair.integer.element.max)
    assert at is not None
    wrong, tensors = [], 0
    for row in rows:
        if row["kind"] != "control":
            tensors += 1
            integer, floating = (row["formats"][f][0][0] for f in ("INT8 tensor", "FP8 tensor"))
            if (integer > floating) != (row["crest"] < at):
                wrong.append(f"{row['kind']} {row['name']}")
    return {"crossing": at, "tensors": tensors, "wrong": wrong}


BLOCKS = ("power", "spike", "natural")
VIEWS = ("block", "others")


def power_blocks(count: int, block: int, k: float, generator: np.random.Generator) -> np.ndarray:
    """``power`` of `DEFINITIONS`: the crest grows with p from 1 to sqrt(block), so p is bisected."""
    g = generator.standard_normal((count, block))
    logs = np.log(np.abs(g))
    logs -= logs.max(axis=1, keepdims=True)
    low, high = np.zeros((count, 1)), np.full((count, 1), 2.0**14)
    for _ in range(44):
        p = (low + high) / 2
        too_small = np.exp(2 * p * logs).mean(axis=1, keepdims=True) > 1 / (k * k)
        low, high = np.where(too_small, p, low), np.where(too_small, high, p)
    return np.sign(g) * np.exp(high * logs)


def spike_blocks(count: int, block: int, k: float, generator: np.random.Generator) -> np.ndarray:
    """``spike`` of `DEFINITIONS`; fewer than `count` where the crest is low."""
    g = generator.standard_normal((count, block))
    where = np.abs(g).argmax(axis=1)
    every = np.arange(count)
    rest = np.abs(g)
    rest[every, where] = 0
    size = np.sqrt(k * k * (rest**2).sum(axis=1) / (block - k * k))
    g[every, where] = np.copysign(size, g[every, where])
    return g[size > rest.max(axis=1)]


def natural_blocks(count: int, block: int, generator: np.random.Generator) -> np.ndarray:
    """``natural`` of `DEFINITIONS`: every block with its own degrees of freedom."""
    freedom = np.exp(generator.uniform(math.log(1.5), math.log(30), (count, 1)))
    g = generator.standard_normal((count, block))
    chi = generator.gamma(freedom / 2, size=(count, block)) * 2 / freedom
    gaussian = np.arange(count)[:, None] % 4 == 0
    return np.where(gaussian, g, g / np.sqrt(chi))


def noises(x: np.ndarray, fmt: BlockFormat) -> np.ndarray:
    """sum (x-q)^2 / sum x^2 of every row: of all of it, and without its largest value."""
    wide = x.astype(np.float64)
    squares = wide**2
    errors = (wide - fpemu.quantize(x, fmt)) ** 2
    where = np.abs(wide).argmax(axis=1)[:, None]
    top, lost = (np.take_along_axis(a, where, 1)[:, 0] for a in (squares, errors))
    signal, noise = squares.sum(axis=1), errors.sum(axis=1)
    return np.stack([noise / signal, (noise - lost) / (signal - top)])


LEAST = 32  # blocks of a point; fewer say nothing


def curve_point(
    pair: Pair, x: np.ndarray, generator: np.random.Generator
) -> list[tuple[float, float]] | None:
    """SQNR of the integer and the float for each of `VIEWS`; None for too few blocks."""
    if len(x) < LEAST:
        return None
    # A scale of its own for each block: a power of two meets every place in its binade.
    scale = np.exp2(generator.uniform(0, 1, (len(x), 1)))
    x = (x / np.abs(x).max(axis=1, keepdims=True) * scale).astype(np.float32)
    both = [noises(x, fmt).mean(axis=1) for fmt in (pair.integer, pair.floating)]
    return [
        (-10 * math.log10(a), -10 * math.log10(b)) for a, b in zip(both[0], both[1], strict=True)
    ]


def crests(pair: Pair, points: int) -> np.ndarray:
    """Crest factors from 1.1 to just below sqrt(block), the largest that a block can have."""
    return np.geomspace(1.1, 0.985 * math.sqrt(pair.block), points)


def curves(
    pair: Pair, points: int, values: int, generator: np.random.Generator
) -> dict[tuple[str, str], list[tuple[float, float, float]]]:
    """(kind of block, view) -> (crest, integer dB, float dB) of one repeat."""
    ks = crests(pair, points)
    count = values // pair.block
    made: dict[tuple[str, str], list[tuple[float, float, float]]] = {}

    def note(kind: str, k: float, found: list[tuple[float, float]] | None) -> None:
        for view, levels in zip(VIEWS, found or (), strict=False):
            made.setdefault((kind, view), []).append((k, *levels))

    for k in ks:
        note(
            "power", k, curve_point(pair, power_blocks(count, pair.block, k, generator), generator)
        )
        note(
            "spike", k, curve_point(pair, spike_blocks(count, pair.block, k, generator), generator)
        )
    x = natural_blocks(count * 8, pair.block, generator)
    own = crest(x)
    for low, high in pairwise(ks):
        inside = (own >= low) & (own < high)
        if inside.any():
            note("natural", float(own[inside].mean()), curve_point(pair, x[inside], generator))
    return made


def crossing(curve: Sequence[tuple[float, float, float]]) -> float | None:
    """``crossing`` of `DEFINITIONS`: the last one, from above to below zero."""
    found = None
    for (k0, a0, b0), (k1, a1, b1) in pairwise(curve):
        before, after = a0 - b0, a1 - b1
        if before > 0 >= after:
            found = k0 + (k1 - k0) * before / (before - after)
    return found


#: A published crossing this near ours is called reproduced.
TOLERANCE = 0.05


def near(k: float, ours: Sequence[float]) -> bool:
    """Whether k lies within the range of our crossings, give or take `TOLERANCE`."""
    return bool(ours) and min(ours) / (1 + TOLERANCE) <= k <= max(ours) * (1 + TOLERANCE)


def verdict(pair: Pair, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A pair's crossings by whole blocks beside the published one."""
    ours = [row["crossing"] for row in rows if row["view"] == "block" and row["crossing"]]
    limit, said = math.sqrt(pair.block), pair.published
    steps = pair.integer.element.max / pair.integer.element.min_subnormal
    exact = model_crossing(pair, steps)
    if said is None:
        word = "not published"
    elif said > limit:
        word = "beyond any block"
    elif near(said, ours):
        word = "reproduced"
    elif exact is not None and near(exact, ours):
        word = "only with exact steps"
    else:
        word = "contradicted"
    return {
        "pair": pair.name,
        "block": pair.block,
        "formats": [pair.integer.name, pair.floating.name],
        "published": said,
        "model": model_crossing(pair, steps + 1),
        "model_exact_steps": exact,
        "largest_crest": limit,
        "verdict": word,
    }


def compare_pairs(
    repeats: int, points: int, values: int, seed: int, advance: Callable[..., None]
) -> dict[str, Any]:
    """One row per pair, kind of block and view: crossing, its interval, the curve of one repeat."""
    made: list[dict[str, Any]] = []
    verdicts = []
    for index, pair in enumerate(pairs()):
        made_of = []
        for repeat in range(repeats):
            generator = np.random.default_rng([seed, 3, index, repeat])
            made_of.append(curves(pair, points, values, generator))
            advance(1, f"{pair.name}, repeat {repeat + 1}")
        for kind in BLOCKS:
            for view in VIEWS:
                own = [repeat.get((kind, view), []) for repeat in made_of]
                found = [crossing(curve) for curve in own]
                known = [k for k in found if k is not None]
                # Where some repeats cross and others do not, there is no one crossing to state.
                at, half = interval(known) if len(known) == len(found) else (None, None)
                curve = own[0]
                gaps = [i - f for _, i, f in curve]
                made.append(
                    {
                        "pair": pair.name,
                        "kind": kind,
                        "view": view,
                        "crossing": at,
                        "crossing_interval": half,
                        "crossed": len(known),
                        "repeats": len(found),
                        "integer_wins": all(gap > 0 for gap in gaps) if gaps else None,
                        "crest": [k for k, _, _ in curve],
                        "integer_db": [i for _, i, _ in curve],
                        "float_db": [f for _, _, f in curve],
                    }
                )
        verdicts.append(verdict(pair, [row for row in made if row["pair"] == pair.name]))
    return {"pairs": verdicts, "crossings": made}


# Tables ------------------------------------------------------------------------------------------


def show_crossings(metrics: dict[str, Any], out: Any) -> None:
    cell = {(row["pair"], row["kind"], row["view"]): row for row in metrics["crossings"]}
    body = [
        [
            f"{pair['pair']} {pair['block']}",
            *(level(pair[k], 2) for k in ("published", "model", "model_exact_steps")),
            level(pair["largest_crest"], 2),
            *(crossed(cell[pair["pair"], kind, "block"]) for kind in BLOCKS),
        ]
        for pair in metrics["pairs"]
    ]
    columns = ["pair, block", "publ.", "model", "exact", "limit", *BLOCKS]
    title = "Integers beat floats up to this crest factor (largest/RMS of a block)"
    out.print(harness.table(title, columns, body))
    out.print(
        "publ., model: arXiv 2510.25602, and its formula; exact: with 2^(b-1) - 1 steps\n"
        "instead of 2^(b-1). limit: sqrt(block), the largest crest there is. >: integers\n"
        "win up to there; <: nowhere; n/m: n of m repeats cross. ±: 95 % over repeats.\n",
        style="dim",
    )
    body = [
        [
            f"{pair['pair']} {pair['block']}",
            *(crossed(cell[pair["pair"], kind, "others"]) for kind in BLOCKS),
            pair["verdict"],
        ]
        for pair in metrics["pairs"]
    ]
    title = "The same without each block's largest value; verdict on publ."
    out.print(harness.table(title, ["pair, block", *BLOCKS, "verdict"], body))
    found = metrics["rule"]
    out.print(
        f"Real tensors with one scale: 'INT8 beats E4M3 where max/rms < {found['crossing']:.1f}' is"
        f" right for\n{found['tensors'] - len(found['wrong'])} of {found['tensors']}.\n"
    )


def crossed(row: dict[str, Any]) -> str:
    """A crossing, or the sign that there is none."""
    if row["crossing"] is None:
        if row["crossed"]:
            return f"{row['crossed']}/{row['repeats']}"
        return "-" if row["integer_wins"] is None else ">" if row["integer_wins"] else "<"
    half = f"±{row['crossing_interval']:.2f}" if row["crossing_interval"] else ""
    return f"{row['crossing']:.2f}{half}"
