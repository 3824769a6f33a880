"""What all quantizer kernels use: bits and floats, sources as float32, blocks and tiles.

A tile is `BR` rows and `BC` columns of blocks of `TALL` x `WIDE` elements; `TALLP` and `WIDEP` are
those sizes raised to powers of two, whose surplus is masked. Float constants travel as bits, for
Triton would make a subnormal one a float64.
"""

# mypy: allow-incomplete-defs, allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

#: Interpreted kernels run on numpy, which has neither directed rounding nor a NaN-dropping minimum.
INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))

SIGN = tl.constexpr(-0x80000000)
MAG = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(0x7F800000)
QNAN = tl.constexpr(0x7FC00000)
FLT_MAX = tl.constexpr(0x7F7FFFFF)
ONE = tl.constexpr(0x3F800000)

# Bits and floats ---------------------------------------------------------------------------------


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _f32(bits: tl.constexpr):
    """The float32 constant of these bits."""
    return tl.full([], bits, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _least(x, limit):
    """The smaller of two floats; `limit` where x is NaN."""
    if INTERPRETED:
        return tl.where(x < limit, x, limit)
    else:
        return tl.minimum(x, limit)


@triton.jit
def _most(x, limit):
    """The larger of two floats; `limit` where x is NaN."""
    if INTERPRETED:
        return tl.where(x > limit, x, limit)
    else:
        return tl.maximum(x, limit)


@triton.jit
def _divided(a, b):
    """a / b, rounded to nearest even. (Some Tritons' own ``div_rn`` flushes subnormals.)"""
    if INTERPRETED:
        return tl.div_rn(a, b)
    else:
        return tl.inline_asm_elementwise(
            "div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )


# Sources -----------------------------------------------------------------------------------------


@triton.jit
def _widened(raw, KIND: tl.constexpr):
    """float32 bits of source elements; of float64 and wide integers, rounded to nearest even."""
    if KIND == "float32":
        return raw
    elif KIND == "bfloat16":
        if INTERPRETED:
            return raw.to(tl.int32) << 16
        else:
            return _bits(raw.to(tl.bfloat16, bitcast=True).to(tl.float32))
    elif KIND == "float16":
        return _bits(raw.to(tl.float16, bitcast=True).to(tl.float32))
    elif KIND == "float64":
        return _bits(raw.to(tl.float64, bitcast=True).to(tl.float32))
    elif KIND == "uint8":
        return _bits((raw.to(tl.int32) & 0xFF).to(tl.float32))
    elif KIND == "uint16":
        return _bits((raw.to(tl.int32) & 0xFFFF).to(tl.float32))
    elif KIND == "uint32":
        return _bits(raw.to(tl.uint32, bitcast=True).to(tl.float32))
    elif KIND == "uint64":
        return _bits(raw.to(tl.uint64, bitcast=True).to(tl.float32))
    else:
        return _bits(raw.to(tl.float32))


# Blocks and tiles --------------------------------------------------------------------------------


@triton.jit
def _block_max(a, TALLP: tl.constexpr, WIDEP: tl.constexpr):
    """Largest integer of each block of a tile."""
    BR: tl.constexpr = a.shape[0]
    BC: tl.constexpr = a.shape[1]
    if WIDEP > 1:
        a = tl.max(tl.reshape(a, [BR, BC // WIDEP, WIDEP]), axis=2)
    if TALLP > 1:
        a = tl.max(tl.reshape(a, [BR // TALLP, TALLP, BC // WIDEP]), axis=1)
    return a


@triton.jit
def _spread(block, BR: tl.constexpr, BC: tl.constexpr, TALLP: tl.constexpr, WIDEP: tl.constexpr):
    """A block's number for each of its elements."""
    if TALLP > 1:
        block = tl.broadcast_to(block[:, None, :], [BR // TALLP, TALLP, BC // WIDEP])
        block = tl.reshape(block, [BR, BC // WIDEP])
    if WIDEP > 1:
        block = tl.broadcast_to(block[:, :, None], [BR, BC // WIDEP, WIDEP])
        block = tl.reshape(block, [BR, BC])
    return block


@triton.jit
def _place(TR, TC, N1):
    """(batch 0, batch 1, tile row, tile column) of a program."""
    pid = tl.program_id(0)
    tc = pid % TC
    rest = pid // TC
    tr = rest % TR
    rest = rest // TR
    return rest // N1, rest % N1, tr, tc


@triton.jit
def _steps(n: tl.constexpr, SIZE: tl.constexpr, SIZEP: tl.constexpr, FAR: tl.constexpr):
    """Positions of a tile's n entries along an axis, and which of them are there."""
    i = tl.arange(0, n)
    there = i >= 0
    if SIZE != SIZEP:
        there = (i % SIZEP) < SIZE
        i = (i // SIZEP) * SIZE + i % SIZEP
    if FAR:
        i = i.to(tl.int64)
    return i, there


@triton.jit
def _at(b0, b1, r, c, s0, s1, sr, sc):
    """64-bit offset of the element (b0, b1, r, c)."""
    return b0.to(tl.int64) * s0 + b1.to(tl.int64) * s1 + r.to(tl.int64) * sr + c.to(tl.int64) * sc


@triton.jit
def _cells(
    tr, tc, R, C, TALL: tl.constexpr, WIDE: tl.constexpr, TALLP: tl.constexpr,
    WIDEP: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """A tile's first row and column, its rows and columns from there, those of its elements that
    are there, and how many rows and columns are left."""
    row0 = tr.to(tl.int64) * (BR // TALLP * TALL)
    col0 = tc.to(tl.int64) * (BC // WIDEP * WIDE)
    r, row_there = _steps(BR, TALL, TALLP, FAR)
    c, col_there = _steps(BC, WIDE, WIDEP, FAR)
    rows_left = tl.minimum(R - row0, BR // TALLP * TALL).to(tl.int32)
    cols_left = tl.minimum(C - col0, BC // WIDEP * WIDE).to(tl.int32)
    there = (row_there & (r < rows_left))[:, None] & (col_there & (c < cols_left))[None, :]
    return row0, col0, r, c, there, rows_left, cols_left


@triton.jit
def _block_cells(
    b0, b1, tr, tc, rows_left, cols_left, s0, s1, sr, sc, TALL: tl.constexpr, WIDE: tl.constexpr,
    NR: tl.constexpr, NC: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """64-bit offset of a tile's first block, offsets of its NR x NC blocks from there, and which of
    them are there."""
    kr = tl.arange(0, NR)
    kc = tl.arange(0, NC)
    if FAR:
        kr = kr.to(tl.int64)
        kc = kc.to(tl.int64)
    there = (kr * TALL < rows_left)[:, None] & (kc * WIDE < cols_left)[None, :]
    first = _at(b0, b1, tr.to(tl.int64) * NR, tc.to(tl.int64) * NC, s0, s1, sr, sc)
    return first, (kr * sr)[:, None] + (kc * sc)[None, :], there
