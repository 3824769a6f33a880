"""The units as one Triton kernel: a program is a tile of D, one lane is a few of its outputs.

The arithmetic is that of the CPU kernels (`fpemu.gemm.kernels`): a product of significands is one
exact float32 multiplication, aligning it is a second, by a power of two, and the conversion to an
integer truncates toward zero as the hardware does. All sums are integer sums, modulo 2**32. What
a row of the unit table says is compiled in: `L`, `F`, `CLAMP` and so on are constants.

Everything here gives the same bits on a GPU and in Triton's interpreter: shifts stay below the
width, no float operation is contracted, and no result depends on what an overflow or NaN becomes.

Operands are panels [matrix, panel, k, ROWS or COLS] (see `fpemu.gemm.triton_`): one load takes the
same k of all rows of a tile, and neighbouring k are a constant distance apart.
"""

# mypy: allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

MAG = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(0x7F800000)
MAN = tl.constexpr(0x7FFFFF)
HIDDEN = tl.constexpr(0x800000)
NO_EXPONENT = tl.constexpr(-4096)  # fpemu.gemm.request.NO_EXPONENT

# Numbers -------------------------------------------------------------------------------------------


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _floats(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _shift(n, MOST: tl.constexpr):
    """A shift that stays below the width; `MOST` for negative ones, whose result is not used."""
    return tl.minimum(n.to(tl.uint32, bitcast=True), MOST).to(tl.int32, bitcast=True)


@triton.jit
def _exponent_of_c(c, C_EMIN: tl.constexpr):
    mag = c & MAG
    exponent = tl.maximum((mag >> 23) - 127, C_EMIN)
    return tl.where(mag != 0, exponent, NO_EXPONENT)


@triton.jit
def _significand(c):
    mag = c & MAG
    return tl.where(mag < HIDDEN, mag, (mag & MAN) | HIDDEN)


@triton.jit
def _leading(mag):
    """float32 bits of the 24 leading bits of a uint32, the others cut off."""
    # Clearing the bit below the 24 leading ones (and some below it) makes the conversion truncate.
    return _bits((mag - (mag & (mag >> 24))).to(tl.float32))


@triton.jit
def _truncated(mag, scale, KEEP: tl.constexpr):
    """float32 bits of ``mag * 2**scale`` cut off toward zero; `mag` is a uint32."""
    bits = _leading(mag)
    exponent = (bits >> 23) + scale
    man = bits & MAN
    subnormal = (man | HIDDEN) >> _shift(1 - exponent, 31)
    y = tl.where(exponent < 1, subnormal, (exponent << 23) | man)
    y = tl.where(exponent < 255, y, INF) & KEEP
    return tl.where(mag == 0, 0, y)


@triton.jit
def _nearest_half(mag, scale):
    """float32 bits of ``mag * 2**scale`` rounded to the nearest float16, ties to even."""
    top = (_leading(mag) >> 23) - 127
    drop = _shift(tl.maximum(tl.maximum(top - 10, -24 - scale), 0), 31)
    cut = drop.to(tl.uint32)
    half = (tl.full(mag.shape, 1, tl.uint32) << cut) >> 1
    up = tl.where(drop == 0, 0, half - 1 + ((mag >> cut) & 1))
    kept = (mag + up) >> cut
    power = _floats((scale + drop + 127) << 23)
    y = _bits(kept.to(tl.float32) * power)
    y = tl.where(y < 0x47800000, y, INF)  # 65536
    return tl.where(mag == 0, 0, y)


@triton.jit
def _or_special(special, result):
    """`result`, or `special` where that is not finite; any NaN stands for NaN until the end."""
    return tl.where((special & MAG) < INF, result, special)


@triton.jit
def _to_odd(x, y):
    """x + y in float64, rounded to odd: rounding that to float32 is then one rounding."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    bits = total.to(tl.int64, bitcast=True)
    inexact = (error != 0) & ((bits & 1) == 0) & (tl.abs(total) < float("inf"))
    toward = tl.where((error > 0) == (total > 0), 1, -1)
    return tl.where(inexact, bits + toward, bits).to(tl.float64, bitcast=True)


@triton.jit
def _fused(x, y, z):
    """x * y + z of float32 with one rounding: the product is exact in float64."""
    return _to_odd(x.to(tl.float64) * y.to(tl.float64), z.to(tl.float64)).to(tl.float32)


# The block step ------------------------------------------------------------------------------------


@triton.jit
def _block(
    c, sig_a, exp_a, sig_b, exp_b,
    L: tl.constexpr, F: tl.constexpr, CLAMP: tl.constexpr, C_EMIN: tl.constexpr, KEEP: tl.constexpr,
    HALF: tl.constexpr, WIDE: tl.constexpr, SPECIAL: tl.constexpr, TWO_SUMS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """c (float32 bits) plus one block of `L` products; the pointers are at the block's first k."""
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    E = tl.maximum(_exponent_of_c(c, C_EMIN), CLAMP)
    at_a, at_b = exp_a + rows, exp_b + cols
    for _ in range(0, L, UNROLL):
        for u in tl.static_range(UNROLL):
            ea, eb = tl.load(at_a + u * ROWS), tl.load(at_b + u * COLS)
            E = tl.maximum(E, ea[:, None] + eb[None, :])
        at_a += UNROLL * ROWS
        at_b += UNROLL * COLS
    LEFT: tl.constexpr = max(F - 23, 0)
    down = E - tl.maximum((c & MAG) >> 23, 1) + (LEFT - F + 150)
    kept = (_significand(c) << LEFT) >> _shift(down, 31)
    sign = c >> 31
    even = (kept ^ sign) - sign
    odd = tl.zeros_like(even)
    special = _floats(tl.where((c & MAG) < INF, 0, c))
    base = F + 127 - E
    power = _floats(tl.minimum(tl.maximum(base, 0), 254) << 23)
    at_a, at_b = exp_a + rows, exp_b + cols
    in_a, in_b = sig_a + rows, sig_b + cols
    for _ in range(0, L, UNROLL):
        for u in tl.static_range(UNROLL):
            product = tl.load(in_a + u * ROWS)[:, None] * tl.load(in_b + u * COLS)[None, :]
            if WIDE:
                ea, eb = tl.load(at_a + u * ROWS), tl.load(at_b + u * COLS)
                shift = tl.maximum(ea[:, None] + eb[None, :] + base, 0)
                power = (shift << 23).to(tl.float32, bitcast=True)
            aligned = product * power
            if SPECIAL:
                special += product
                aligned = tl.where(tl.abs(product) < float("inf"), aligned, 0.0)
            # Two sums, each below 2**31 for half a block; together they may pass it.
            if TWO_SUMS and u % 2 == 1:
                odd += aligned.to(tl.int32)
            else:
                even += aligned.to(tl.int32)
        in_a += UNROLL * ROWS
        in_b += UNROLL * COLS
        at_a += UNROLL * ROWS
        at_b += UNROLL * COLS
    total = even + odd
    negative = ((even >> 1) + (odd >> 1) + (even & odd & 1)) >> 31
    mag = ((total ^ negative) - negative).to(tl.uint32, bitcast=True)
    if HALF:
        y = _nearest_half(mag, E - F)
    else:
        y = _truncated(mag, E - F, KEEP)
    y = tl.where(y == 0, 0, y | (negative << 31))
    if SPECIAL:
        return _or_special(_bits(special), y)
    else:
        return _or_special(c, y)


@triton.jit
def _group_block(
    c, sig_a, scale_a, exp_a, sig_b, scale_b, exp_b,
    L: tl.constexpr, F: tl.constexpr, CLAMP: tl.constexpr, C_EMIN: tl.constexpr, KEEP: tl.constexpr,
    LOW: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`_block` in groups of `GROUP` exact products; scales and their exponents are per group.

    A group's value is an integer times ``2**(exponents of its scales - LOW)``.
    """
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    E = tl.maximum(_exponent_of_c(c, C_EMIN), CLAMP)
    for g in tl.static_range(L // GROUP):
        ea, eb = tl.load(exp_a + g * ROWS + rows), tl.load(exp_b + g * COLS + cols)
        E = tl.maximum(E, ea[:, None] + eb[None, :])
    down = _shift(E - tl.maximum((c & MAG) >> 23, 1) + 127, 63)
    kept = (_significand(c).to(tl.int64) << (F - 23)) >> down.to(tl.int64)
    total = tl.where(c < 0, -kept, kept)
    special = _floats(tl.where((c & MAG) < INF, 0, c))
    in_a, in_b = sig_a + rows, sig_b + cols
    for g in range(L // GROUP):
        dot = tl.zeros_like(special)
        for k in tl.static_range(GROUP):
            dot += tl.load(in_a + k * ROWS)[:, None] * tl.load(in_b + k * COLS)[None, :]
        in_a += GROUP * ROWS
        in_b += GROUP * COLS
        at_a, at_b = g * ROWS + rows, g * COLS + cols
        value = dot * tl.load(scale_a + at_a)[:, None] * tl.load(scale_b + at_b)[None, :]
        special += value
        units = tl.where(tl.abs(value) < float("inf"), value * float(1 << LOW), 0.0).to(tl.int32)
        exponent = tl.load(exp_a + at_a)[:, None] + tl.load(exp_b + at_b)[None, :]
        kept = (tl.abs(units).to(tl.int64) << (F - LOW)) >> _shift(E - exponent, 63).to(tl.int64)
        total += tl.where(units < 0, -kept, kept)
    mag = tl.abs(total)
    # The leading 24 to 32 bits of a magnitude below 2**56, and how many were cut off.
    cut = tl.where(
        mag < (1 << 32), 0, tl.where(mag < (1 << 40), 8, tl.where(mag < (1 << 48), 16, 24))
    )
    y = _truncated((mag >> cut.to(tl.int64)).to(tl.uint32), E - F + cut, KEEP)
    y = tl.where(y == 0, 0, y | ((total < 0).to(tl.int32) << 31))
    return _or_special(_bits(special), y)


# Matrices ------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["panels_a", "panels_b", "blocks", "late"])
def gemm(
    sig_a, scale_a, exp_a, sig_b, scale_b, exp_b, d, factor_a, factor_b, index_a, index_b,
    panels_a, panels_b, blocks, late,
    L: tl.constexpr, F: tl.constexpr, CLAMP: tl.constexpr, C_EMIN: tl.constexpr, KEEP: tl.constexpr,
    HALF: tl.constexpr, WIDE: tl.constexpr, SPECIAL: tl.constexpr, TWO_SUMS: tl.constexpr,
    LOW: tl.constexpr, GROUP: tl.constexpr, LATE: tl.constexpr, FACTORS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One tile of D; `d` [matrix, panel, panel, ROWS, COLS] float32 holds C on entry.

    `late` blocks at a time start from +0 and are added to D when they are done; without LATE that
    is all of them, and they start from C. FACTORS are [matrix, panel, period, ROWS or COLS].
    """
    program = tl.program_id(0).to(tl.int64)
    matrix = program // panels_b // panels_a
    row, col = program // panels_b % panels_a, program % panels_b
    panel_a = tl.load(index_a + matrix) * panels_a + row
    panel_b = tl.load(index_b + matrix) * panels_b + col
    place = (
        d
        + program * (ROWS * COLS)
        + (tl.arange(0, ROWS) * COLS)[:, None]
        + tl.arange(0, COLS)[None, :]
    )
    total = tl.load(place)
    first_a, first_b = panel_a * blocks, panel_b * blocks
    GROUPS: tl.constexpr = L // GROUP
    periods = tl.cdiv(blocks, late)
    for period in range(periods):
        c = _bits(tl.zeros_like(total) if LATE else total)
        for block in range(period * late, tl.minimum(blocks, (period + 1) * late)):
            at_a, at_b = (first_a + block) * (L * ROWS), (first_b + block) * (L * COLS)
            if GROUP > 1:
                group_a, group_b = (
                    (first_a + block) * (GROUPS * ROWS), (first_b + block) * (GROUPS * COLS)
                )  # fmt: skip
                c = _group_block(
                    c, sig_a + at_a, scale_a + group_a, exp_a + group_a,
                    sig_b + at_b, scale_b + group_b, exp_b + group_b,
                    L, F, CLAMP, C_EMIN, KEEP, LOW, GROUP, ROWS, COLS,
                )  # fmt: skip
            else:
                c = _block(
                    c, sig_a + at_a, exp_a + at_a, sig_b + at_b, exp_b + at_b, L, F, CLAMP, C_EMIN,
                    KEEP, HALF, WIDE, SPECIAL, TWO_SUMS, ROWS, COLS, UNROLL,
                )  # fmt: skip
        partial = _floats(c)
        if FACTORS:
            left = tl.load(factor_a + (panel_a * periods + period) * ROWS + tl.arange(0, ROWS))
            right = tl.load(factor_b + (panel_b * periods + period) * COLS + tl.arange(0, COLS))
            total = _fused(left[:, None] * right[None, :], partial, total)
        elif LATE:
            total += partial
        else:
            total = partial
        if LATE and HALF:
            # float32 holds the sum of two float16 closely enough to round again: 24 >= 2*11 + 2.
            total = total.to(tl.float16).to(tl.float32)
    tl.store(place, total)


@triton.jit(do_not_specialize=["panels_a", "panels_b", "depth"])
def reference(
    a, b, d, index_a, index_b, panels_a, panels_b, depth,
    FUSED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """D += A @ B in float32 and in order of k, each product and sum rounded, or both at once."""
    program = tl.program_id(0).to(tl.int64)
    matrix = program // panels_b // panels_a
    row, col = program // panels_b % panels_a, program % panels_b
    a += (tl.load(index_a + matrix) * panels_a + row) * depth * ROWS
    b += (tl.load(index_b + matrix) * panels_b + col) * depth * COLS
    place = (
        d
        + program * (ROWS * COLS)
        + (tl.arange(0, ROWS) * COLS)[:, None]
        + tl.arange(0, COLS)[None, :]
    )
    total = tl.load(place)
    for _ in range(depth):
        x = tl.load(a + tl.arange(0, ROWS))[:, None]
        y = tl.load(b + tl.arange(0, COLS))[None, :]
        if FUSED:
            total = _fused(x, y, total)
        else:
            total += x * y
        a += ROWS
        b += COLS
    tl.store(place, total)
