"""Figures of experiments/dialects.py, drawn from its record alone.

    python figures/dialects.py [RECORD] [--out DIR]

draws <record's name> (the matrices, on weights), _gradient (on gradients dY), _scale and _sqnr,
each as .pdf and .png. The same record gives the same bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a checkout, installed or not

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from figures import style

Rows = list[dict[str, Any]]

TITLES = {
    "pretrained weight": "pretrained weights",
    "weight": "weights W",
    "activation": "activations X",
    "gradient": "gradients dY",
    "weight gradient": "weight gradients dW",
}
MEASURES = {"scale": "scale bytes differ", "codes": "codes differ"}
COLOURS = "cividis_r"  # lightness falls steadily: the same order in grey and to the colour-blind
NEVER = "#8a8a8a"


def short(name: str) -> str:
    return name.split("/", 1)[-1]


def swept_kinds(metrics: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["kind"] for row in metrics["sweep"]))


# Matrices ----------------------------------------------------------------------------------------


def matrix(metrics: dict[str, Any], family: str, kind: str, measure: str) -> np.ndarray:
    """Shares: float32 above the diagonal, bfloat16 below; NaN where meanings are unlike."""
    kept = compared(metrics["dialects"][family])
    shares = np.full((len(kept), len(kept)), np.nan)
    for row in metrics["matrices"]:
        if (row["family"], row["kind"]) != (family, kind):
            continue
        for a, j in enumerate(kept):
            for b, i in enumerate(kept[:a]):
                count = row[measure][max(i, j)][min(i, j)]
                place = (b, a) if row["dtype"] == "float32" else (a, b)
                shares[place] = np.nan if count is None else count / row["blocks"]
    return shares


def compared(rows: Rows) -> list[int]:
    """Places of the dialects whose bits mean the same as another's, those of one rule together."""
    meanings = [row["meaning"] for row in rows]
    groups = list(dict.fromkeys((row["meaning"], row["searches"], row["against"]) for row in rows))
    order = sorted(
        groups, key=lambda g: (meanings.index(g[0]), g[1], groups.index(g))
    )  # searches last, as in the record
    kept = [i for i, meaning in enumerate(meanings) if meanings.count(meaning) > 1]
    return sorted(
        kept,
        key=lambda i: order.index((meanings[i], rows[i]["searches"], rows[i]["against"])),
    )


def matrices(record: dict[str, Any], kind: str) -> Figure:
    """Every two dialects of a family: share of blocks with other scale bytes, with other codes."""
    metrics = record["metrics"]
    families = list(metrics["dialects"])
    figure, grid = style.new(
        len(families), len(MEASURES), figsize=(style.DOUBLE, 7.9), squeeze=False, sharey="row"
    )
    shares = {(f, m): matrix(metrics, f, kind, m) for f in families for m in MEASURES}
    positive = [v for s in shares.values() for v in s[s > 0]]
    norm = LogNorm(style.decade_below(positive, 1e-6) if positive else 0.1, 1)
    image = None
    for family, panels in zip(families, grid, strict=True):
        rows = metrics["dialects"][family]
        rows = [rows[i] for i in compared(rows)]
        for (measure, what), axes in zip(MEASURES.items(), panels, strict=True):
            values = shares[family, measure]
            image = axes.imshow(
                np.ma.masked_where(~(values > 0), values), cmap=COLOURS, norm=norm,
                interpolation="nearest", aspect="equal",
            )  # fmt: skip
            y, x = np.nonzero(values == 0)
            axes.plot(x, y, ".", color=NEVER, markersize=1.6, markeredgewidth=0)
            frame(axes, rows)
            axes.set_title(f"{family}: {what}")
        panels[0].set_yticklabels([short(row["name"]) for row in rows])
    assert image is not None
    bar = figure.colorbar(image, ax=grid, shrink=0.5, aspect=40, pad=0.01)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g} %"))
    bar.outline.set_linewidth(0.4)
    blocks = {(m["family"], m["blocks"]) for m in metrics["matrices"] if m["kind"] == kind}
    counts = ", ".join(f"{n:,} {family}" for family, n in sorted(blocks, reverse=True))
    figure.supxlabel(
        f"{TITLES[kind]}, {counts} blocks. Above the diagonal float32, below it bfloat16.\n"
        "Dot: equal on every block. Blank: bits mean other things. +0 and -0 are two codes.",
        fontsize=6.5,
    )
    return figure


