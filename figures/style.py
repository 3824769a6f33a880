"""One style for all figures, and files whose bytes depend on the record alone.

Colour says the format's family: 16-bit black and grey, FP8 blues, MX oranges, NVFP4 greens; within
a family lightness differs, so that greyscale prints keep the lines apart. Line style says the
rounding: solid to nearest, dashed stochastic. A hatch says "not resolved". Labels stand at the
curves; axes of powers of two say 2^k.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from experiments import harness

ROOT = harness.ROOT
SINGLE, DOUBLE = 3.4, 6.9  # inches: one column, two columns

#: First matching prefix wins.
COLOURS = (
    ("bf16", "#9a9a9a"), ("fp16", "#000000"), ("tf32", "#5f5f5f"), ("fp32", "#3f3f3f"),
    ("e5m2", "#6aaed6"), ("fp8_tensor_e5m2", "#6aaed6"), ("mxfp8_e5m2", "#fdbe85"),
    ("fp8_block", "#2f7fbc"), ("e4m3", "#08519c"), ("fp8", "#08519c"),
    ("mxfp8", "#f9a04b"), ("mxfp6", "#ef8a2c"), ("mxfp4/rceil", "#8c3c04"), ("mx", "#dd6b10"),
    ("nvfp4/", "#74c476"), ("nvfp4", "#1b7f3b"),
)  # fmt: skip
OTHER = "#7a4a9e"
SOLID, DASHED = "-", (0, (3, 1.5))  # to nearest, stochastic
NOT_RESOLVED = "////"

SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same glyphs on every machine
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "hatch.linewidth": 0.5,
    "figure.dpi": 100,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # TrueType: text stays text
    "pdf.compression": 6,
    "text.usetex": False,
    "text.parse_math": False,
}


def colour(name: str) -> str:
    """Colour of a format."""
    return next((shade for prefix, shade in COLOURS if name.startswith(prefix)), OTHER)


def new(rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """`matplotlib.pyplot.subplots` in our style, whatever the user's own settings are."""
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(SETTINGS)  # type: ignore[arg-type]
    options.setdefault("layout", "constrained")
    return plt.subplots(rows, columns, **options)


def save(figure: Figure, path: Path, record: dict[str, Any]) -> list[Path]:
    """Write ``path`` as .pdf and .png, naming the record's commit inside, and close the figure.

    No dates and no versions: the same record gives the same bytes.
    """
    commit = record["provenance"]["git"]["commit"] or "no commit"
    source = f"{record['experiment']} at {commit}"
    path.parent.mkdir(parents=True, exist_ok=True)
    pdf, png = path.with_name(f"{path.name}.pdf"), path.with_name(f"{path.name}.png")
    nothing = {"CreationDate": None, "Creator": None, "Producer": None}
    figure.savefig(pdf, metadata={"Title": path.name, "Subject": source, **nothing})
    figure.savefig(png, metadata={"Title": path.name, "Source": source, "Software": None})
    plt.close(figure)
    return [pdf, png]


# Command -----------------------------------------------------------------------------------------


def draw(
    name: str, make: Callable[[dict[str, Any]], dict[str, Figure]], path: Path, out: Path,
    stem: str | None = None,
) -> list[Path]:  # fmt: skip
    """Draw the figures of a record; returns the files.

    Parameters
    ----------
    name : str
        The experiment whose records these figures show.
    make : callable
        From a record to figures, by what follows `stem` in their names.
    path : Path
        The record.
    out : Path
        A folder.
    stem : str, optional
        Default: the record's own.

    Raises
    ------
    ValueError
        Where the record is missing, broken, or that of a failed run or another experiment.
    """
    record = harness.read_record(path, name)
    return [
        file
        for suffix, figure in make(record).items()
        for file in save(figure, out / f"{stem or path.stem}{suffix}", record)
    ]


def command(
    name: str, description: str, draw: Callable[[Path, Path], list[Path]],
    folder: str = "results", pattern: str = "",
) -> int:  # fmt: skip
    """The command line of ``figures/<name>.py``: which records, where to; returns the exit status.

    Parameters
    ----------
    folder, pattern : str
        Where the committed records are, and which they are; default: ``<name>.json``.
    """
    pattern = pattern or f"{name}.json"
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "records", nargs="*", type=Path, metavar="RECORD", help=f"default: {folder}/{pattern}"
    )
    of_paper = folder == "results/full"
    places = "figures/full, or figures/ for a RECORD" if of_paper else "figures/"
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"default: {places}")
    args = parser.parse_args()
    home = ROOT / folder
    # What is committed is what make figures draws; a record of one's own is drawn beside it.
    place = ROOT / "figures" / ("full" if of_paper and not args.records else "")
    try:
        for record in args.records or sorted(home.glob(pattern)) or [home / pattern]:
            print("\n".join(str(path) for path in draw(record, args.out or place)))
    except ValueError as error:
        print(f"figures/{name}.py: {error}", file=sys.stderr)
        return 2
    return 0


