"""Draw the figures of the records of experiments/loss_curves.py, one study a record.

    python figures/loss_curves.py                    # every record of results/full
    python figures/loss_curves.py results/local/loss_curves_recipes.json --out /tmp/figures

A box is the 95 % interval of the mean gap over seeds, each by itself; its line the mean; points are
seeds. A hatch says "not resolved": after Holm's correction within the study, or below the chaos
floor. The grey band is the margin of equality, the darker one the chaos floor. Curves are gaps of
the training loss, means over seeds of the last 50 steps, with the same interval; a dotted line
marks where the rate begins to decay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import studies, verdicts
from figures import style

NAME = "loss_curves"
BIN, WINDOW = 10, 5  # steps a point of a curve, points a mean
DECAY = 0.8
LOWEST = 1e-8  # nats; smaller gaps are drawn here

#: Lines of the recipes study by panel. Within one, shades differ in grey.
PANELS = (
    ("16 bits and FP8", ("fp16", "fp8_delayed", "fp8_current", "fp8_block"), "bf16"),
    ("MX and INT8", ("mxfp8", "mxfp4", "mxfp4_sr_rht", "int8"), "bf16"),
    ("NVFP4", ("nvfp4_naive", "nvfp4", "nvfp4_4over6"), "bf16"),
    ("Against FP8", ("mxfp8", "mxfp4_sr_rht", "nvfp4"), "fp8_block"),
)
COLOURS = {
    "fp8_delayed": "#08306b", "fp8_current": "#9ecae1", "fp8_block": "#2f7fbc",
    "mxfp8": "#fdbe85", "mxfp4": "#8c3c04", "mxfp4_sr_rht": "#dd6b10",
    "nvfp4_naive": "#00441b", "nvfp4_4over6": "#a1d99b", "nvfp4": "#41ab5d",
}  # fmt: skip
DASHED = ("mxfp4_sr_rht", "nvfp4", "nvfp4_4over6", "int8")  # stochastic rounding of gradients
WORDS = {"worse": ">", "better": "<", "equal": "="}

# Records -----------------------------------------------------------------------------------------


def by_cell(record: dict[str, Any], **where: Any) -> dict[str, dict[int, dict[str, Any]]]:
    """Runs by cell and seed."""
    common = record["point"]["common"]
    rows = [{**common, **row} for row in record["metrics"]["runs"]]
    return verdicts.by_cell(rows, rows, **where)


def shade(cell: str) -> str:
    arm = cell.split(",")[0]
    return COLOURS.get(arm, style.colour(arm.replace("nvfp4-", "nvfp4/")))


def curve(
    runs: dict[int, dict[str, Any]], reference: dict[int, dict[str, Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and gaps in percent [seeds, bins], of trailing means; as far as all runs go."""
    pairs = [(runs[s]["train"], reference[s]["train"]) for s in sorted(runs)]
    bins = min(len(v) for pair in pairs for v in pair)
    a, b = (np.array([pair[i][:bins] for pair in pairs]) for i in (0, 1))
    window = min(WINDOW, bins)
    a, b = (
        np.apply_along_axis(np.convolve, 1, v, np.ones(window) / window, "valid") for v in (a, b)
    )
    return BIN * (np.arange(a.shape[1]) + window), 100 * (a - b) / b


# Parts -------------------------------------------------------------------------------------------


def curves(
    axes: Axes, cells: dict[str, dict[int, dict[str, Any]]], names: Sequence[str], reference: str,
    steps: int,
) -> list[tuple[float, str, str]]:  # fmt: skip
    """Gaps over steps, with bands; returns where the lines end, for `style.label_lines`."""
    axes.axhline(0, color="black", linewidth=0.6)
    axes.axvline(DECAY * steps, color="black", linewidth=0.6, linestyle=":")
    ends = []
    for name in names:
        x, gaps = curve(cells[name], cells[reference])
        low, high = np.array([verdicts.interval(list(column))[1:] for column in gaps.T]).T
        line = style.DASHED if name in DASHED else style.SOLID
        axes.plot(x, gaps.mean(0), color=shade(name), linestyle=line)
        axes.fill_between(x, low, high, color=shade(name), alpha=0.18, linewidth=0)
        ends.append((float(gaps.mean(0)[-1]), name, shade(name)))
    axes.set_xlabel("step")
    axes.set_xlim(0, steps)
    return ends