def frame(axes: Axes, rows: Rows) -> None:
    """Names, the diagonal, and lines between dialects whose bits mean unlike things."""
    size = len(rows)
    axes.grid(False)
    axes.plot([-0.5, size - 0.5], [-0.5, size - 0.5], color="#555555", linewidth=0.5)
    for i in range(1, size):
        if rows[i]["meaning"] != rows[i - 1]["meaning"]:
            axes.axhline(i - 0.5, color="#555555", linewidth=0.5)
            axes.axvline(i - 0.5, color="#555555", linewidth=0.5)
    axes.set_xlim(-0.5, size - 0.5)
    axes.set_ylim(size - 0.5, -0.5)
    for side in axes.spines.values():
        side.set_visible(True)
    names = [short(row["name"]) for row in rows]
    axes.set_xticks(range(size), names, rotation=90, fontsize=5.2)
    axes.set_yticks(range(size), names, fontsize=5.2)
    axes.tick_params(length=1.5, pad=1.5)


# Smaller scales ----------------------------------------------------------------------------------

#: Colours of Okabe and Ito, yellow left out; marker and dash tell lines apart in grey.
HUES = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
MARKERS = "os^vDPX"


def look(index: int) -> dict[str, Any]:
    """Seven colours and markers go together; the next seven have another dash."""
    cycle, place = divmod(index, len(HUES))
    return {
        "color": HUES[place],
        "linestyle": DASHES[cycle % len(DASHES)],
        "marker": MARKERS[(place + 2 * cycle) % len(MARKERS)],
        "markevery": (index % 5, 5),
    }


def alike(
    tracks: dict[str, Rows], values: Callable[[dict[str, Any], str], list[float]], within: float
) -> list[list[str]]:
    """Dialects whose curves lie on those of a group's first, on all tensors, at every scale."""
    groups: list[tuple[np.ndarray, list[str]]] = []
    for name, rows in tracks.items():
        curves = np.array([values(row, way) for row in rows for way in WAYS])
        for first, names in groups:
            if np.abs(first - curves).max() <= within:
                names.append(name)
                break
        else:
            groups.append((curves, [name]))
    return [names for _, names in groups]


def named(names: Sequence[str]) -> str:
    """Names for a legend, two a line."""
    words = [short(name) for name in names]
    lines = [", ".join(words[i : i + 2]) for i in range(0, len(words), 2)]
    return ",\n".join(lines)


WAYS = ("power", "other")


def shares_of(row: dict[str, Any], way: str) -> list[float]:
    """Blocks that differ, %."""
    return [100 * count / row["blocks"] for count in row[f"{way}_bits"]]


def levels_of(row: dict[str, Any], way: str) -> list[float]:
    """SQNR in dB, at least 0; 0 where a value is not finite."""
    return [0.0 if level is None else max(0.0, level) for level in row[f"{way}_sqnr_db"]]


