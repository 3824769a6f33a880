"""What paired runs say: gaps, intervals, verdicts. docs/analysis_plan.md is the plan it follows.

Runs are compared within a seed. A gap has Student's t interval over seeds; claims of one study are
corrected together, after Holm; a directional claim must also exceed the chaos floor, the mean gap
that one ulp in one initial weight makes. A run that diverges counts with a loss of ln 256.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from scipy import stats as distributions

from experiments import harness, studies

MARGIN = 0.01  # nats per byte: what counts as equal
LEVEL = 0.05
NOTHING = math.log(256)
RESAMPLES = 10_000

Losses = dict[int, float]  # by seed

# Paired gaps -------------------------------------------------------------------------------------


def paired(a: Losses, b: Losses) -> list[float]:
    """``a - b`` of every seed.

    Raises
    ------
    ValueError
        Where the seeds differ.
    """
    if a.keys() != b.keys():
        raise ValueError(f"paired: seeds differ, got {sorted(a)} and {sorted(b)}; run both alike.")
    return [a[seed] - b[seed] for seed in sorted(a)]


def interval(gaps: Sequence[float], level: float = LEVEL) -> tuple[float, float, float]:
    """Mean and the ends of its ``1 - level`` interval by Student's t.

    >>> [round(v, 3) for v in interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    n = len(gaps)
    mean = statistics.fmean(gaps)
    half = float(distributions.t.ppf(1 - level / 2, n - 1)) * statistics.stdev(gaps) / n**0.5
    return mean, mean - half, mean + half


def p_above(gaps: Sequence[float], bound: float) -> float:
    """One-sided p: how likely so large a mean is if the true mean is `bound`.

    Without any spread, 0 or 1, or a half where the mean is the bound.
    """
    n = len(gaps)
    distance, spread = statistics.fmean(gaps) - bound, statistics.stdev(gaps)
    if spread == 0:
        return 0.5 if distance == 0 else float(distance < 0)
    return float(distributions.t.sf(distance / (spread / n**0.5), n - 1))


def holm(ps: Sequence[float]) -> list[float]:
    """Adjusted p-values of hypotheses that are tested together.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = largest
    return adjusted


def p_values(says: str, gaps: Sequence[float], margin: float = MARGIN) -> tuple[float, float]:
    """p-values for a claim and for its contrary.

    worse, better: two-sided, given to the side where the mean lies (1 to the other). equal: both
    one-sided tests against the margin (TOST); its contrary: beyond the margin, two-sided.
    """
    above, below = p_above(gaps, 0.0), p_above([-g for g in gaps], 0.0)
    if says == "equal":
        inside = max(p_above([-g for g in gaps], -margin), p_above(gaps, -margin))
        outside = 2 * min(p_above(gaps, margin), p_above([-g for g in gaps], margin))
        return inside, min(1.0, outside)
    up, down = (2 * above, 1.0) if above < below else (1.0, 2 * below)
    return (up, down) if says == "worse" else (down, up)


def chaos_floor(gaps: Sequence[float]) -> float:
    """The mean gap that chaos alone makes: the t interval's half-width of gaps around zero."""
    n = len(gaps)
    rms = math.sqrt(statistics.fmean(g * g for g in gaps))
    return float(distributions.t.ppf(1 - LEVEL / 2, n)) * rms / n**0.5


def claims(
    wanted: Sequence[studies.Claim], losses: dict[str, Losses], floor: float, margin: float = MARGIN
) -> list[dict[str, Any]]:
    """Each claim with its gap, interval, p-values and verdict, corrected together."""
    gaps = [paired(losses[c.arm], losses[c.reference]) for c in wanted]
    pairs = [p_values(c.says, g, margin) for c, g in zip(wanted, gaps, strict=True)]
    # A claim is one hypothesis: the smaller of its two p-values is what is corrected.
    adjusted = holm([min(pair) for pair in pairs])
    rows = []
    for c, g, (for_it, against), p in zip(wanted, gaps, pairs, adjusted, strict=True):
        mean, low, high = interval(g)
        small = c.says != "equal" and abs(mean) <= floor
        said = "not resolved"
        if p < LEVEL and not small:
            said = "supported" if for_it <= against else "contradicted"
        # Of the magnitude: how much a loss falls is negative, and worse is to be positive there too.
        percents = [100 * gap / abs(losses[c.reference][s]) for gap, s in zip(g, sorted(losses[c.arm]), strict=True)]  # fmt: skip
        rows.append(
            {**asdict(c), "n": len(g), "mean": mean, "low": low, "high": high,
             "percent": statistics.fmean(percents), "p": min(for_it, against), "p_holm": p,
             "below_floor": small, "verdict": said}
        )  # fmt: skip
    return rows


# Token multiplier --------------------------------------------------------------------------------


def multiplier(
    lengths: Sequence[float], slow: Sequence[Sequence[float]], fast: Sequence[float], at: int
) -> dict[str, float]:
    """How many times the tokens `slow` needs for the loss that `fast` has at ``lengths[at]``.

    The loss of `slow` is taken as linear in the logarithm of tokens, with the slope between the
    neighbours of ``lengths[at]``, the mean over seeds; then ``log m = gap / -slope``. The interval
    is Student's t of that ratio, linearized (delta method); beside it the percentile bootstrap over
    seeds.

    Parameters
    ----------
    lengths : sequence of float
        Tokens, or anything proportional, ascending.
    slow : sequence of sequence of float, seeds x lengths
        Losses at the end of full schedules.
    fast : sequence of float, seeds
        Losses at ``lengths[at]``, of the same seeds.

    Returns
    -------
    dict
        ``m``, ``low`` and ``high`` (95 %), ``bootstrap_low``, ``bootstrap_high``, ``slope`` (nats
        per factor of e), ``gap`` (nats).

    Raises
    ------
    ValueError
        Where more tokens do not lower the loss, or there are fewer than two seeds.
    """
    losses, reference = np.asarray(slow, float), np.asarray(fast, float)
    n = len(losses)
    if n < 2 or losses.shape != (n, len(lengths)) or reference.shape != (n,):
        raise ValueError(
            f"multiplier: shapes {losses.shape} and {reference.shape} do not fit {len(lengths)}"
            " lengths and at least two seeds; give slow[seeds, lengths] and fast[seeds]."
        )
    left, right = max(0, at - 1), min(len(lengths) - 1, at + 1)
    slopes = (losses[:, right] - losses[:, left]) / math.log(lengths[right] / lengths[left])
    gaps = losses[:, at] - reference
    slope, gap = slopes.mean(), gaps.mean()
    if not slope < 0:
        raise ValueError(
            f"multiplier: the loss does not fall with tokens, slope {slope:.3g}; longer runs, or"
            " lengths further apart, are needed."
        )
    log_m = gap / -slope
    # d log m = (d gap + log m * d slope) / -slope, seed by seed.
    residuals = (gaps + log_m * slopes) / -slope
    half = distributions.t.ppf(1 - LEVEL / 2, n - 1) * residuals.std(ddof=1) / n**0.5
    draws = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    again = gaps[draws].mean(1) / -slopes[draws].mean(1)
    ends = np.quantile(again, [LEVEL / 2, 1 - LEVEL / 2])
    return {
        "m": math.exp(log_m), "low": math.exp(log_m - half), "high": math.exp(log_m + half),
        "bootstrap_low": math.exp(ends[0]), "bootstrap_high": math.exp(ends[1]),
        "slope": float(slope), "gap": float(gap),
    }  # fmt: skip


# A study -----------------------------------------------------------------------------------------


def loss_of(metrics: dict[str, Any]) -> float:
    return NOTHING if metrics["diverged"] else metrics["held_out"]


def by_cell(
    points: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]], **where: Any
) -> dict[str, dict[int, dict[str, Any]]]:
    """Metrics by cell and seed, of points whose keys have the values of `where`."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for p, m in zip(points, metrics, strict=True):
        if all(p[key] == value for key, value in where.items()):
            found.setdefault(studies.cell(p), {})[p["seed"]] = m
    return found


def losses_of(cells: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Losses]:
    return {name: {seed: loss_of(m) for seed, m in seeds.items()} for name, seeds in cells.items()}


def floor_of(losses: dict[str, Losses]) -> float:
    """The chaos floor of the cell that was also run from one ulp beside."""
    moved = next(name for name in losses if name.endswith(", one ulp"))
    return chaos_floor(paired(losses[moved], losses[moved.removesuffix(", one ulp")]))


def summary(cells: dict[str, dict[int, dict[str, Any]]], reference: str) -> list[dict[str, Any]]:
    """A row per cell: losses, gap to the reference, accuracy by kind, what went wrong."""
    losses = losses_of(cells)
    rows = []
    for name, seeds in cells.items():
        of = [seeds[seed] for seed in sorted(seeds)]
        row: dict[str, Any] = {
            "cell": name, "n": len(of), "mean": statistics.fmean(losses[name].values()),
            "sd": statistics.stdev(losses[name].values()),
            "diverged": sum(m["diverged"] for m in of), "spikes": sum(len(m["spikes"]) for m in of),
            "skipped": sum(m["skipped"] for m in of),
        }  # fmt: skip
        if name != reference:
            gaps = paired(losses[name], {s: losses[reference][s] for s in losses[name]})
            row["gap"], row["low"], row["high"] = interval(gaps)
            row["percent"] = statistics.fmean(
                100 * g / losses[reference][s] for g, s in zip(gaps, sorted(seeds), strict=True)
            )
        if name != reference and all(m.get("held_out_fp32") for m in of):
            # What is left of the gap in a float32 forward pass: worse weights, not a noisy pass.
            exact = {s: cells[reference][s]["held_out_fp32"] for s in seeds}
            row["gap_fp32"] = list(
                interval(paired({s: m["held_out_fp32"] for s, m in seeds.items()}, exact))
            )
        for kind in of[0]["accuracy"]:
            here = {s: m["accuracy"][kind] for s, m in seeds.items()}
            row[f"accuracy_{kind}"] = statistics.fmean(here.values())
            if name != reference:
                there = {s: cells[reference][s]["accuracy"][kind] for s in seeds}
                row[f"accuracy_{kind}_gap"] = list(interval(paired(here, there)))
        rows.append(row)
    return rows


def judge(
    study: str, points: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]],
    budget: studies.Budget,
) -> dict[str, Any]:  # fmt: skip
    """What a study's runs say."""
    if study == "predict":
        return {}
    if study == "parts":
        from experiments import parts

        return {"parts": parts.table(points, metrics), "depth": parts.depth(points, metrics)}
    if study == "proxy":
        return {"counts": proxy_counts(points, metrics)}
    if study in ("tune", "chaos"):
        return {"rates": [rate_row(points, metrics, rate) for rate in rates_of(points)]}
    normal = {"tokens": {"steps": budget.steps}}.get(study, {})
    cells = by_cell(points, metrics, **normal)
    losses = losses_of(cells)
    reference = {"accumulation": "fp8, float32 sums"}.get(study, "bf16")
    floor = floor_of(losses)
    found: dict[str, Any] = {
        "margin": MARGIN,
        "chaos_floor": floor,
        "reference": reference,
        "cells": summary(cells, reference),
        "claims": claims([c for c in studies.CLAIMS if c.study == study], losses, floor),
    }
    if study == "tokens":
        found |= tokens(points, metrics, budget)
    if study == "recipes" and studies.PREDICTED:
        found["prediction"] = prediction(found["cells"])
    return found


