"""`fpemu.stats`: what a format does to a tensor, in one pass and without keeping a copy.

On a CUDA device one Triton kernel measures where it casts (`fpemu.backends.triton_.measure`).
Elsewhere the tensor goes through in pieces that fit the cache. Each piece is encoded, decoded, measured and
forgotten; sums are float64 and are added in the order of the pieces, so they do not depend on the
number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import inf, log10, nan, sqrt
from types import ModuleType
from typing import Any

import numpy as np

from fpemu import ops
from fpemu.backends import Request, element_format, scales_dtype
from fpemu.backends.pieces import block_steps, pieces
from fpemu.casting import value_table
from fpemu.formats import BlockFormat, Format

PIECE = 1 << 16


@dataclass(frozen=True)
class Stats:
    """Measures of one tensor in one format; prints as a table, converts with `to_dict`.

    Counts are of elements. Errors compare x with its quantized value q over the elements where
    both are finite; ``exp`` is the binary exponent ``floor(log2|q|)``.

    ======================= ===================================================================
    size, zeros             elements of x; those that are zero
    underflow               nonzero became zero
    subnormal               nonzero results below the element format's smallest normal (times
                            the scale)
    saturated               finite, and the value that is cast lies beyond +-max
    nan, inf                NaN and infinite elements of x
    nan_out                 NaN results (a NaN poisons its whole MX or NVFP4 block)
    sqnr_db                 10 log10(sum x^2 / sum (x-q)^2), dB; inf where nothing is lost
    max_rel_error           largest |q-x|/|x| over nonzero x
    rms_rel_error           root of the mean of ((q-x)/x)^2 over nonzero x
    cosine                  sum xq / sqrt(sum x^2 sum q^2)
    bias                    sum (q-x) x / sum x^2: relative change of magnitude
    exp_min, exp_max        range of exponents of nonzero finite results (None: there are none)
    blocks                  number of block scales (0 without)
    amax_spread             log2 of largest over smallest nonzero block amax
    zero_scale_share        share of blocks whose scale code is 0
    saturated_scale_share   share of blocks whose scale is the largest finite
    nan_scale_share         share of blocks whose scale is NaN
    ======================= ===================================================================
    """

    format: str
    size: int
    zeros: int
    underflow: int
    subnormal: int
    saturated: int
    nan: int
    inf: int
    nan_out: int
    sqnr_db: float
    max_rel_error: float
    rms_rel_error: float
    cosine: float
    bias: float
    exp_min: int | None
    exp_max: int | None
    blocks: int
    amax_spread: float
    zero_scale_share: float
    saturated_scale_share: float
    nan_scale_share: float

    @property
    def underflow_share(self) -> float:
        """Underflow among nonzero elements (0 where there are none)."""
        return self.underflow / max(self.size - self.zeros, 1)

    @property
    def saturated_share(self) -> float:
        return self.saturated / max(self.size, 1)

    @property
    def subnormal_share(self) -> float:
        return self.subnormal / max(self.size, 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name, shares included."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("underflow_share", "saturated_share", "subnormal_share"):
            values[name] = getattr(self, name)
        return values

    def __str__(self) -> str:
        def share(count: int) -> str:
            return f"{count:>14,}  {100 * count / max(self.size, 1):8.4f} %"

        rows = [
            ("elements", f"{self.size:>14,}"),
            ("zeros in", share(self.zeros)),
            ("underflow", share(self.underflow)),
            ("subnormal", share(self.subnormal)),
            ("saturated", share(self.saturated)),
            ("NaN in / out", f"{self.nan:>14,}  {self.nan_out:,}"),
            ("infinite in", f"{self.inf:>14,}"),
            ("SQNR", f"{self.sqnr_db:>14.2f}  dB"),
            ("relative error", f"{self.max_rel_error:>14.3g}  max, {self.rms_rel_error:.3g} RMS"),
            ("cosine", f"{self.cosine:>14.8f}"),
            ("magnitude bias", f"{100 * self.bias:>14.4f}  %"),
            ("exponents", f"{_range(self.exp_min, self.exp_max):>14}"),
        ]
        if self.blocks:
            rows += [
                ("blocks", f"{self.blocks:>14,}"),
                ("block amax spread", f"{self.amax_spread:>14.1f}  binades"),
                ("scale zero", f"{100 * self.zero_scale_share:>14.4f}  % of blocks"),
                ("scale saturated", f"{100 * self.saturated_scale_share:>14.4f}  % of blocks"),
                ("scale NaN", f"{100 * self.nan_scale_share:>14.4f}  % of blocks"),
            ]
        return "\n".join([self.format, *(f"  {name:<18}{text}" for name, text in rows)])


def _range(low: int | None, high: int | None) -> str:
    return "none" if low is None else f"2^{low} .. 2^{high}"


def stats(
    x: Any,
    fmt: str | Format | BlockFormat,
    *,
    rounding: str = "rne",
    overflow: str | None = None,
    axis: int = -1,
    amax: Any = None,
    seed: int | None = None,
    stream: int = 0,
    offset: Any = 0,
    sr_bits: int = 32,
    random_bits: Any = None,
    backend: str | None = None,
) -> Stats:
    """Underflow, saturation and error of `x` in a format; the arguments are those of `quantize`.

    Returns
    -------
    Stats

    Examples
    --------
    >>> import numpy as np, fpemu
    >>> s = fpemu.stats(np.float32([1e-5, 0.3, 500.0, 0.0]), "e4m3")
    >>> s.underflow, s.saturated, s.zeros
    (1, 1, 1)
    """
    request, box = ops._request(
        "stats", x, fmt, rounding, overflow, axis, amax, seed, stream, offset, sr_bits, random_bits
    )
    if isinstance(box, ops._TorchBox):
        name, module = ops._choose(request, backend, box.on_cpu)
        if name == "triton":
            with np.errstate(all="ignore"):
                return _combine(request.fmt, [_Sums(*module.measure(request))])
    host, module = box.on_host(request, backend)
    if host.x.ndim == 0:
        host.x = host.x.reshape(1)
        if host.random_bits is not None:
            host.random_bits = host.random_bits.reshape(1)
        host.axis = 0
    if isinstance(host.fmt, BlockFormat) and host.fmt.tensor_scaled and host.amax is None:
        host.amax = _tensor_amax(host.x, host.kind)
    if host.random is not None and host.random.global_shape is None:
        host.random = replace(host.random, global_shape=host.x.shape, start=(0,) * host.x.ndim)
    steps = block_steps(host.fmt, host.x.shape, host.axis)
    cuts = [(index,) for index in pieces(host.x.shape, steps, PIECE)] if host.x.size else []
    parallel = _parallel(module)
    with np.errstate(all="ignore"):
        found = parallel(lambda index: _measure(host.part(index), module), cuts)
    return _combine(host.fmt, found)


def _parallel(module: ModuleType) -> Any:
    """The thread pool, except for backends that hold the GIL anyway."""
    if module.__name__.endswith("numba_"):
        from fpemu.backends.threads import parallel

        return parallel
    return lambda function, cuts: [function(*cut) for cut in cuts]


def _tensor_amax(x: np.ndarray, kind: str) -> float:
    """Largest |x| as float32, NaN skipped."""
    top = 0.0
    for index in pieces(x.shape, (1,) * x.ndim, 1 << 20) if x.size else []:
        part = np.abs(_float64(x[index], kind))
        top = max(top, float(np.fmax.reduce(part, axis=None, initial=0.0)))
    with np.errstate(over="ignore"):
        return float(np.float32(top))


def _float64(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bfloat16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


@dataclass(slots=True)
class _Sums:
    counts: np.ndarray  # size, zeros, underflow, subnormal, saturated, nan, inf, nan_out, nonzero
    sums: np.ndarray  # x^2, (x-q)^2, q^2, xq, relative^2, (q-x)x
    max_rel: float
    exponents: tuple[int, int]
    scales: np.ndarray  # blocks, zero, saturated, nan
    amaxes: tuple[float, float]  # smallest nonzero, largest


def _measure(request: Request, module: ModuleType) -> _Sums:
    fmt, element = request.fmt, element_format(request.fmt)
    x = _float64(request.x, request.kind)
    parts = module.encode(request)
    q = np.empty(x.shape, np.float64)
    module.decode(fmt, parts, request.axis, q, "float64")
    codes = parts.codes
    mag = codes & element.code_dtype.type((1 << element.exp_bits + element.man_bits) - 1)
    nonzero, x_nan, x_inf, q_nan = x != 0, np.isnan(x), np.isinf(x), np.isnan(q)
    small = np.zeros(x.shape, bool)
    if element.has_zero and not element.is_integer:
        small = (mag > 0) & (mag < 1 << element.man_bits) & ~q_nan
    saturated = ~module.within(request) & np.isfinite(x) & ~q_nan
    both = np.isfinite(x) & np.isfinite(q)
    xf, qf = x[both], q[both]
    error = qf - xf
    used = xf != 0
    relative = error[used] / xf[used]
    counts = np.array(
        [
            x.size, np.count_nonzero(x == 0), np.count_nonzero(nonzero & (q == 0)),
            np.count_nonzero(small), np.count_nonzero(saturated), np.count_nonzero(x_nan),
            np.count_nonzero(x_inf), np.count_nonzero(q_nan), relative.size,
        ],
        dtype=np.int64,
    )  # fmt: skip
    sums = np.array(
        [
            _dot(xf, xf), _dot(error, error), _dot(qf, qf), _dot(xf, qf),
            _dot(relative, relative), _dot(error, xf),
        ]
    )  # fmt: skip
    biased = (qf[qf != 0].view(np.int64) >> 52 & 0x7FF) - 1023
    exponents = (int(biased.min()), int(biased.max())) if biased.size else (1 << 20, -(1 << 20))
    scales, amaxes = _scale_counts(fmt, parts.scales, x, request.axis)
    worst = float(np.abs(relative).max()) if relative.size else 0.0
    return _Sums(counts, sums, worst, exponents, scales, amaxes)


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """Sum of products without BLAS, whose threads fight ours and make sums depend on their number."""
    return float(np.einsum("i,i->", a, b))


def _scale_counts(
    fmt: Format | BlockFormat, scales: np.ndarray | None, x: np.ndarray, axis: int
) -> tuple[np.ndarray, tuple[float, float]]:
    if scales is None or not isinstance(fmt, BlockFormat) or fmt.scale is None:
        return np.zeros(4, np.int64), (inf, 0.0)
    if scales_dtype(fmt) == np.uint8:
        values = value_table(fmt.scale)[scales]
        zero = np.count_nonzero(scales == 0)
    else:
        values, zero = scales, np.count_nonzero(scales == 0)
    saturated = np.count_nonzero(values == np.float32(fmt.scale.max))
    counts = np.array([scales.size, zero, saturated, np.count_nonzero(np.isnan(values))])
    amax = np.abs(np.where(np.isfinite(x), x, 0.0))
    for a, step in enumerate(block_steps(fmt, x.shape, axis)):
        if step > 1:
            amax = np.maximum.reduceat(amax, np.arange(0, x.shape[a], step), axis=a)
    positive = amax[amax > 0]
    if not positive.size:
        return counts, (inf, 0.0)
    return counts, (float(positive.min()), float(positive.max()))


def _combine(fmt: Format | BlockFormat, found: list[_Sums]) -> Stats:
    counts = sum((f.counts for f in found), np.zeros(9, np.int64))
    xx, ee, qq, xq, rr, ex = (float(v) for v in sum((f.sums for f in found), np.zeros(6)))
    blocks, zero, saturated, bad = (
        int(v) for v in sum((f.scales for f in found), np.zeros(4, np.int64))
    )
    size, zeros, underflow, subnormal, clipped, x_nan, x_inf, q_nan, used = (int(c) for c in counts)
    low = min((f.exponents[0] for f in found), default=1 << 20)
    high = max((f.exponents[1] for f in found), default=-(1 << 20))
    smallest = min((f.amaxes[0] for f in found), default=inf)
    largest = max((f.amaxes[1] for f in found), default=0.0)
    if ee == 0:
        sqnr = inf
    else:
        sqnr = 10 * log10(xx / ee) if xx > 0 and ee < inf else -inf if xx == 0 else nan
    norm = sqrt(xx) * sqrt(qq)
    return Stats(
        format=fmt.name, size=size, zeros=zeros, underflow=underflow, subnormal=subnormal,
        saturated=clipped, nan=x_nan, inf=x_inf, nan_out=q_nan, sqnr_db=sqnr,
        max_rel_error=max((f.max_rel for f in found), default=0.0),
        rms_rel_error=sqrt(rr / used) if used else 0.0,
        cosine=xq / norm if norm > 0 else nan,
        bias=ex / xx if xx > 0 else nan,
        exp_min=low if low <= high else None,
        exp_max=high if low <= high else None,
        blocks=blocks,
        amax_spread=float(np.log2(largest / smallest)) if largest > 0 else 0.0,
        zero_scale_share=zero / blocks if blocks else 0.0,
        saturated_scale_share=saturated / blocks if blocks else 0.0,
        nan_scale_share=bad / blocks if blocks else 0.0,
    )  # fmt: skip