def scale(record: dict[str, Any]) -> Figure:
    """Share of blocks that differ from the plain format, and SQNR, as the tensor shrinks."""
    metrics = record["metrics"]
    kinds, families = swept_kinds(metrics), list(metrics["dialects"])
    rows = [row for row in metrics["sweep"] if row["dtype"] == "bfloat16"]
    exponents = [-k for k in metrics["k"]]
    figure, grid = style.new(
        2 * len(families), len(kinds) + 1, figsize=(style.DOUBLE, 8.6), squeeze=False,
        width_ratios=(*[1] * len(kinds), 0.62), height_ratios=[1, 1] * len(families),
    )  # fmt: skip
    for number, family in enumerate(families):
        own = metrics["dialects"][family]
        # Those that mean the same as the family's first, the plain format, and do not search.
        own = [r for r in own if r["meaning"] == own[0]["meaning"] and not r["searches"]]
        tracks = {r["name"]: [t for t in rows if t["dialect"] == r["name"]] for r in own}
        differ = {r["name"]: tracks[r["name"]] for r in own if r["against"] != r["name"]}
        top, bottom = grid[2 * number], grid[2 * number + 1]
        draw_bits(top, differ, exponents)
        draw_quality(bottom, tracks, exponents)
        for column, kind in enumerate(kinds):
            for axes in (top[column], bottom[column]):
                axes.set_xlim(exponents[0] + 2, exponents[-1] - 2)
                axes.set_xticks(range(0, exponents[-1] - 1, -32))
                style.power_of_two_axis(axes.xaxis)
                amax = next(r["amax"] for r in rows if r["kind"] == kind)
                axes.axvline(
                    math.log2(metrics["limits"][family] / amax), color="#555555", linewidth=0.6
                )
            top[column].set_title(f"{family}: {TITLES[kind]}")
        top[0].set_ylabel("bits differ from the\nplain format, % of blocks")
        bottom[0].set_ylabel("SQNR, dB")
    for axes in grid[-1][:-1]:
        axes.set_xlabel("tensor times")
    limit = metrics["limits"]["NVFP4"]
    figure.supxlabel(
        "bfloat16. Lines: powers of two; crosses: times another factor too. Upright lines: the largest"
        f" value is {limit:.2g} (2688 over\nthe largest float32; NVFP4) or 2⁻¹²⁶ (MXFP4). SQNR at the"
        " lower edge: a value is not finite, or below 0.",
        fontsize=6.5,
    )
    return figure


def draw_bits(panels: Sequence[Axes], tracks: dict[str, Rows], exponents: list[int]) -> None:
    *plots, legend = panels
    groups = alike(tracks, shares_of, 0)
    never = [g for g in groups if not any(any(shares_of(r, w)) for r in tracks[g[0]] for w in WAYS)]
    drawn = [g for g in groups if g not in never]
    lowest = style.decade_below(
        [v for g in drawn for r in tracks[g[0]] for way in WAYS for v in shares_of(r, way)]
    )
    handles = draw_groups(
        plots, tracks, drawn, exponents, lambda row, way: style.on_log(shares_of(row, way), lowest)
    )
    for axes in plots:
        style.percent_axis(axes, "y", lowest, every=2)
    if never:
        (line,) = legend.plot([], [], color="white")
        handles.append((line, f"never: {named(never[0])}"))
    legend_of(legend, handles)


def draw_quality(panels: Sequence[Axes], tracks: dict[str, Rows], exponents: list[int]) -> None:
    *plots, legend = panels
    groups = alike(tracks, levels_of, 0.75)
    handles = draw_groups(plots, tracks, groups, exponents, levels_of)
    for axes in plots:
        axes.set_ylim(-1, 25)
    legend_of(legend, handles)


def draw_groups(
    plots: Sequence[Axes],
    tracks: dict[str, Rows],
    groups: Sequence[Sequence[str]],
    exponents: list[int],
    values: Callable[[dict[str, Any], str], Any],
) -> list[tuple[Any, str]]:
    """A line and crosses for each group's first; returns what the legend needs."""
    handles = []
    for group in groups:
        style_of = look(list(tracks).index(group[0]))
        for axes, row in zip(plots, tracks[group[0]], strict=True):
            (line,) = axes.plot(
                exponents, values(row, "power"), **style_of, linewidth=0.9, markersize=2.2
            )
            axes.plot(
                exponents, values(row, "other"), "x", color=line.get_color(), markersize=1.6,
                markeredgewidth=0.4,
            )  # fmt: skip
        handles.append((line, named(group)))
    return handles


