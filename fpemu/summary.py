"""Measures of one tensor for several formats at once, that can be pooled over calls.

What does not depend on a format (amax, moments, exponents, columns) is measured once, then each
format adds one cast and one comparison. `fpemu.stats` says more about one format and takes every
option; this is the quick look that `fpemu.Monitor` takes thousands of times.

The tensor goes through in pieces that fit the cache. Sums are added in the order of the pieces, so
they do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, log10, sqrt
from typing import Any

import numpy as np

from fpemu import ops
from fpemu.backends import Request, element_format, numba_, tally
from fpemu.backends.floatmode import ieee_mode
from fpemu.backends.pieces import block_steps, pieces
from fpemu.backends.threads import parallel
from fpemu.formats import BlockFormat, Format

PIECE = 1 << 17
#: Exponents of float64, subnormals included: index 0 of a histogram is 2**LOWEST.
LOWEST, HIGHEST = -1074, 1023


@dataclass
class Loss:
    """What one format does to a tensor: counts, and sums over the finite pairs."""

    underflow: int = 0
    saturated: int = 0
    nan: int = 0
    signal: float = 0.0
    noise: float = 0.0

    def __iadd__(self, other: Loss) -> Loss:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


@dataclass
class Summary:
    """Measures of a matrix (rows x channels), or of several pooled; `to_dict` has them by name."""

    size: int
    zeros: int
    nan: int
    inf: int
    amax: float
    mean: float
    moments: tuple[float, float, float]  # sums of (x - mean)**2, **3, **4 over finite x
    channels: (
        np.ndarray | None
    )  # float64: largest finite magnitude of each column; None: widths differed
    exponents: np.ndarray  # counts of nonzero finite x, from 2**LOWEST
    losses: dict[str, Loss | str] = field(default_factory=dict)  # a text says why there is none
    calls: int = 1

    @property
    def finite(self) -> int:
        return self.size - self.nan - self.inf

    def pool(self, other: Summary) -> Summary:
        """Both together, as if their elements had been measured at once."""
        channels = None
        if self.channels is not None and other.channels is not None:
            if len(self.channels) == len(other.channels):
                channels = np.maximum(self.channels, other.channels)
        mean, moments = _pooled_moments(self, other)
        losses: dict[str, Loss | str] = {}
        for name, loss in self.losses.items():
            more = other.losses[name]
            if isinstance(loss, Loss) and isinstance(more, Loss):
                loss += more
                losses[name] = loss
            else:
                losses[name] = more if isinstance(more, str) else loss
        return Summary(
            self.size + other.size, self.zeros + other.zeros, self.nan + other.nan,
            self.inf + other.inf, max(self.amax, other.amax), mean, moments, channels,
            self.exponents + other.exponents, losses, self.calls + other.calls,
        )  # fmt: skip

    def to_dict(self, top: int = 4) -> dict[str, Any]:
        """Plain values for JSON; None where a number is not finite or there is none.

        ================= =====================================================================
        calls, size       tensors pooled; their elements
        zeros, nan, inf   how many of the elements are that
        amax, mean, rms   of the finite ones; amax is the largest magnitude
        kurtosis          excess: m4 / m2**2 - 3, 0 for a normal distribution
        channels          the `top` columns with the largest amax: [index, amax, amax / rms]
        exponents         {"lowest": e, "counts": [...]}: how many nonzero finite elements have
                          2**e <= abs(x) < 2**(e+1), and so on upward; zeros are the zero bin
        formats           by name: underflow, saturated, nan (counts as in `fpemu.Stats`),
                          underflow_share, saturated_share, sqnr_db, signal, noise (sum x**2,
                          sum (q-x)**2: noise 0 means lossless, and sqnr_db is None); or
                          {"absent": reason}
        ================= =====================================================================
        """
        used = np.flatnonzero(self.exponents)
        low, high = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
        square, _, fourth = self.moments
        rms = sqrt(square / self.finite + self.mean * self.mean) if self.finite else 0.0
        kurtosis = None
        if square > 0 and isfinite(square):
            kurtosis = fourth / square * (self.finite / square) - 3
        return {
            "calls": self.calls, "size": self.size, "zeros": self.zeros, "nan": self.nan,
            "inf": self.inf, "amax": _plain(self.amax), "mean": _plain(self.mean),
            "rms": _plain(rms), "kurtosis": _plain(kurtosis),
            "channels": self._outliers(top, rms),
            "exponents": {
                "lowest": low + LOWEST if high else None,
                "counts": self.exponents[low:high].tolist(),
            },
            "formats": {name: self._loss(loss) for name, loss in self.losses.items()},
        }  # fmt: skip

    def _outliers(self, top: int, rms: float) -> list[list[Any]] | None:
        if self.channels is None:
            return None
        order = np.argsort(-self.channels, kind="stable")[:top].tolist()
        largest = [float(self.channels[i]) for i in order]
        return [
            [i, _plain(a), _plain(a / rms) if rms else None]
            for i, a in zip(order, largest, strict=True)
        ]

    def _loss(self, loss: Loss | str) -> dict[str, Any]:
        if isinstance(loss, str):
            return {"absent": loss}
        sqnr = None
        if loss.noise > 0 and loss.signal > 0:
            sqnr = 10 * (log10(loss.signal) - log10(loss.noise))
        return {
            "underflow": loss.underflow,
            "underflow_share": loss.underflow / max(self.size - self.zeros, 1),
            "saturated": loss.saturated,
            "saturated_share": loss.saturated / max(self.size, 1),
            "nan": loss.nan,
            "sqnr_db": _plain(sqnr),
            "signal": _plain(loss.signal),
            "noise": _plain(loss.noise),
        }


def _plain(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


def _pooled_moments(a: Summary, b: Summary) -> tuple[float, tuple[float, float, float]]:
    """Mean and central sums of both together, from those of each.

    Source: Pébay, "Formulas for robust, one-pass parallel computation of covariances and
    arbitrary-order statistical moments", SAND2008-6212, equations 1.1, 1.3, 2.1 and 2.2.
    """
    n, m = a.finite, b.finite
    if not n or not m:
        return (a.mean, a.moments) if n else (b.mean, b.moments)
    (a2, a3, a4), (b2, b3, b4) = a.moments, b.moments
    whole, d = n + m, b.mean - a.mean
    square = d * d  # products, as Python's ** raises where a product is infinite
    mean = a.mean + d * m / whole
    second = a2 + b2 + square * n * m / whole
    third = a3 + b3 + square * d * n * m * (n - m) / whole**2 + 3 * d * (n * b2 - m * a2) / whole
    fourth = (
        a4 + b4
        + square * square * n * m * (n * n - n * m + m * m) / whole**3
        + 6 * square * (n * n * b2 + m * m * a2) / whole**2
        + 4 * d * (n * b3 - m * a3) / whole
    )  # fmt: skip
    return mean, (second, third, fourth)


# Measuring ---------------------------------------------------------------------------------------


def summarize(x: np.ndarray, formats: Sequence[Format | BlockFormat], axis: int = -1) -> Summary:
    """Measure a matrix.

    Parameters
    ----------
    x : ndarray of float32 or float64, shape (rows, channels), C-contiguous
    formats : sequence of Format or BlockFormat
        Rounded to nearest even, overflow as the format's default, each with x's own amax.
    axis : {-1, 0}
        Along which blocks lie.

    Notes
    -----
    A format's result is x quantized into x's dtype, as `fpemu.quantize` returns it.

    Examples
    --------
    >>> import numpy as np, fpemu
    >>> x = np.float32([[1e-5, 0.3, 500.0, 0.0]])
    >>> summarize(x, [fpemu.get_format("e4m3")]).losses["e4m3"].underflow
    1
    """
    with ieee_mode(), np.errstate(all="ignore"):
        found = _describe(x)
        for fmt in formats:
            found.losses[fmt.name] = _compare(x, fmt, axis, found)
    return found


def _bits(x: np.ndarray) -> tuple[np.ndarray, Any, Any]:
    """The bits of x, and the masks `mag` and `inf` in their type."""
    kind = np.dtype(f"u{x.itemsize}").type
    return x.view(kind), kind((1 << 8 * x.itemsize - 1) - 1), np.array(inf, x.dtype).view(kind)[()]


def _describe(x: np.ndarray) -> Summary:
    bits, mag, infinity = _bits(x)
    shift = bits.dtype.type(52 if x.itemsize == 8 else 23)
    cuts = [(index,) for index in pieces(x.shape, (1, 1), PIECE)] if x.size else []

    def look(index: Any) -> tuple[tuple[int, int, int, Any], float]:
        part = bits[index].reshape(-1)
        counts = tally.survey(part, mag, infinity)
        return counts, tally.total(_finite(x[index], counts[1] + counts[2]))

    seen = parallel(look, cuts)
    zeros, infinite, nans = (sum(int(counts[k]) for counts, _ in seen) for k in range(3))
    largest = max((int(counts[3]) for counts, _ in seen), default=0)
    amax = float(np.array(largest, bits.dtype).view(x.dtype))
    finite = x.size - infinite - nans
    mean = sum(part for _, part in seen) / finite if finite else 0.0

    def measure(index: Any) -> tuple[tuple[float, float, float], np.ndarray, np.ndarray]:
        part = bits[index]
        exps = np.zeros((4, int(mag >> shift) + 1), np.int64)
        tally.exponents(part.reshape(-1), mag, shift, exps)
        columns = np.zeros(part.shape[1], bits.dtype)
        tally.column_maxima(part, mag, infinity, columns)
        return tally.powers(_finite(x[index], infinite + nans), mean), exps.sum(0), columns

    measured = parallel(measure, cuts)
    moments = tuple(float(sum(m[0][k] for m in measured)) for k in range(3))
    counts = sum((m[1] for m in measured), np.zeros(int(mag >> shift) + 1, np.int64))
    channels = np.zeros(x.shape[1], bits.dtype)
    for (index,), (_, _, columns) in zip(cuts, measured, strict=True):
        np.maximum(channels[index[1]], columns, out=channels[index[1]])
    return Summary(
        x.size, zeros, nans, infinite, amax, mean, moments, channels.view(x.dtype).astype(np.float64),  # type: ignore[arg-type]
        _histogram(x, counts, zeros),
    )  # fmt: skip


def _finite(x: np.ndarray, others: int) -> np.ndarray:
    """The finite values of x, flat; `others`: how many are not (0 needs no copy)."""
    flat = x.reshape(-1)
    return flat[np.isfinite(flat)] if others else flat


def _histogram(x: np.ndarray, biased: np.ndarray, zeros: int) -> np.ndarray:
    """Counts by exponent from counts by biased exponent, whose ends also hold other things."""
    counts = np.zeros(HIGHEST - LOWEST + 1, np.int64)
    first = 1 - (1023 if x.itemsize == 8 else 127) - LOWEST
    counts[first : first + len(biased) - 2] = biased[1:-1]
    if biased[0] > zeros:  # subnormals, which are few: normalised one by one
        tiny = np.abs(x[(np.abs(x) < np.finfo(x.dtype).tiny) & (x != 0)]).astype(np.float64)
        raised = tiny * 2.0**64  # exact, and normal
        np.add.at(counts, (raised.view(np.int64) >> 52) - 1023 - 64 - LOWEST, 1)
    return counts


def _compare(x: np.ndarray, fmt: Format | BlockFormat, axis: int, found: Summary) -> Loss | str:
    element = element_format(fmt)
    if found.nan and element.is_integer and ops._hides_nan(fmt):
        return f"{fmt.name} has no code for NaN"
    request = Request(x, x.dtype.name, fmt, overflow=element.overflow, axis=axis % 2)
    if isinstance(fmt, BlockFormat) and fmt.tensor_scaled:
        request.amax = inf if found.inf else float(np.float32(found.amax))
    bits, mag, infinity = _bits(x)

    def measure(index: Any) -> Loss:
        part = request.part(index)
        q = np.empty(part.x.shape, x.dtype)
        numba_.quantize(part, q)
        a, b, inside = part.x.reshape(-1), q.reshape(-1), numba_.within(part).reshape(-1)
        underflow, saturated, nans, unusable = tally.losses(
            bits[index].reshape(-1), b.view(bits.dtype), mag, infinity, inside
        )
        if unusable:
            both = np.isfinite(a) & np.isfinite(b)
            a, b = a[both], b[both]
        return Loss(int(underflow), int(saturated), int(nans), *tally.errors(a, b))

    cuts = pieces(x.shape, block_steps(fmt, x.shape, request.axis), PIECE) if x.size else []
    loss = Loss()
    for part in parallel(measure, [(index,) for index in cuts]):
        loss += part
    return loss
