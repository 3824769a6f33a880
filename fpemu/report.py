"""A run of `fpemu.Monitor` as pictures and tables: one HTML page that needs nothing else, and PNGs.

The same run gives the same bytes: no dates, no versions, no settings of the user's. Dark is bad (or
large) in every heat map; lightness alone says it, so greyscale and colour-blind readers see the
same.
"""

from __future__ import annotations

import base64
import html
import io
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from fpemu.errors import FileFormatError, unknown
from fpemu.monitor import KINDS, Run, read

Record = dict[str, Any]
Ticks = Sequence[tuple[float, str]]

MOST_COLUMNS = 120  # of a heat map; more steps are grouped
MOST_LABELS = 60  # layer names along a heat map
LEAST_SHARE = 1e-4  # 0.01 %: smaller shares look like it


@dataclass(frozen=True)
class Metric:
    """One heat map per kind of tensor.

    `value` takes a record and a format's part of it; `worst` is max or min and says which end is
    dark; `scale` is "share", "log2" or "linear".
    """

    name: str
    title: str
    value: Callable[[Record, Record], float | None]
    scale: str
    worst: Callable[..., float] = max
    of_format: bool = True


def _sqnr(record: Record, loss: Record) -> float | None:
    """None where nothing was lost: there is no ratio to draw."""
    return loss.get("sqnr_db")


def _outlier(record: Record, loss: Record) -> float | None:
    return record["channels"][0][2] if record.get("channels") else None


def _heavy(record: Record, loss: Record) -> float | None:
    """Kurtosis above the normal distribution's, for a log scale."""
    return None if record["kurtosis"] is None else max(record["kurtosis"], 2.0**-4)


METRICS = (
    Metric(
        "underflow", "Underflow: share of the nonzero values that become zero, %",
        lambda record, loss: loss.get("underflow_share"), "share",
    ),
    Metric(
        "saturated", "Saturation: share of the values cast from beyond the format's range, %",
        lambda record, loss: loss.get("saturated_share"), "share",
    ),
    Metric("sqnr", "SQNR, dB (dark: low)", _sqnr, "linear", min),
    Metric("amax", "Largest magnitude", lambda record, loss: record["amax"] or None, "log2", max, False),
    Metric("kurtosis", "Excess kurtosis (0: normal distribution)", _heavy, "log2", max, False),
    Metric("outliers", "Largest channel: its amax / RMS of the tensor", _outlier, "log2", max, False),
)  # fmt: skip


# Finding a run -----------------------------------------------------------------------------------


def find(run: str | Path, rank: int = 0) -> Path:
    """The file of a run: the path itself, that rank's file of it, or the one in that folder.

    Raises
    ------
    FileNotFoundError, ValueError
        Where there is none, or more than one.
    """
    path = Path(run)
    if path.is_file():
        return path
    if path.is_dir():
        there = sorted(path.glob("*.jsonl"))
        mine = [p for p in there if p.name.endswith(f".rank{rank}.jsonl")] or there
        if len(mine) > 1:
            raise ValueError(
                f"report: {str(path)!r} holds {len(mine)} runs: {', '.join(p.name for p in mine)};"
                " one is drawn at a time. Name its file."
            )
        if mine:
            return mine[0]
    other = path.with_name(f"{path.stem}.rank{rank}.jsonl")
    if not path.is_dir() and other.is_file():
        return other
    raise FileNotFoundError(f"report: no run at {str(path)!r}; fpemu.Monitor(path=...) writes one.")


def load(run: str | Path, rank: int = 0) -> Run:
    """Read the run that `find` finds; it must hold a step."""
    found = read(find(run, rank))
    if not found.records:
        raise FileFormatError(
            f"report: {str(found.path)!r} has no step yet; monitor.step() records one."
        )
    return found


def chosen_format(run: Run, fmt: str | None) -> str:
    """`fmt` if the run has it; by default the run's last, which should be its boldest."""
    known = run.header["formats"]
    if fmt is None:
        return known[-1] if known else ""
    if fmt not in known:
        raise unknown("report", "format of this run", fmt, known)
    return fmt