def rates_of(points: Sequence[dict[str, Any]]) -> list[float]:
    return sorted({p["rate"] for p in points})


def rate_row(
    points: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]], rate: float
) -> dict[str, Any]:
    """How far FP32 and BF16, and FP32 and itself one ulp beside, part at a learning rate."""
    losses = losses_of(by_cell(points, metrics, rate=rate))
    row: dict[str, Any] = {"rate": rate, "seeds": sorted(losses["bf16"])}
    for name, of in losses.items():
        row[f"loss {name}"] = statistics.fmean(of.values())
    row["between_seeds_sd"] = statistics.stdev(losses["bf16"].values())
    for name in losses:
        if name != "fp32":
            gaps = paired(losses[name], losses["fp32"])
            row[f"gaps {name}"] = gaps
            row[f"rms {name}"] = math.sqrt(statistics.fmean(g * g for g in gaps))
            row[f"floor {name}"] = chaos_floor(gaps)
    return row


def tokens(
    points: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]], budget: studies.Budget
) -> dict[str, Any]:
    """Losses by length, and the multipliers of MXFP4 to NVFP4 and of both to BF16."""
    steps = [round(length * budget.steps) for length in budget.lengths]
    at = steps.index(budget.steps)
    curves = {s: losses_of(by_cell(points, metrics, steps=s, perturb="none")) for s in steps}
    seeds = sorted(curves[steps[0]]["bf16"])
    context = points[0]["model"]["context"]
    found: dict[str, Any] = {
        "lengths": [
            {"steps": s, "tokens": s * budget.batch * context,
             "losses": {arm: [of[seed] for seed in seeds] for arm, of in curves[s].items()
                        if arm in studies.TOKEN_ARMS}}
            for s in steps
        ],
        "multipliers": [],
    }  # fmt: skip
    for slow, fast in (("mxfp4_sr_rht", "nvfp4"), ("nvfp4", "bf16"), ("mxfp4_sr_rht", "bf16")):
        row: dict[str, Any] = {"slow": slow, "fast": fast}
        try:
            row |= multiplier(
                steps,
                [[curves[s][slow][seed] for s in steps] for seed in seeds],
                [curves[budget.steps][fast][seed] for seed in seeds],
                at,
            )
            row["verdict"] = "resolved" if not row["low"] <= 1 <= row["high"] else "not resolved"
        except ValueError as error:
            row |= {"verdict": "not resolved", "why": str(error)}
        found["multipliers"].append(row)
    return found