# Axes --------------------------------------------------------------------------------------------


def power_of_two_axis(axis: Any) -> None:
    """Label an axis that counts exponents with 2^k."""
    axis.set_major_formatter(FuncFormatter(lambda k, _: power_of_two(k)))


SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_of_two(k: float) -> str:
    """``2`` with k above it; empty between whole exponents."""
    return f"2{str(round(k)).translate(SUPERSCRIPTS)}" if float(k).is_integer() else ""


def percent_axis(axes: Axes, which: str, lowest: float, every: int = 1) -> None:
    """A log axis up to 100 %, with a place for exact zero at its left or lower end.

    `every` second decade is labelled, counted from 100 %, but not the one next to zero.
    """
    highest = 100.0
    getattr(axes, f"set_{which}scale")("log")
    decades = [10.0**e for e in range(-9, 3) if lowest <= 10.0**e <= highest]
    axis = getattr(axes, f"{which}axis")
    axis.set_ticks([zero_place(lowest), *decades])
    shown = [i % every == 0 for i in range(len(decades))][::-1]
    shown[0] = shown[0] and every == 1
    axis.set_ticklabels(
        ["0", *(f"{d:g}" if s else "" for d, s in zip(decades, shown, strict=True))]
    )
    getattr(axes, f"set_{which}lim")(zero_place(lowest) / 1.7, highest * 1.6)


def zero_place(lowest: float) -> float:
    """Where exact zero is drawn on a log axis that starts at `lowest`."""
    return lowest / 3


def on_log(values: Sequence[float], lowest: float) -> np.ndarray:
    """Percentages ready for `percent_axis`: zero and anything below `lowest` at zero's place."""
    array = np.asarray(values, dtype=float)
    return np.where(array >= lowest, array, zero_place(lowest))


def decade_below(values: Sequence[float], at_least: float = 1e-6) -> float:
    """The power of ten at or below the smallest positive value."""
    positive = [v for v in values if v > 0]
    return max(at_least, 10.0 ** np.floor(np.log10(min(positive)))) if positive else 0.1


def text_on(background: float) -> str:
    """Black or white, whichever reads on a grey of that darkness (0 white, 1 black)."""
    return "white" if background > 0.55 else "black"


def label_lines(
    axes: Axes, x: float, labels: Sequence[tuple[float, str, str]], gap: float, side: str = "right"
) -> None:
    """Labels beside x, pushed apart to at least `gap` (in points) where they would touch.

    Parameters
    ----------
    labels : sequence of (y, text, colour)
    side : {"right", "left"}
    """
    to_points = 72 / axes.figure.dpi
    wanted = sorted(
        (axes.transData.transform((x, y))[1] * to_points, y, *rest) for y, *rest in labels
    )
    # Neighbours that would touch form a group, spaced evenly around the middle of their places.
    groups: list[list[int]] = []
    for i in range(len(wanted)):
        groups.append([i])
        while len(groups) > 1:
            if lowest_of(groups[-1], wanted, gap) >= highest_of(groups[-2], wanted, gap) + gap:
                break
            last = groups.pop()
            groups[-1] += last
    for group in groups:
        bottom = lowest_of(group, wanted, gap)
        for k, i in enumerate(group):
            height, y, text, shade = wanted[i]
            axes.annotate(
                text, (x, y), xytext=(4 if side == "right" else -4, bottom + k * gap - height),
                textcoords="offset points", ha="left" if side == "right" else "right", va="center",
                color=shade, annotation_clip=False, fontsize=7,
            )  # fmt: skip


def lowest_of(group: list[int], wanted: list[Any], gap: float) -> float:
    return sum(wanted[i][0] for i in group) / len(group) - gap * (len(group) - 1) / 2


def highest_of(group: list[int], wanted: list[Any], gap: float) -> float:
    return lowest_of(group, wanted, gap) + gap * (len(group) - 1)