# Tables ------------------------------------------------------------------------------------------


def measured(run: Run) -> Iterator[Record]:
    """The records of tensors that were there."""
    return (record for record in run.records.values() if "absent" not in record)


def worst(run: Run, fmt: str, top: int = 20) -> list[Record]:
    """The worst tensors, each by its worst step.

    Worse means: more NaN and infinities, then a larger share of underflow, then a lower SQNR.
    """
    by_tensor: dict[tuple[str, str], tuple[Any, Record]] = {}
    for record in measured(run):
        loss = record["formats"].get(fmt, {})
        sqnr = loss.get("sqnr_db")
        badness = (
            record["nan"] + record["inf"],
            loss.get("underflow_share") or 0.0,
            -inf if sqnr is None else -sqnr,
        )
        key = (record["layer"], record["kind"])
        if key not in by_tensor or badness > by_tensor[key][0]:
            by_tensor[key] = (badness, record)
    ranked = sorted(by_tensor.values(), key=lambda pair: pair[0], reverse=True)
    return [record for _, record in ranked[:top]]


WORST_COLUMNS = (
    "layer", "tensor", "step", "underflow", "saturated", "SQNR dB", "kurtosis", "outlier channel",
    "amax", "NaN, Inf",
)  # fmt: skip


def worst_row(record: Record, fmt: str) -> tuple[str, ...]:
    """A record as the texts of `WORST_COLUMNS`."""
    loss = record["formats"].get(fmt, {})
    outlier = record["channels"][0] if record["channels"] else None
    return (
        record["layer"], record["kind"], str(record["step"]), percent(loss.get("underflow_share")),
        percent(loss.get("saturated_share")), decibels(loss), number(record["kurtosis"]),
        f"{outlier[0]}: {number(outlier[2])}x" if outlier else "-", number(record["amax"]),
        f"{record['nan'] + record['inf']:,}" if record["nan"] + record["inf"] else "0",
    )  # fmt: skip


#: Of `WORST_COLUMNS`, those that fit a terminal of 80 columns.
SHORT_COLUMNS = (*WORST_COLUMNS[:6], "outlier")


def short_row(record: Record, fmt: str) -> tuple[str, ...]:
    row = worst_row(record, fmt)
    return (*row[:6], row[WORST_COLUMNS.index("outlier channel")])


FORMAT_COLUMNS = (
    "tensor", "format", "underflow, median", "underflow, worst", "in layer", "SQNR dB, median",
    "SQNR dB, worst",
)  # fmt: skip


def format_rows(run: Run) -> Iterator[tuple[str, ...]]:
    """Every format over the layers, at the last step."""
    last = [record for record in measured(run) if record["step"] == run.steps[-1]]
    for kind in KINDS:
        for fmt in run.header["formats"]:
            found = [(r["layer"], r["formats"].get(fmt, {})) for r in last if r["kind"] == kind]
            shares = [(loss["underflow_share"], layer) for layer, loss in found if "signal" in loss]
            known = [loss["sqnr_db"] for _, loss in found if loss.get("sqnr_db") is not None]
            if not shares:
                continue
            most, layer = max(shares, key=lambda pair: pair[0])
            yield (
                kind, fmt, percent(statistics.median(share for share, _ in shares)), percent(most),
                layer if most else "-", number(statistics.median(known), 4) if known else "lossless",
                number(min(known), 4) if known else "lossless",
            )  # fmt: skip


def percent(share: float | None) -> str:
    """One decimal, two below 1 %; smaller than 0.01 % says so, and 0 is exact."""
    if share is None:
        return "-"
    if 0 < share < LEAST_SHARE:
        return "<0.01%"
    return f"{100 * share:.{1 if share >= 0.01 else 2 if share else 0}f}%"


def decibels(loss: Record) -> str:
    if loss.get("sqnr_db") is not None:
        return f"{loss['sqnr_db']:.1f}"
    return "lossless" if loss.get("noise") == 0 and loss.get("signal") else "-"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


