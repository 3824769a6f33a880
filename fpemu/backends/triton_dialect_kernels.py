"""Triton kernels of the dialects: block amaxes, the choice of a candidate, the steps of an element.

The rules are array operations on block amaxes (`fpemu.dialects`) and run between the kernels. What
`quantize_kernel` does to an element is written here: `Steps`, `Order` and `Cost` of
`fpemu.backends.triton_dialects` are its constants.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from fpemu.backends.triton_bits import (
    INF,
    MAG,
    QNAN,
    SIGN,
    _at,
    _bits,
    _block_cells,
    _block_max,
    _cells,
    _divided,
    _f32,
    _float,
    _least,
    _place,
    _spread,
    _widened,
)

RUN = tl.constexpr(16)  # elements of a block that has two candidates

# Elements ----------------------------------------------------------------------------------------


@triton.jit
def _bfloat16_bits(bits):
    """float32 bits rounded to bfloat16's grid, to nearest even; meaningless for NaN."""
    return (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16


@triton.jit
def _entered(raw, KIND: tl.constexpr, NARROW: tl.constexpr):
    """float32 bits of source elements, the sign of NaN kept (a conversion may lose it).

    `NARROW`: rounded to bfloat16's grid.
    """
    bits = _widened(raw, KIND)
    if KIND == "float16" or KIND == "bfloat16" or KIND == "float64":
        bits = tl.where(raw < 0, bits | SIGN, bits & MAG)
    if NARROW:
        bits = tl.where((bits & MAG) > INF, bits, _bfloat16_bits(bits) << 16)
    return bits


@triton.jit
def _scaled(x, by, D: tl.constexpr):
    """What is cast, before NaN and what wraps around are seen to."""
    if D.apply == "multiply":
        p = x * by
    else:
        p = _divided(x, by)
        if D.apply == "divide-times-3":
            p = p * 3.0
    if D.zero == "plus":
        p = tl.where(p == 0, _f32(0), p)
    elif D.zero == "minus":
        p = tl.where(p == 0, _f32(SIGN), p)
    return p


@triton.jit
def _replaced(p, x, by, D: tl.constexpr):
    """NaN and infinity in `p` replaced; see `fpemu.dialects.Nan`.

    Of two NaNs a product keeps the operand's, a quotient x's; one made by the operation is negative.
    """
    of_x = x != x
    of_by = by != by
    if D.apply != "multiply":
        of_by = of_by & (x == x)
    new = tl.where(of_x | of_by, D.nan, D.made)
    if D.signed:
        sign = tl.where(of_by, _bits(by), tl.where(of_x, _bits(x), SIGN)) & SIGN
        new = (new & MAG) | sign
    bits = _bits(p)
    if D.inf >= 0:
        bits = tl.where((bits & MAG) == INF, (bits & SIGN) | D.inf, bits)
    return _float(tl.where(p == p, bits, new))


@triton.jit
def _unbounded(a):
    """Non-negative `a` rounded to E2M1's steps, to nearest even, without a largest value."""
    scaled = a * tl.where(a < 2, 2.0, tl.where(a < 4, 1.0, 0.5))
    near = tl.where(scaled < 8388608.0, (scaled + 8388608.0) - 8388608.0, scaled)
    return near * tl.where(a < 2, 0.5, tl.where(a < 4, 1.0, 2.0))


@triton.jit
def _along(n: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, WIDEP: tl.constexpr):
    """An element's place in its run of `n` along the axis that the blocks follow."""
    if WIDEP > 1:
        return (tl.arange(0, BC) % n)[None, :]
    else:
        return (tl.arange(0, BR) % n)[:, None]


@triton.jit
def _wrapped(p, by, WIDEP: tl.constexpr):
    """E2M1 values of what fouroversix packs; see `dialect_loops.wrap`."""
    BR: tl.constexpr = p.shape[0]
    BC: tl.constexpr = p.shape[1]
    TALL: tl.constexpr = 1 if WIDEP > 1 else 2
    WIDE: tl.constexpr = 2 if WIDEP > 1 else 1
    low = _along(2, BR, BC, WIDEP) == 0  # the even element of a byte
    a = tl.abs(p)
    v = _unbounded(a)
    rounded = _bfloat16_bits(_bits(v))
    raw = (((rounded >> 7) - 126) << 1) | ((rounded >> 6) & 1)
    raw = tl.where(v == 0, 0, tl.where(v == 0.5, 1, raw))
    raw = (raw | tl.where(_bits(p) < 0, 8, 0)) & 0xFF
    raw = tl.where((_bits(p) & MAG) < INF, raw, 0x0B)
    raw = tl.where(_bits(by) == (INF | SIGN), 0, raw)
    spilled = _spread(_block_max(tl.where(low, raw >> 4, 0), TALL, WIDE), BR, BC, TALL, WIDE)
    code = (raw & 15) | tl.where(low, 0, spilled)
    mag = code & 7
    value = tl.where(mag < 2, _bits(mag.to(tl.float32) * 0.5), (mag + 252) << 22)
    value = value | tl.where(code >= 8, SIGN, 0)
    beyond = _block_max(tl.where(a < 7, 0, 1), TALL, WIDE)
    return tl.where(_spread(beyond, BR, BC, TALL, WIDE) == 0, p, _float(value))


@triton.jit
def _in_order(bits, factor, number, ORDER: tl.constexpr):
    """float32 bits of decoded values: each operation of a `fpemu.dialects.Decode` rounds."""
    v = _float(bits)
    if ORDER.plus_zero:
        v = tl.where(v == 0, _f32(0), v)
    v = v * factor
    if ORDER.times_number:
        v = v * number
    if ORDER.divisor > 0:
        v = _divided(v, _f32(ORDER.divisor))
    return tl.where(v == v, _bits(v), QNAN)


# Candidates --------------------------------------------------------------------------------------


@triton.jit
def _cost(
    x, by, scale, encode, number, E: tl.constexpr, TALLP: tl.constexpr, WIDEP: tl.constexpr
):  # fmt: skip
    """Error of each block under a candidate scale; see `fpemu.dialects.Error`.

    Sixteen errors are added one after the other (`E.pairs`: those eight apart first). Each is taken
    out of its block as the largest integer beside zeros, which has no order to get wrong.
    """
    BR: tl.constexpr = x.shape[0]
    BC: tl.constexpr = x.shape[1]
    p = x * _spread(by, BR, BC, TALLP, WIDEP)
    a = tl.abs(p)
    if E.clamp:
        q = tl.where(p == p, _unbounded(_least(a, 6.0)), 0.0)
    else:
        q = _unbounded(tl.where((_bits(p) & MAG) == INF, _f32(QNAN), a))
    q = tl.where(p < 0, -q, q)
    v = q * _spread(scale, BR, BC, TALLP, WIDEP)
    if E.fast:
        d = v - x * encode
    else:
        d = _divided(v * number, _f32(E.top)) - x
    if E.measure == "mse":
        d = d * d
    d = _bits(d) & MAG
    if E.measure == "max":
        return _float(_block_max(d, TALLP, WIDEP))
    else:
        place = _along(RUN, BR, BC, WIDEP)
        total = tl.zeros_like(by)
        for k in tl.static_range(RUN // 2 if E.pairs else RUN):
            one = _float(_block_max(tl.where(place == k, d, 0), TALLP, WIDEP))
            if E.pairs:
                one += _float(_block_max(tl.where(place == k + 8, d, 0), TALLP, WIDEP))
            total = total + one
        return total


# Kernels -----------------------------------------------------------------------------------------


@triton.jit
def block_amax_kernel(
    x_ptr, out_ptr,
    R, C, N1, TR, TC,
    x0, x1, xr, xc, s0, s1, sr, sc,
    KIND: tl.constexpr, NARROW: tl.constexpr, SKIP_NAN: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, TALLP: tl.constexpr, WIDEP: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """float32 bits of the largest ``|x|`` of every block; NaN is larger than infinity, or skipped."""
    b0, b1, tr, tc = _place(TR, TC, N1)
    row0, col0, r, c, there, rows_left, cols_left = _cells(
        tr, tc, R, C, TALL, WIDE, TALLP, WIDEP, BR, BC, FAR
    )
    source = x_ptr + _at(b0, b1, row0, col0, x0, x1, xr, xc)
    raw = tl.load(source + (r * xr)[:, None] + (c * xc)[None, :], mask=there, other=0)
    a = _entered(raw, KIND, NARROW) & MAG
    if SKIP_NAN:
        a = tl.where(a > INF, 0, a)
    first, at, blocks = _block_cells(
        b0, b1, tr, tc, rows_left, cols_left, s0, s1, sr, sc, TALL, WIDE, BR // TALLP,
        BC // WIDEP, FAR,
    )  # fmt: skip
    tl.store(out_ptr + first + at, _block_max(a, TALLP, WIDEP), mask=blocks)


@triton.jit
def choose_kernel(
    x_ptr, out_ptr, six_ptr, six_scale_ptr, four_ptr, four_scale_ptr, scalars_ptr,
    R, C, N1, TR, TC,
    x0, x1, xr, xc, s0, s1, sr, sc,
    KIND: tl.constexpr, NARROW: tl.constexpr, E: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, TALLP: tl.constexpr, WIDEP: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """1 for blocks whose error is smaller with their largest value at 4 than at 6 (int8).

    Of both candidates: the operands and the values of the scales. `scalars_ptr`: S and the stored
    number of the tensor.
    """
    b0, b1, tr, tc = _place(TR, TC, N1)
    row0, col0, r, c, there, rows_left, cols_left = _cells(
        tr, tc, R, C, TALL, WIDE, TALLP, WIDEP, BR, BC, FAR
    )
    source = x_ptr + _at(b0, b1, row0, col0, x0, x1, xr, xc)
    raw = tl.load(source + (r * xr)[:, None] + (c * xc)[None, :], mask=there, other=0)
    x = _float(_entered(raw, KIND, NARROW))
    first, at, blocks = _block_cells(
        b0, b1, tr, tc, rows_left, cols_left, s0, s1, sr, sc, TALL, WIDE, BR // TALLP,
        BC // WIDEP, FAR,
    )  # fmt: skip
    encode = tl.load(scalars_ptr)
    number = tl.load(scalars_ptr + 1)
    by = tl.load(six_ptr + first + at, mask=blocks, other=0)
    scale = tl.load(six_scale_ptr + first + at, mask=blocks, other=0)
    six = _cost(x, by, scale, encode, number, E, TALLP, WIDEP)
    by = tl.load(four_ptr + first + at, mask=blocks, other=0)
    scale = tl.load(four_scale_ptr + first + at, mask=blocks, other=0)
    four = _cost(x, by, scale, encode, number, E, TALLP, WIDEP)
    tl.store(out_ptr + first + at, (four < six).to(tl.int8), mask=blocks)