def forest(
    axes: Axes, rows: Sequence[dict[str, Any]], losses: dict[str, dict[int, float]],
    found: dict[str, Any], shade: Callable[[str], str] = shade,
) -> None:  # fmt: skip
    """A line per row of ``arm``, ``reference``, ``mean``, ``low``, ``high``, ``verdict``.

    Parameters
    ----------
    shade : callable
        From an arm to its colour.
    """
    axes.axvspan(-found["margin"], found["margin"], color="#efefef", linewidth=0, zorder=0)
    floor = found["chaos_floor"]
    axes.axvspan(-floor, floor, color="#d0d0d0", linewidth=0, zorder=0)
    axes.axvline(0, color="black", linewidth=0.6)
    for y, row in enumerate(rows):
        colour = shade(row["arm"])
        axes.barh(
            y, row["high"] - row["low"], left=row["low"], height=0.5, color="white",
            edgecolor=colour, linewidth=0.9,
            hatch=style.NOT_RESOLVED if row["verdict"] == "not resolved" else None,
        )  # fmt: skip
        axes.plot([row["mean"]] * 2, [y - 0.38, y + 0.38], color=colour, linewidth=1.8)
        gaps = verdicts.paired(losses[row["arm"]], losses[row["reference"]])
        axes.plot(gaps, [y] * len(gaps), "o", color=colour, markersize=2.2)
        axes.annotate(
            row["verdict"], (1, y), xycoords=("axes fraction", "data"), xytext=(3, 0),
            textcoords="offset points", va="center", fontsize=6.5, style="italic",
        )  # fmt: skip
    axes.set_yticks(
        range(len(rows)),
        [words(row) for row in rows], fontsize=6.5,
    )  # fmt: skip
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.use_sticky_edges = False  # a bar's left end would be the axes'
    axes.margins(x=0.03)
    axes.set_xlabel("gap in held-out loss, nats per byte")


def claims(record: dict[str, Any], shade: Callable[[str], str] = shade) -> Figure:
    """All claims of a record of `experiments.paired`."""
    found = record["metrics"]
    figure, axes = style.new(figsize=(style.DOUBLE, 0.7 + 0.24 * len(found["claims"])))
    losses = {c: {int(s): x for s, x in of.items()} for c, of in found["losses"].items()}
    forest(axes, found["claims"], losses, found, shade)
    return figure


def words(row: dict[str, Any]) -> str:
    """A claim in short, ``"mxfp8 = bf16"``; ``-`` where nothing was claimed."""
    arm, reference = (
        verdicts.short(row[key].removeprefix("fp8, ")) for key in ("arm", "reference")
    )
    return f"{arm} {WORDS.get(row.get('says', ''), '-')} {reference}"


def power_of_ten(k: int) -> str:
    return f"10{str(k).translate(style.SUPERSCRIPTS)}"