def legend_of(axes: Axes, handles: Sequence[tuple[Any, str]]) -> None:
    lines, names = zip(*handles, strict=True)
    axes.axis("off")
    axes.legend(
        lines, names, fontsize=5.2, loc="upper left", frameon=False, borderaxespad=0,
        handlelength=2.2, labelspacing=0.35, bbox_to_anchor=(-0.12, 1.03),
    )  # fmt: skip


# SQNR --------------------------------------------------------------------------------------------

SHAPES = {
    "pretrained weight": ("o", "#000000"),
    "weight": ("s", "#0072b2"),
    "activation": ("^", "#d55e00"),
    "gradient": ("D", "#009e73"),
    "weight gradient": ("v", "#cc79a7"),
}


def sqnr(record: dict[str, Any]) -> Figure:
    """dB lost against the family's best dialect, and against the plain format."""
    metrics = record["metrics"]
    families = list(metrics["dialects"])
    rows = [row for row in metrics["sqnr"] if row["dtype"] == "bfloat16"]
    kinds = [kind for kind in SHAPES if kind in metrics["tensors"]]
    sizes = [len(metrics["dialects"][family]) for family in families]
    figure, grid = style.new(
        len(families), 2, figsize=(style.DOUBLE, 0.9 + 0.15 * sum(sizes)), squeeze=False,
        sharey="row", sharex="col", height_ratios=sizes,
    )  # fmt: skip
    keys = ("lost_db", "change_db")
    lowest = style.decade_below([abs(r[key]) for r in rows for key in keys if r[key]], 1e-5)
    for family, panels in zip(families, grid, strict=True):
        names = [row["name"] for row in metrics["dialects"][family]]
        for axes, key in zip(panels, keys, strict=True):
            for kind in kinds:
                own = {r["dialect"]: r[key] for r in rows if r["kind"] == kind}
                known = [(i, own[n]) for i, n in enumerate(names) if own[n] is not None]
                places = np.array([i for i, _ in known]) + offset(kinds, kind)
                signed = np.array([v for _, v in known])
                x = style.on_log(np.abs(signed), lowest)
                worse = signed >= 0 if key == "lost_db" else signed <= 0
                marker, shade = SHAPES[kind]
                for chosen, inner in ((worse, shade), (~worse, "white")):
                    axes.plot(
                        x[chosen], places[chosen], marker, color=shade, markerfacecolor=inner,
                        markersize=2.6, markeredgewidth=0.6,
                    )  # fmt: skip
                if family == families[0] and axes is panels[0]:
                    axes.plot([], [], marker, color=shade, markersize=2.6, label=TITLES[kind])
            style.percent_axis(axes, "x", lowest, every=2)
            axes.set_yticks(range(len(names)), [short(n) for n in names], fontsize=5.8)
            axes.set_ylim(len(names) - 0.4, -0.6)
        panels[0].set_title(f"{family}: against the best dialect")
        panels[1].set_title(f"{family}: against the plain format")
    grid[-1][0].set_xlabel("SQNR lost, dB")
    grid[-1][1].set_xlabel("SQNR change, dB (filled: lost; open: gained)")
    figure.supxlabel(
        f"bfloat16. 0: none, or below {lowest:.0e} dB",
        fontsize=6.5,
    )
    figure.legend(loc="outside upper center", ncols=len(kinds), frameon=False, fontsize=6.5)
    return figure


def offset(kinds: Sequence[str], kind: str) -> float:
    """Height within a dialect's line: the kinds stand under each other."""
    return 0.15 * (kinds.index(kind) - (len(kinds) - 1) / 2)


# All of them -------------------------------------------------------------------------------------


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    weights, gradients = swept_kinds(record["metrics"])
    return {
        "": matrices(record, weights),
        "_gradient": matrices(record, gradients),
        "_scale": scale(record),
        "_sqnr": sqnr(record),
    }


def draw(path: Path, out: Path) -> list[Path]:
    """Draw every figure; the arguments, result and errors are those of `style.draw`."""
    return style.draw("dialects", figures, path, out)


def main() -> int:
    return style.command("dialects", __doc__ or "", draw)


if __name__ == "__main__":
    sys.exit(main())
