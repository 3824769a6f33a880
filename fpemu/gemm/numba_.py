"""The fast CPU backend: layouts, pieces and threads around `fpemu.gemm.loops`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from fpemu.backends.floatmode import ieee_mode
from fpemu.backends.threads import get_num_threads
from fpemu.formats import FP16, FP32, Format
from fpemu.gemm import loops
from fpemu.gemm.kernels import ROWS, params_of, split_params
from fpemu.gemm.progress import run_pieces
from fpemu.gemm.request import NO_EXPONENT, Operand, Request, Scales
from fpemu.gemm.units import Unit

_LEAST = 1 << 21  # multiply-adds of a piece: fewer are not worth a thread
_MOST = 1 << 29  # and more would make the progress bar jump


def supports(unit: Unit) -> str | None:
    """Why the kernels cannot compute a unit, or None. (They can compute every row of the table.)"""
    if unit.is_reference:
        return None
    a, b = unit.a, unit.b
    if unit.group > 1:
        assert unit.scale is not None
        low = _low_bits(unit)
        value = unit.group * a.max * b.max * 4 * 2.0**low
        if (
            value >= 2**31
            or value * 2.0 ** (unit.F - low) * unit.L / unit.group >= 2**55
            or unit.F < max(low, 23)
        ):
            return f"groups of {unit.group} with F={unit.F} do not fit 64-bit sums"
        return None
    if unit.L % 2:
        return f"L={unit.L} is odd"
    if a.man_bits + b.man_bits > 22:
        return f"products of {a.name} and {b.name} do not fit 24 bits"
    largest = (2 - 2.0**-a.man_bits) * (2 - 2.0**-b.man_bits) * unit.L / 2 + 2
    if largest * 2.0**unit.F >= 2**31:
        return f"L={unit.L} with F={unit.F} does not fit 32-bit sums"
    return None


def run(request: Request, device: Any = None) -> np.ndarray:
    """D, float32 [matrices, M, N] (float16's values where the output is that).

    A tensor's `device` does not matter here: host arrays in, host arrays out.
    """
    shape = request.c.shape
    merged = _merged(request)
    with ieee_mode():
        if request.unit.is_reference:
            d = _reference(merged)
        elif request.unit.group > 1:
            d = _grouped(merged)
        else:
            d = _plain(merged)
    request.bad = merged.bad
    return d.reshape(shape)


def _merged(request: Request) -> Request:
    """Where every matrix meets the same b: one product whose rows are all their rows."""
    a, b, c = request.a, request.b, request.c
    if len(b.values) != 1 or len(a.values) != len(c) or len(c) < 2:
        return request

    def stack(array: Any) -> Any:
        return None if array is None else array.reshape(1, -1, array.shape[2])

    scales = a.scales and Scales(stack(a.scales.sig), stack(a.scales.exp), a.scales.size)
    one = np.zeros(1, np.int64)
    return replace(
        request, a=Operand(stack(a.values), one, scales), b=replace(b, index=one), c=stack(c),
        factor_a=stack(request.factor_a),
    )  # fmt: skip


# Layouts -------------------------------------------------------------------------------------------


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def _accumulators(request: Request) -> tuple[np.ndarray, np.ndarray]:
    """C as float32 bits in padded rows and panels, and the view of it that is D."""
    matrices, rows, cols = request.c.shape
    d = np.zeros((matrices, _up(rows, ROWS), _up(cols, 16)), np.float32)
    d[:, :rows, :cols] = request.c
    return d.view(np.int32).ravel(), d[:, :rows, :cols]


def _in_order(unit: Unit, values: np.ndarray, axis: int) -> np.ndarray:
    """K permuted so that a unit's blocks are contiguous: alternating pairs, 16 elements each."""
    if unit.order != "pairs":
        return values
    depth = values.shape[axis]
    k = np.arange(_up(depth, 32)).reshape(-1, 8, 2, 2).swapaxes(1, 2).ravel()
    padded = np.zeros(
        [_up(n, 32) if i == axis else n for i, n in enumerate(values.shape)], np.float32
    )
    padded[(slice(None),) * axis + (slice(depth),)] = values
    return np.ascontiguousarray(padded.take(k, axis))


def _rows(
    values: np.ndarray, width: int, params: tuple[int, ...], chunk: int = 256
) -> tuple[Any, ...]:
    """sig, exp [matrices, padded rows, width] of values [matrices, rows, K], and how many are bad."""
    matrices, rows, depth = values.shape
    padded = _up(rows, ROWS)
    sig = np.empty(matrices * padded * width, np.float32)
    exp = np.empty(matrices * padded * width, np.int32)
    source = values.reshape(-1)
    pieces = [
        (source, rows, padded, depth, r, min(r + chunk, matrices * padded), sig, exp, width, params)
        for r in range(0, matrices * padded, chunk)
    ]
    return sig, exp, sum(run_pieces(loops.split_rows, pieces))


def _panels(
    values: np.ndarray, width: int, params: tuple[int, ...], chunk: int = 8
) -> tuple[Any, ...]:
    """sig, exp [matrices, panels, width, 16] of values [matrices, K, columns], and how many are bad."""
    matrices, depth, cols = values.shape
    panels = matrices * (_up(cols, 16) // 16)
    sig = np.empty(panels * width * 16, np.float32)
    exp = np.empty(panels * width * 16, np.int32)
    source = values.reshape(-1)
    pieces = [
        (source, depth, cols, p, min(p + chunk, panels), sig, exp, width, params)
        for p in range(0, panels, chunk)
    ]
    return sig, exp, sum(run_pieces(loops.split_panels, pieces))


def _row_blocks(array: np.ndarray, count: int, fill: float) -> np.ndarray:
    """[matrices, rows, blocks] with rows padded and blocks padded or cut to `count`; flat."""
    matrices, rows, blocks = array.shape
    out = np.full((matrices, _up(rows, ROWS), count), fill, array.dtype)
    out[:, :rows, : min(blocks, count)] = array[:, :, :count]
    return out.ravel()


def _panel_blocks(array: np.ndarray, count: int, fill: float) -> np.ndarray:
    """[matrices, blocks, columns] as [matrices, panels, count, 16]; flat."""
    matrices, blocks, cols = array.shape
    out = np.full((matrices, count, _up(cols, 16)), fill, array.dtype)
    out[:, : min(blocks, count), :cols] = array[:, :count]
    return np.ascontiguousarray(out.reshape(matrices, count, -1, 16).swapaxes(1, 2)).ravel()


def _pieces(matrices: int, rows: int, panels: int, depth: int) -> list[tuple[int, ...]]:
    """(matrix0, matrix1, row0, row1, panel0, panel1) that cover the result."""
    per_row, per_matrix = panels * 16 * depth, rows * panels * 16 * depth
    budget = min(max(matrices * per_matrix // (8 * get_num_threads()), _LEAST), _MOST)
    many = max(budget // max(per_matrix, 1), 1)
    tall = min(max(_up(budget // max(per_row, 1), ROWS), 16 * ROWS), max(rows, ROWS))
    wide = min(max(budget // max(tall * 16 * depth, 1), 1), max(panels, 1))
    return [
        (m, min(m + many, matrices), r, min(r + tall, rows), p, min(p + wide, panels))
        for m in range(0, matrices, many)
        for r in range(0, rows, tall)
        for p in range(0, panels, wide)
    ]


# The units -----------------------------------------------------------------------------------------


def _plain(request: Request) -> np.ndarray:
    unit, a, b = request.unit, request.a, request.b
    width = _up(max(request.depth, 1), max(unit.step, 16))
    sig_a, exp_a, bad_a = _rows(
        _in_order(unit, a.values, 2), width, split_params(unit.a, unit.emin(unit.a))
    )
    sig_b, exp_b, bad_b = _panels(
        _in_order(unit, b.values, 1), width, split_params(unit.b, unit.emin(unit.b))
    )
    request.bad = (bad_a, bad_b)
    if a.scales is not None and b.scales is not None:
        count = width // a.scales.size
        loops.shift_rows(
            sig_a, exp_a, width, _row_blocks(a.scales.sig, count, 1),
            _row_blocks(a.scales.exp, count, 0), count, a.scales.size, 0, len(sig_a) // width,
        )  # fmt: skip
        loops.shift_panels(
            sig_b, exp_b, width, _panel_blocks(b.scales.sig, count, 1),
            _panel_blocks(b.scales.exp, count, 0), count, b.scales.size, 0, len(sig_b) // width // 16,
        )  # fmt: skip
    flat, result = _accumulators(request)
    rows, panels = _up(result.shape[1], ROWS), _up(result.shape[2], 16) // 16
    blocks, late = request.blocks, request.late
    factor_a = factor_b = None
    if request.factor_a is not None:
        periods = -(-blocks // late)
        factor_a = _row_blocks(request.factor_a, periods, 0)
        factor_b = _panel_blocks(request.factor_b, periods, 0)
    half, params = int(request.out == "fp16"), params_of(unit, request.out)

    def piece(m0: int, m1: int, r0: int, r1: int, p0: int, p1: int) -> None:
        loops.gemm(
            sig_a, exp_a, sig_b, exp_b, flat, a.index, b.index, rows, width, panels, blocks, unit.L,
            m0, m1, r0, r1, p0, p1, late, factor_a, factor_b, half, params,
        )  # fmt: skip

    _run(request, piece, _pieces(len(result), rows, panels, width))
    return result


def _low_bits(unit: Unit) -> int:
    """Every scaled group of a unit is an integer times ``2**(exponents - low)``."""
    assert unit.scale is not None
    grids = sum(fmt.man_bits - fmt.emin for fmt in (unit.a, unit.b))
    return grids + 2 * unit.scale.man_bits


def _grouped(request: Request) -> np.ndarray:
    unit, a, b = request.unit, request.a, request.b
    assert a.scales is not None and b.scales is not None
    width = _up(max(request.depth, 1), unit.L)
    # One exponent for all elements: their significands are the values over 2**emax, which goes
    # into the scales' significands instead.
    sig_a, _, bad_a = _rows(a.values, width, split_params(unit.a, unit.a.emax))
    sig_b, _, bad_b = _panels(b.values, width, split_params(unit.b, unit.b.emax))
    request.bad = (bad_a, bad_b)
    count = width // unit.group

    def groups(scales: Scales, fmt: Format, axis: int) -> tuple[np.ndarray, np.ndarray]:
        times = scales.size // unit.group
        sig = np.repeat(scales.sig * np.float32(2.0**fmt.emax), times, axis)
        return sig, np.repeat(scales.exp, times, axis)

    (fa, ea), (fb, eb) = groups(a.scales, unit.a, 2), groups(b.scales, unit.b, 1)
    fa, ea = _row_blocks(fa, count, 0), _row_blocks(ea, count, NO_EXPONENT)
    fb, eb = _panel_blocks(fb, count, 0), _panel_blocks(eb, count, NO_EXPONENT)
    flat, result = _accumulators(request)
    rows, panels = _up(result.shape[1], ROWS), _up(result.shape[2], 16) // 16
    low, params = _low_bits(unit), params_of(unit, request.out)

    def piece(m0: int, m1: int, r0: int, r1: int, p0: int, p1: int) -> None:
        loops.group_gemm(
            sig_a, fa, ea, sig_b, fb, eb, flat, a.index, b.index, rows, width, panels,
            request.blocks, unit.L // unit.group, unit.group, low, m0, m1, r0, r1, p0, p1, params,
        )  # fmt: skip

    _run(request, piece, _pieces(len(result), rows, panels, width))
    return result


_REFERENCES: dict[str, Any] = {
    "sequential": loops.sequential,
    "fma": loops.fused,
    "pairwise": loops.pairwise,
    "exact": loops.exact,
}


def _reference(request: Request) -> np.ndarray:
    """float32 sums as the unit's name says; the NaNs are the units'."""
    a, b, depth, order = request.a, request.b, request.depth, request.unit.order
    fmt: Format = FP32 if request.out == "fp32" else FP16
    result = np.array(request.c, np.float32, order="C")
    if order == "exact" and _fits_float64(request):
        for m, (i, j) in enumerate(zip(a.index, b.index, strict=True)):
            total = (
                a.values[i].astype(np.float64) @ b.values[j].astype(np.float64) + result[m] + 0.0
            )
            result[m] = total if request.out == "fp32" else total.astype(np.float16)
        return result
    matrices, rows, cols = result.shape
    loop, end = _REFERENCES[order], (fmt.man_bits, fmt.emin, fmt.emax) if order == "exact" else ()
    lefts, rights, flat = (
        x.reshape(len(x), x.shape[1] * x.shape[2]) for x in (a.values, b.values, result)
    )

    def piece(m0: int, m1: int, r0: int, r1: int, p0: int, p1: int) -> None:
        for m in range(m0, m1):
            left, right = lefts[a.index[m]], rights[b.index[m]]
            loop(left, right, flat[m], r0, r1, p0 * 16, min(p1 * 16, cols), depth, cols, *end)

    _run(request, piece, _pieces(matrices, rows, -(-cols // 16), 8 * depth))
    result.view(np.uint32)[np.isnan(result)] = 0x7FFFFFFF
    return result


def _fits_float64(request: Request) -> bool:
    """Whether every sum is an integer below 2**53 times one power of two: then a float64 product
    is exact in whatever order it adds."""
    spans = []
    for x in (request.a.values, request.b.values, request.c):
        mag = x.view(np.int32) & 0x7FFFFFFF
        top = int(mag.max(initial=0))
        if top >= 0x7F800000:
            return False
        sig, field = (mag & 0x7FFFFF) | ((mag >= 1 << 23) << 23), np.maximum(mag >> 23, 1)
        lowest = field - 150 + np.where(sig, _trailing_zeros(sig), 1 << 20)
        spans.append((int(lowest.min(initial=1 << 20)), max(top >> 23, 1) - 126))
    (low_a, high_a), (low_b, high_b), (low_c, high_c) = spans
    low = min(low_a + low_b, low_c)
    high = max(high_a + high_b + max(request.depth - 1, 0).bit_length(), high_c) + 1
    return low > -1000 and high - low <= 53


def _trailing_zeros(x: np.ndarray) -> np.ndarray:
    """Of positive integers below 2**24, from the exponent of the lowest set bit as a float."""
    return ((x & -x).astype(np.float32).view(np.int32) >> 23) - 127


def _run(request: Request, piece: Any, pieces: list[tuple[int, ...]]) -> None:
    """Nothing to do where an operand is refused anyway, or there is no K."""
    if not any(request.bad) and request.depth:
        run_pieces(piece, pieces, request.progress)