def prediction(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Spearman's correlation of predicted noise and observed loss; exploratory."""
    observed = {row["cell"]: row["mean"] for row in cells if row["cell"] in studies.PREDICTED}
    arms = list(observed)
    noise = [-studies.PREDICTED[arm] for arm in arms]  # noise falls as the ratio in dB rises
    rho, p = distributions.spearmanr(noise, [observed[arm] for arm in arms])
    return {"arms": arms, "predicted_db": [-x for x in noise], "rho": float(rho), "p": float(p)}


def proxy_counts(
    points: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Runs, runs with spikes and divergences by arm and learning rate.

    ``ratio``: the geometric mean over seeds of the loss at the end by that of FP32; None where a
    run of either diverged.
    """
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for p, m in zip(points, metrics, strict=True):
        groups.setdefault((p["arm"], p["rate"]), []).append(m)

    def ratio(arm: str, rate: float) -> float | None:
        pairs = [(a["final"], b["final"]) for a, b in zip(groups[arm, rate], groups["fp32", rate], strict=True)]  # fmt: skip
        if any(m["diverged"] for m in (*groups[arm, rate], *groups["fp32", rate])):
            return None
        return math.exp(statistics.fmean(math.log(a / b) for a, b in pairs))

    return [
        {"arm": arm, "rate": rate, "runs": len(of), "spiked": sum(bool(m["spikes"]) for m in of),
         "diverged": sum(m["diverged"] for m in of), "ratio": ratio(arm, rate)}
        for (arm, rate), of in groups.items()
    ]  # fmt: skip


# Tables ------------------------------------------------------------------------------------------


def short(cell: str) -> str:
    """A cell's name where 80 columns are all there is."""
    for long, brief in ((" bf16 at the end", " bf16"), (", in ", " in "), (" alone", "")):
        cell = cell.replace(long, brief)
    return cell


def tables(study: str, found: dict[str, Any]) -> list[Any]:
    """A study's results for the terminal."""
    if "rates" in found:
        names = [key for key in found["rates"][0] if key.startswith(("loss", "rms"))]
        rows = [[f"{r['rate']:g}", *(f"{r[name]:.5f}" for name in names)] for r in found["rates"]]
        return [harness.table(f"{study}: losses and gaps to fp32, nats", ["rate", *names], rows)]
    if "counts" in found:
        rows = [
            [c["arm"], f"{c['rate']:g}", str(c["runs"]), str(c["spiked"]), str(c["diverged"])]
            for c in found["counts"]
        ]
        return [harness.table(study, ["arm", "rate", "runs", "spiked", "diverged"], rows)]
    if "parts" in found:
        formats = ("e4m3", "mxfp4/rceil", "nvfp4")
        rows = [
            [f"{r['model']}, {r['part']}", r["tensor"], f"{r['kurtosis']:.1f}", f"{r['crest']:.1f}",
             *(harness.percent(r[f"zeroed {fmt}"]) for fmt in formats)]
            for r in found["parts"]
        ]  # fmt: skip
        heads = ["part", "tensor", "kurtosis", "crest", *formats]
        made = [harness.table(f"{study}: tensors at the end; zeroed, %", heads, rows)]
        rows = [
            [r["arm"], *(f"{100 * noise:.2f}" for noise in r["blocks"]),
             *(f"{r['last_over_first'][key]:.3f}" for key in ("mean", "low", "high"))]
            for r in found["depth"]
        ]  # fmt: skip
        blocks = [f"block {i}" for i in range(len(found["depth"][0]["blocks"]))]
        heads = ["recipe", *blocks, "last / first", "low", "high"]
        made.append(harness.table("GPT: noise share of the weight gradients, %", heads, rows))
        return made
    if "cells" not in found:
        return []
    rows = [
        [short(r["cell"]), f"{r['mean']:.4f}", *(f"{r[k]:+.4f}" if k in r else "" for k in ("gap", "low", "high")),
         str(r["diverged"]), str(r["spikes"])]
        for r in found["cells"]
    ]  # fmt: skip
    heads = ["cell", "loss", "gap", "low", "high", "div.", "spikes"]
    title = f"{study}: held-out loss, gap to {found['reference']}, chaos floor {found['chaos_floor']:.5f}"
    made = [harness.table(title, heads, rows)]
    if found["claims"]:
        rows = [
            [short(c["arm"]), c["says"], c["reference"], f"{c['mean']:+.4f}", f"{c['p_holm']:.3f}", c["verdict"]]
            for c in found["claims"]
        ]  # fmt: skip
        heads = ["arm", "claim", "reference", "gap", "p Holm", "verdict"]
        made.append(harness.table("Claims", heads, rows))
    if "multipliers" in found:
        rows = [
            [f"{m['slow']} / {m['fast']}", *(f"{m[k]:.3f}" if k in m else "" for k in ("m", "low", "high")), m["verdict"]]
            for m in found["multipliers"]
        ]  # fmt: skip
        made.append(harness.table("Token multiplier", ["", "m", "low", "high", ""], rows))
    return made
