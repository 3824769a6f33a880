"""What experiments on tensors measure: ratios, crest factors, and means over draws with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from scipy import stats as distributions

CONFIDENCE = 0.95


def decibels(signal: float, noise: float) -> float:
    """SQNR; NaN where there is no signal or nothing is lost."""
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else math.nan


def share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def norm(a: np.ndarray) -> float:
    return float(np.linalg.norm(a))


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean over draws and the half width of its interval; NaN draws make a NaN mean."""
    n = len(values)
    mean = float(np.mean(values))
    if n < 2:
        return mean, None
    half = student(n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return mean, float(f"{half:.2g}")


@cache
def student(freedom: int) -> float:
    """Student's t that `CONFIDENCE` lies within."""
    return float(distributions.t.ppf((1 + CONFIDENCE) / 2, freedom))


def columns(rows: Sequence[Sequence[float]]) -> tuple[list[float], list[float | None]]:
    """`interval` of every place over draws: rows[draw][place] to means and half widths."""
    pairs = [interval(place) for place in zip(*rows, strict=True)]
    return [mean for mean, _ in pairs], [half for _, half in pairs]


def crest(x: np.ndarray) -> np.ndarray:
    """Largest |value| / RMS of each row."""
    wide = np.abs(x.astype(np.float64))
    return wide.max(axis=1) / np.sqrt((wide**2).mean(axis=1))


def level(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