# Pictures ----------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same glyphs on every machine
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 0,
    "hatch.linewidth": 0.5,
    "text.parse_math": False,
}
COLOURS = "magma_r"  # its lightness falls evenly, from nearly white to black


def heat_maps(run: Run, metric: Metric, fmt: str) -> bytes | None:
    """PNG of a metric: a panel per kind of tensor, a row per layer, a column per step."""
    layers, steps = run.layers, run.steps
    groups = np.array_split(np.array(steps), min(len(steps), MOST_COLUMNS))
    panels = {}
    for kind in KINDS:
        values = np.full((len(layers), len(groups)), np.nan)
        for i, layer in enumerate(layers):
            for j, group in enumerate(groups):
                records = [run.records.get((int(step), layer, kind)) for step in group]
                known = _values(metric, fmt, records)
                if known:
                    values[i, j] = metric.worst(known)
        if not np.isnan(values).all():
            panels[kind] = values
    every = -(-len(groups) // 4)
    ticks = [(k, str(groups[k][0])) for k in range(0, len(groups), every)]
    end = f", in {fmt}" if metric.of_format else ""
    title = metric.title + end
    if len(groups) < len(steps):
        title += f"; the worst of each {len(groups[0])} recorded steps"
    title += " (white: 0; hatched: absent)" if metric.scale == "share" else " (hatched: absent)"
    return _draw(panels, layers, metric, title, dict.fromkeys(panels, ticks), "step")


def _values(metric: Metric, fmt: str, records: Iterable[Record | None]) -> list[float]:
    there = [r for r in records if r is not None and "absent" not in r]
    values = (metric.value(r, r["formats"].get(fmt, {})) for r in there)
    return [value for value in values if value is not None]


def exponent_maps(run: Run) -> bytes | None:
    """PNG of the last step's exponents: a row per layer, a column per binade, zeros at the left."""
    last, panels = run.steps[-1], {}
    ticks: dict[str, list[tuple[float, str]]] = {}
    for kind in KINDS:
        shares: dict[str, dict[int, float]] = {}
        zeros = {}
        for layer in run.layers:
            record = run.records.get((last, layer, kind))
            if record is None or "absent" in record or not record["size"]:
                continue
            low, counts = record["exponents"]["lowest"], record["exponents"]["counts"]
            found = {low + k: n / record["size"] for k, n in enumerate(counts) if n}
            shares[layer], zeros[layer] = found, record["zeros"] / record["size"]
        used = [e for found in shares.values() for e, share in found.items() if share >= 1e-5]
        if not used:
            continue
        low, high = min(used), max(max(found, default=low) for found in shares.values())
        bins = range(low, high + 1)
        zero = max(1, len(bins) // 16)  # columns of the zero bin, and of the gap beside it
        values = np.full((len(run.layers), 2 * zero + len(bins)), np.nan)
        for i, layer in enumerate(run.layers):
            if layer in shares:
                found = shares[layer]
                values[i, :zero], values[i, zero : 2 * zero] = zeros[layer], 0.0
                values[i, 2 * zero :] = [found.get(e, 0.0) for e in bins]
                values[i, 2 * zero] += sum(share for e, share in found.items() if e < low)
        panels[kind] = values
        every = -(-len(bins) // 4)
        ticks[kind] = [((zero - 1) / 2, "0")]
        ticks[kind] += [
            (2 * zero + k, f"2{_raised(low + k)}") for k in range(every, len(bins), every)
        ]
    metric = Metric("exponents", "", lambda record, loss: None, "share")
    title = (
        f"Exponents at step {last}: share of the values in each binade, %; zeros first (white: 0)"
    )
    return _draw(panels, run.layers, metric, title, ticks, "binade")


def _raised(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _draw(
    panels: dict[str, np.ndarray],
    layers: list[str],
    metric: Metric,
    title: str,
    ticks: Mapping[str, Ticks],
    axis_name: str,
) -> bytes | None:
    if not panels:
        return None
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own settings are
        matplotlib.rcParams.update(SETTINGS)  # type: ignore[arg-type]
        width = 0.06 * max(map(len, layers)) + 1.2 + 1.55 * len(panels)
        height = 1.25 + min(max(0.15 * len(layers), 0.9), 11.0)
        figure = Figure(figsize=(max(width, 5.5), height), layout="constrained")
        FigureCanvasAgg(figure)
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        colours, norm, bar = _scale(metric, np.concatenate([v.ravel() for v in panels.values()]))
        for axes, (kind, values) in zip(all_axes, panels.items(), strict=True):
            rows, columns = values.shape
            # Shows where nothing is drawn: there was no such tensor, or no such number.
            back = Rectangle(
                (-0.5, -0.5), columns, rows, hatch="//////", facecolor="white", edgecolor="#b0b0b0"
            )
            axes.add_patch(back)
            if metric.scale == "share":  # only exact zero lies below the scale
                lifted = np.maximum(values, LEAST_SHARE)
                values = np.where(values == 0, LEAST_SHARE / 10, lifted)
            image = axes.imshow(
                np.ma.masked_invalid(values), cmap=colours, norm=norm, aspect="auto",
                interpolation="nearest", zorder=2,
            )  # fmt: skip
            axes.set_title(kind)
            axes.set_xticks([at for at, _ in ticks[kind]], [text for _, text in ticks[kind]])
            axes.set_xlabel(axis_name)
            step = -(-rows // MOST_LABELS)
            axes.set_yticks(range(0, rows, step), layers[::step])
        figure.suptitle(title, x=0.01, ha="left", fontsize=9)
        colour_bar = figure.colorbar(
            image, ax=list(all_axes), fraction=0.05, pad=0.01, **bar["draw"]
        )
        if "ticks" in bar:
            places, names = bar["ticks"]
            colour_bar.set_ticks(places, labels=names)
        colour_bar.minorticks_off()
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=160, metadata={"Software": None, "Title": title})
    return data.getvalue()


def _scale(metric: Metric, values: np.ndarray) -> tuple[Any, Any, dict[str, Any]]:
    """Colours, their norm, and how the colour bar is drawn and labelled."""
    from matplotlib import colormaps
    from matplotlib.colors import Colormap, ListedColormap, LogNorm, Normalize

    # Without its lightest end, which looks like white; black is always bad or large.
    shades = colormaps[COLOURS](np.linspace(0.08, 0.97, 256))
    colours: Colormap = ListedColormap(shades[::-1] if metric.worst is min else shades)
    known = values[~np.isnan(values)]
    if metric.scale == "share":
        colours = colours.with_extremes(under="white")  # exact zero
        ticks = [1e-4, 1e-3, 1e-2, 1e-1, 1]
        names = ["0.01", "0.1", "1", "10", "100"]
        return (
            colours,
            LogNorm(LEAST_SHARE, 1.0),
            {"draw": {"extend": "min"}, "ticks": (ticks, names)},
        )
    if metric.scale == "linear":
        low, high = float(np.floor(known.min())), float(np.ceil(known.max()))
        return colours, Normalize(low, max(high, low + 1)), {"draw": {}}
    low, high = (int(np.floor(np.log2(v))) for v in (known.min(), known.max()))
    high += 1
    every = max(1, -(-(high - low) // 6))
    ticks = [2.0**e for e in range(low, high + 1, every)]
    names = [_power_label(e) for e in range(low, high + 1, every)]
    return colours, LogNorm(2.0**low, 2.0**high), {"draw": {}, "ticks": (ticks, names)}


def _power_label(exponent: int) -> str:
    return str(2**exponent) if 0 <= exponent <= 10 else f"2{_raised(exponent)}"


# The page ----------------------------------------------------------------------------------------


def write(run: Run, out: str | Path, fmt: str | None = None, top: int = 20) -> list[Path]:
    """Draw a run.

    Parameters
    ----------
    run : Run
    out : str or Path
        The page, ``NAME.html``; the pictures are ``NAME.underflow.png`` and so on beside it.
    fmt : str, optional
        Format of the pictures and of the table of the worst. Default: the run's last.
    top : int
        Rows of that table.

    Returns
    -------
    list of Path
        What was written, the page first.
    """
    fmt = chosen_format(run, fmt)
    out = Path(out)
    pictures = {m.name: heat_maps(run, m, fmt) for m in METRICS if fmt or not m.of_format}
    pictures["exponents"] = exponent_maps(run)
    drawn = {name: data for name, data in pictures.items() if data is not None}
    out.parent.mkdir(parents=True, exist_ok=True)
    files = {out.with_name(f"{out.stem}.{name}.png"): data for name, data in drawn.items()}
    page = _page(run, fmt, drawn, top)
    for path, data in {out: page.encode(), **files}.items():
        _replace(path, data)
    return [out, *files]


def _replace(path: Path, data: bytes) -> None:
    """Write under a temporary name, then rename: no half-written file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #111; background: #fff;
       max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
img { max-width: 100%; display: block; margin: 1rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .2rem .7rem .2rem 0; text-align: right; border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #111; vertical-align: bottom; }
.text { text-align: left; }
code { background: #f2f2f2; padding: 0 .2em; }
"""
DEFINITIONS = (
    ("underflow", "nonzero values that become zero, among the nonzero values"),
    ("saturated", "finite values that, scaled, lie beyond the largest the format holds"),
    ("SQNR", "10 log10(sum x² / sum (x−q)²) over one tensor, in dB; large values decide it"),
    ("kurtosis", "m4 / m2² − 3: 0 for a normal distribution, large where a few values stick out"),
    ("outlier channel", "index of the channel with the largest magnitude, and that over the RMS"),
)  # fmt: skip


def _page(run: Run, fmt: str, pictures: dict[str, bytes], top: int) -> str:
    head, steps = run.header, run.steps
    rank = f", rank {head['rank']} of {head['world']}" if head["world"] > 1 else ""
    torn = " The last line was cut off and is left out." if run.torn else ""
    about = (
        f"{len(run.layers)} layers, {len(steps)} recorded steps ({steps[0]} to {steps[-1]}){rank}."
        f" Formats: {', '.join(head['formats']) or 'none'}; blocks along"
        f" {'channels' if head['axis'] == -1 else 'tokens'}.{torn}"
    )
    images = "".join(
        f'<img alt="{html.escape(_title(name))}"'
        f' src="data:image/png;base64,{base64.b64encode(data).decode()}">\n'
        for name, data in pictures.items()
    )
    terms = "".join(f"<li><b>{html.escape(a)}</b>: {html.escape(b)}</li>" for a, b in DEFINITIONS)
    rows = [worst_row(record, fmt) for record in worst(run, fmt, top)]
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(run.path.name)}</title><style>{STYLE}</style></head><body>
<h1>{html.escape(run.path.name)}: what {html.escape(fmt) or "formats"} would do</h1>
<p>{html.escape(about)}</p>
<h2>Worst tensors</h2>
<p>Each by its worst step; first by NaN and infinities, then by underflow, then by SQNR.</p>
{_html_table(WORST_COLUMNS, rows, 2)}
<h2>Formats at step {steps[-1]}</h2>
{_html_table(FORMAT_COLUMNS, list(format_rows(run)), 2)}
<h2>Layers over time</h2>
<p>A row is a layer, a column a recorded step. Dark is bad, or large; white is zero; hatched means
that there was no such tensor (a frozen layer has no gradient), or no such number.</p>
{images}<h2>Words</h2><ul>{terms}</ul>
</body></html>
"""


def _title(name: str) -> str:
    titles = {metric.name: metric.title for metric in METRICS}
    return titles.get(name, "Exponents at the last step")


def _html_table(columns: Iterable[str], rows: list[tuple[str, ...]], text: int) -> str:
    marks = ("", ' class="text"')

    def line(cells: Iterable[str], tag: str) -> str:
        inner = "".join(
            f"<{tag}{marks[i < text]}>{html.escape(cell)}</{tag}>" for i, cell in enumerate(cells)
        )
        return f"<tr>{inner}</tr>\n"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table>\n{line(columns, "th")}{body}</table></div>'