def exploratory(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Gaps of cells to the reference, as rows of a forest: no claim, so no verdict."""
    return [
        {"arm": c["cell"], "reference": found["reference"], "mean": c["gap"], "low": c["low"],
         "high": c["high"], "verdict": ""}
        for c in found["cells"] if "gap" in c and not c["cell"].endswith("one ulp")
    ]  # fmt: skip


# Figures -----------------------------------------------------------------------------------------


def recipes(record: dict[str, Any]) -> dict[str, Figure]:
    found = record["metrics"]
    cells, steps = by_cell(record), record["point"]["common"]["steps"]
    figure, axes = style.new(2, 2, figsize=(style.DOUBLE, 3.9))
    ends = []
    for panel, (title, names, reference) in zip(axes.flat, PANELS, strict=True):
        ends.append(curves(panel, cells, names, reference, steps))
        panel.set_title(title)
        panel.set_ylabel(f"gap to {reference}, %")
    figure.draw_without_rendering()
    for panel, labels in zip(axes.flat, ends, strict=True):
        style.label_lines(panel, steps, labels, gap=8)
    gaps, panel = style.new(figsize=(style.DOUBLE, 3.0))
    forest(panel, found["claims"], verdicts.losses_of(cells), found)
    drawn = {"recipes": figure, "gaps": gaps}
    if "prediction" in found:
        drawn["prediction"] = predicted(found)
    return drawn


def predicted(found: dict[str, Any]) -> Figure:
    """Observed gaps in the order that was predicted, the least noise first."""
    guess = found["prediction"]
    cells = {c["cell"]: c for c in found["cells"]}
    order = sorted(zip(guess["predicted_db"], guess["arms"], strict=True), reverse=True)
    figure, axes = style.new(figsize=(style.SINGLE, 2.6))
    for y, (_, arm) in enumerate(order):
        mean, low, high = (cells[arm].get(key, 0.0) for key in ("gap", "low", "high"))
        axes.plot([low, high], [y, y], color=shade(arm), linewidth=1)
        axes.plot([mean], [y], "o", color=shade(arm), markersize=3.5)
    axes.axvline(0, color="black", linewidth=0.6)
    axes.set_yticks(range(len(order)), [f"{arm}, {x:.1f} dB" for x, arm in order], fontsize=6.5)
    axes.invert_yaxis()
    axes.set_xlabel("gap to BF16, nats per byte")
    axes.set_title(f"By predicted noise; rank correlation {guess['rho']:.2f}")
    return figure


def gaps_only(name: str) -> Callable[[dict[str, Any]], dict[str, Figure]]:
    def draw_(record: dict[str, Any]) -> dict[str, Figure]:
        found = record["metrics"]
        rows = found["claims"] or exploratory(found)
        figure, axes = style.new(figsize=(style.DOUBLE, 0.7 + 0.24 * len(rows)))
        forest(axes, rows, verdicts.losses_of(by_cell(record)), found)
        return {name: figure}

    return draw_


def tokens(record: dict[str, Any]) -> dict[str, Figure]:
    """Loss against tokens, and the multipliers."""
    found = record["metrics"]
    figure, (left, right) = style.new(1, 2, figsize=(style.DOUBLE, 2.2), width_ratios=(1.2, 1))
    figure.set_layout_engine("constrained", wspace=0.08)
    sizes = [np.log2(row["tokens"]) for row in found["lengths"]]
    ends = []
    for arm in studies.TOKEN_ARMS:
        means = [float(np.mean(row["losses"][arm])) for row in found["lengths"]]
        line = style.DASHED if arm in DASHED else style.SOLID
        left.plot(sizes, means, color=shade(arm), linestyle=line, marker="o", markersize=3)
        ends.append((means[-1], arm, shade(arm)))
    left.set_xticks(sizes, [f"{row['tokens'] / 1e6:.3g} M" for row in found["lengths"]])
    left.set_xlabel("training tokens (log axis)")
    left.set_ylabel("held-out loss, nats per byte")
    left.set_title("Full schedules")
    left.margins(y=0.12)
    figure.draw_without_rendering()
    style.label_lines(left, sizes[-1], ends, gap=8)
    for y, row in enumerate(found["multipliers"]):
        if "m" in row:
            open_ = row["verdict"] == "not resolved"
            right.barh(
                y, row["high"] - row["low"], left=row["low"], height=0.4, color="white",
                edgecolor=shade(row["slow"]), hatch=style.NOT_RESOLVED if open_ else None,
            )  # fmt: skip
            right.plot([row["m"]] * 2, [y - 0.3, y + 0.3], color=shade(row["slow"]), linewidth=1.8)
    right.axvline(1, color="black", linewidth=0.6)
    right.use_sticky_edges = False  # a bar's left end would be the axes'
    right.margins(x=0.06)
    right.set_yticks(
        range(len(found["multipliers"])),
        [f"{row['slow']}\nfor {row['fast']}" for row in found["multipliers"]], fontsize=6.5,
    )  # fmt: skip
    right.set_ylim(len(found["multipliers"]) - 0.5, -0.5)
    right.grid(axis="y", visible=False)
    right.set_xlabel("times as many tokens for equal loss")
    right.set_title("Token multiplier")
    return {"tokens": figure}


def switch(record: dict[str, Any]) -> dict[str, Figure]:
    """The last third of the curves, and the gaps."""
    found = record["metrics"]
    cells, steps = by_cell(record), record["point"]["common"]["steps"]
    figure, (left, right) = style.new(1, 2, figsize=(style.DOUBLE, 2.0))
    names = ["nvfp4", *(c["arm"] for c in found["claims"])]
    lines = dict(zip(names, (style.SOLID, "--", ":", "-."), strict=True))
    ends = []
    for name in names:
        x, gaps = curve(cells[name], cells["bf16"])
        late = x >= 0.6 * steps
        left.plot(x[late], gaps.mean(0)[late], color=shade("nvfp4"), linestyle=lines[name])
        label = name.removeprefix("nvfp4, ").removesuffix(" bf16 at the end")
        ends.append((float(gaps.mean(0)[-1]), label, shade("nvfp4")))
    left.axhline(0, color="black", linewidth=0.6)
    left.axvline(DECAY * steps, color="black", linewidth=0.6, linestyle=":")
    left.set_xlabel("step")
    left.set_ylabel("gap to BF16, %")
    left.set_title("BF16 from the decay on")
    figure.draw_without_rendering()
    style.label_lines(left, steps, ends, gap=8)
    forest(right, found["claims"], verdicts.losses_of(cells), found)
    right.set_yticks(range(3), [f"{which} < none" for which in studies.SWITCHES], fontsize=6.5)
    return {"switch": figure}


def chaos(record: dict[str, Any]) -> dict[str, Figure]:
    """Paired gaps to FP32 by learning rate."""
    rows = record["metrics"]["rates"]
    figure, axes = style.new(figsize=(style.SINGLE, 2.2))
    ends = []
    names = [key.removeprefix("rms ") for key in rows[0] if key.startswith("rms ")]
    places = np.arange(len(rows))
    for name in names:
        grey, mark = ("#9a9a9a", "s") if name == "bf16" else ("#000000", "o")
        rms = np.maximum(LOWEST, [row[f"rms {name}"] for row in rows])
        axes.plot(places, rms, color=grey, marker=mark, markersize=4)
        for x, row in zip(places, rows, strict=True):
            gaps = np.maximum(LOWEST, np.abs(row[f"gaps {name}"]))
            axes.plot([x] * len(gaps), gaps, mark, color=grey, markersize=2, alpha=0.6)
        ends.append((float(rms[-1]), name.removeprefix("fp32, "), grey))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda y, _: power_of_ten(round(np.log10(y))))
    axes.set_xticks(places, [f"{row['rate']:g}" for row in rows])
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("|gap to FP32|, nats per byte")
    axes.set_title("How far paired runs part")
    figure.draw_without_rendering()
    style.label_lines(axes, places[-1], ends, gap=8)
    return {record["point"]["study"]: figure}


def proxy(record: dict[str, Any]) -> dict[str, Figure]:
    """Runs with spikes, runs that diverged, and the loss at the end by FP32's: arms by rates."""
    counts = record["metrics"]["counts"]
    arms = list(dict.fromkeys(c["arm"] for c in counts))
    rates = sorted({c["rate"] for c in counts})
    cell = {(c["arm"], c["rate"]): c for c in counts}
    figure, axes = style.new(1, 3, figsize=(style.DOUBLE, 0.9 + 0.25 * len(arms)), sharey=True)

    def share(key: str) -> Callable[[dict[str, Any]], tuple[float, str]]:
        return lambda c: (c[key] / c["runs"], f"{c[key]} of {c['runs']}")

    def ratio(c: dict[str, Any]) -> tuple[float, str]:
        if c["ratio"] is None:
            return 1.0, "diverged"
        return min(1.0, max(0.0, np.log10(c["ratio"]))), f"{c['ratio']:.2f}"

    panels = (
        ("Runs with spikes", share("spiked")),
        ("Runs that diverged", share("diverged")),
        ("Final loss / FP32's", ratio),
    )
    for panel, (title, look) in zip(axes, panels, strict=True):
        looks = [[look(cell[arm, rate]) for rate in rates] for arm in arms]
        darkness = [[dark for dark, _ in row] for row in looks]
        panel.imshow(darkness, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        for y, row in enumerate(looks):
            for x, (dark, label) in enumerate(row):
                panel.text(
                    x, y, label, ha="center", va="center", fontsize=7, color=style.text_on(dark)
                )
        panel.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        panel.set_yticks(range(len(arms)), arms)
        panel.grid(visible=False)
        panel.set_title(title)
        panel.set_xlabel("learning rate")
    return {"proxy": figure}


def parts(record: dict[str, Any]) -> dict[str, Figure]:
    """Kurtosis of X and dY, and how much of dY is zeroed, by part of each model."""
    rows = {(r["model"], r["part"], r["tensor"]): r for r in record["metrics"]["parts"]}
    names = list(dict.fromkeys((model, part) for model, part, _ in rows))
    figure, (left, right) = style.new(
        1, 2, figsize=(style.DOUBLE, 0.8 + 0.2 * len(names)), sharey=True
    )
    places = np.arange(len(names))
    for tensor, mark in (("x", "o"), ("dy", "s")):
        values = [rows[(*name, tensor)]["kurtosis"] for name in names]
        filled = "black" if tensor == "x" else "white"
        left.plot(
            values, places, mark, color="black", markerfacecolor=filled,
            label={"x": "X", "dy": "dY"}[tensor],
        )  # fmt: skip
    left.set_xscale("symlog", linthresh=1)
    left.set_xticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    left.set_xlabel("excess kurtosis, median over layers and seeds")
    left.legend(frameon=False, fontsize=6.5, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    lowest = 0.01  # percent
    for fmt, mark in (("e4m3", "o"), ("fp16", "D"), ("mxfp4/rceil", "s"), ("nvfp4", "^")):
        values = [100 * rows[(*name, "dy")][f"zeroed {fmt}"] for name in names]
        right.plot(
            style.on_log(values, lowest), places, mark, color=style.colour(fmt), label=fmt,
            markersize=3.5,
        )  # fmt: skip
    style.percent_axis(right, "x", lowest)
    right.set_xlabel("dY that becomes zero, %")
    right.legend(frameon=False, fontsize=6.5, loc="upper left", bbox_to_anchor=(1, 1))
    left.set_yticks(places, [f"{model}: {part}" for model, part in names])
    left.set_ylim(len(names) - 0.5, -0.5)
    return {"parts": figure}


DRAWINGS: dict[str, Callable[[dict[str, Any]], dict[str, Figure]]] = {
    "recipes": recipes,
    "ablations": gaps_only("ablations"),
    "tokens": tokens,
    "chaos": chaos,
    "switch": switch,
    "accumulation": gaps_only("accumulation"),
    "hybrid": gaps_only("hybrid"),
    "parts": parts,
    "proxy": proxy,
    "tune": chaos,
    "predict": lambda record: {},
}


def figures(record: dict[str, Any]) -> dict[str, Figure]:
    made = DRAWINGS[record["point"]["study"]](record)
    return {f"_{name}": figure for name, figure in made.items()}


def draw(path: Path, out: Path) -> list[Path]:
    """Draw the figures of a study; the arguments, result and errors are those of `style.draw`."""
    return style.draw(NAME, figures, path, out, stem=NAME)


def main() -> int:
    return style.command(NAME, __doc__ or "", draw, "results/full", f"{NAME}_*.json")


if __name__ == "__main__":
    sys.exit(main())
