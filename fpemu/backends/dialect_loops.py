"""numba loops of the dialects, on blocks of float32 that lie one after the other.

Blocks come as flat arrays of whole blocks of `wide` elements, small enough to stay in the cache.
Every function releases the GIL and touches only what it is given.
"""

from __future__ import annotations

import numpy as np

from fpemu.backends.jit import jit
from fpemu.backends.kernels import bits_of_f32, f32_of_bits

_MAG, _INF, _SIGN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x80000000)
ZERO_KEEP, ZERO_PLUS, ZERO_MINUS = range(3)
MAE, MSE, MAX = range(3)
NEAREST, EVEN, FLOOR = range(3)


@jit
def _bfloat16(x):
    bits = bits_of_f32(x)
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd)
    return f32_of_bits(np.uint32(rounded & np.uint32(0xFFFF0000)))


@jit
def widen_bfloat16(src, out):
    """float32 values of bfloat16 bits (uint16)."""
    for i in range(len(src)):
        out[i] = f32_of_bits(np.uint32(np.uint32(src[i]) << np.uint32(16)))


@jit
def round_bfloat16(src, out):
    """float32 values on bfloat16's grid, to nearest even; NaN stays."""
    for i in range(len(src)):
        x = src[i]
        out[i] = _bfloat16(x) if x == x else x


@jit
def amax_with_nan(src):
    """Largest ``|x|`` as float32 bits; NaN is larger than infinity."""
    best = np.uint32(0)
    for i in range(len(src)):
        best = max(best, np.uint32(bits_of_f32(src[i]) & _MAG))
    return best


@jit
def scale_e4m3(p, code, value):
    """E4M3 codes (RNE, saturating, NaN 0x7F) of non-negative float32 and their values."""
    magic = np.float32(2.0**14)  # steps of 2**-9 below the first normal 2**-6
    for k in range(len(p)):
        bits = np.int32(bits_of_f32(p[k]))
        normal = np.int32(
            np.int32(bits + np.int32(0x7FFFF) + np.int32(np.int32(bits >> 20) & np.int32(1))) >> 20
        ) - np.int32(120 << 3)
        low = np.float32(p[k] + magic)
        small = np.int32(bits_of_f32(low)) - np.int32(0x46800000)
        byte = np.int32(small if bits < 0x3C800000 else normal)
        byte = np.int32(min(byte, np.int32(126)))
        step = np.float32(byte) * np.float32(2.0**-9)
        large = f32_of_bits(np.uint32((byte + np.int32(120 << 3)) << 20))
        nan = p[k] != p[k]
        code[k] = np.int32(127) if nan else byte
        value[k] = np.float32(np.nan) if nan else (step if byte < 8 else large)


@jit
def scaled(src, operand, wide, out, divide, times3, zero):
    """``out = x * operand`` or ``x / operand`` per block; whether any result is NaN."""
    nan = np.uint32(0)
    for k in range(len(operand)):
        by = operand[k]
        for i in range(k * wide, (k + 1) * wide):
            p = np.float32(src[i] / by) if divide else np.float32(src[i] * by)
            if times3:
                p = np.float32(p * np.float32(3))
            if zero == ZERO_PLUS:
                p = np.float32(p + np.float32(0))  # -0 + 0 is +0, everything else stays
            elif zero == ZERO_MINUS:
                p = np.float32(-0.0) if p == 0 else p
            out[i] = p
            nan = max(nan, np.uint32(bits_of_f32(p) & _MAG))
    return nan > _INF


@jit
def replace_nan(src, operand, wide, p, value, made, finite, signed, x_first):
    """NaN in `p` becomes `value`, or `made` where the operation made it (`finite`: else it stays
    NaN); its sign survives where `signed`.

    Of two NaNs the operand's survives, or that of x where `x_first`; one made by the operation is
    negative.
    """
    for i in range(len(p)):
        if p[i] == p[i]:
            continue
        x, by = src[i], operand[i // wide]
        sign, new = _SIGN, np.float32(made)
        if by != by and not (x_first and x != x):
            sign, new = np.uint32(bits_of_f32(by) & _SIGN), np.float32(value)
        elif x != x:
            sign, new = np.uint32(bits_of_f32(x) & _SIGN), np.float32(value)
        body = np.uint32(bits_of_f32(new) & _MAG) if finite else np.uint32(0x7FC00000)
        if not signed:
            sign = np.uint32(bits_of_f32(new) & _SIGN)
        p[i] = f32_of_bits(np.uint32(body | sign))


@jit
def negative_nan_codes(p, codes, nan, bit):
    """Codes of negative NaN: the format's NaN code with the sign bit."""
    for i in range(len(p)):
        if p[i] != p[i] and bits_of_f32(p[i]) & _SIGN:
            codes[i] = nan | bit


@jit
def e2m1_unbounded(a):
    """Non-negative `a` rounded to E2M1's steps, to nearest even, as if it had no largest value."""
    step = np.float32(0.5) if a < 2 else (np.float32(1) if a < 4 else np.float32(2))
    return np.float32(np.float32(np.rint(np.float32(a / step))) * step)


@jit
def candidate_error(src, at, wide, operand, scale, g, s, top, measure, fast, clamp, d):
    """What a candidate scale costs in one block of ``src[at:]``; `d` is scratch for `wide` values.

    `clamp`: TransformerEngine's order, errors added one after the other. Without: fouroversix on
    torch, which adds the second half of the block to the first, then one after the other.
    """
    six = np.float32(6)
    for i in range(wide):
        x = src[at + i]
        p = np.float32(x * operand)
        a = np.float32(abs(p))
        if clamp:
            a = six if a > six else a
        q = e2m1_unbounded(a)
        q = np.float32(-q) if p < 0 else q
        if clamp and p != p:
            q = np.float32(0)
        elif a == np.float32(np.inf):
            q = np.float32(np.nan)
        v = np.float32(q * scale)
        if fast:
            e = np.float32(v - np.float32(x * s))
        else:
            e = np.float32(np.float32(np.float32(v * g) / top) - x)
        d[i] = np.float32(e * e) if measure == MSE else np.float32(abs(e))
    total = np.float32(0)
    if measure == MAX:
        for i in range(wide):
            total = d[i] if not (d[i] <= total) and total == total else total
    elif clamp:
        for i in range(wide):
            total = np.float32(total + d[i])
    else:
        for i in range(wide // 2):
            total = np.float32(total + np.float32(d[i] + d[i + wide // 2]))
    return total


@jit
def four_is_better(src, wide, op6, op4, s6, s4, g, s, top, measure, fast, clamp, pick):
    """Per block: is the error with its largest value mapped to 4 smaller than with 6?"""
    d = np.empty(wide, np.float32)
    for k in range(len(pick)):
        at = k * wide
        e6 = candidate_error(src, at, wide, op6[k], s6[k], g, s, top, measure, fast, clamp, d)
        e4 = candidate_error(src, at, wide, op4[k], s4[k], g, s, top, measure, fast, clamp, d)
        pick[k] = e4 < e6


@jit
def wrap(p, operand, wide):
    """E2M1 values of what fouroversix packs: no clamp, bfloat16's exponent cut to one byte.

    A byte's high nibble (the odd element) also takes the bits that overflow from the even one.
    Blocks whose operand is -Inf are zero throughout.
    """
    spill = np.uint32(0)
    for i in range(len(p)):
        x = p[i]
        a = np.float32(abs(x))
        if operand[i // wide] == np.float32(-np.inf):
            raw = np.uint32(0)
        elif not a <= np.float32(3.4028234663852886e38):
            raw = np.uint32(0x0B)
        else:
            v = e2m1_unbounded(a)
            bits = bits_of_f32(v)
            bits = np.uint32(
                np.uint32(
                    bits + np.uint32(0x7FFF) + np.uint32((bits >> np.uint32(16)) & np.uint32(1))
                )
                >> np.uint32(16)
            )
            exp, top = (
                np.uint32(bits >> np.uint32(7)),
                np.uint32((bits >> np.uint32(6)) & np.uint32(1)),
            )
            if v == 0:
                raw = np.uint32(0)
            elif v == np.float32(0.5):
                raw = np.uint32(1)
            else:
                raw = np.uint32(((exp - np.uint32(126)) << np.uint32(1)) | top)
            sign = np.uint32(8) if bits_of_f32(x) & _SIGN else np.uint32(0)
            raw = np.uint32((raw | sign) & np.uint32(0xFF))
        odd = (i % wide) & 1
        code = np.uint32((raw | spill) & np.uint32(15)) if odd else np.uint32(raw & np.uint32(15))
        spill = np.uint32(0) if odd else np.uint32(raw >> np.uint32(4))
        mag = code & np.uint32(7)
        # E2M1: 0, 0.5, then exponent and one mantissa bit.
        if mag < 2:
            value = np.float32(mag) * np.float32(0.5)
        else:
            value = f32_of_bits(np.uint32((mag + np.uint32(252)) << np.uint32(22)))
        p[i] = np.float32(-value) if code & np.uint32(8) else value


@jit
def microxcaling(src, operand, wide, out, man, min_exp, largest, rounding, narrow, below):
    """Elements as microxcaling rounds them: a private exponent by float log2, then floor.

    `man` is the number of fraction bits of the scaled integer, `min_exp` its smallest exponent
    (equal for all elements of an integer format: then `below` has length 0). `narrow`: the sum
    before the floor is rounded to bfloat16. `out` receives values on the element's grid, 0 where
    the block is NaN.
    """
    half = np.float32(0.5)
    for k in range(len(operand)):
        by = operand[k]
        for i in range(k * wide, (k + 1) * wide):
            y = np.float32(src[i] / by)
            bits = np.uint32(bits_of_f32(y) & _MAG)
            a = f32_of_bits(bits)
            exponent = np.int32(np.int32(bits >> np.uint32(23)) - np.int32(127))
            if len(below):
                rest = np.int32(0x800000) - np.int32(bits & np.uint32(0x7FFFFF))
                at = min(max(exponent + np.int32(151), np.int32(0)), np.int32(299))
                exponent = np.int32(exponent + np.int32(rest <= below[at]))
                exponent = max(exponent, np.int32(min_exp))
            else:
                exponent = np.int32(0)
            up = f32_of_bits(np.uint32(np.uint32(man - exponent + np.int32(127)) << np.uint32(23)))
            down = f32_of_bits(
                np.uint32(np.uint32(exponent - man + np.int32(127)) << np.uint32(23))
            )
            v = np.float32(a * up)
            if rounding == FLOOR:
                r = np.float32(np.floor(v))
            else:
                near = np.float32(v + half)
                r = np.float32(np.floor(_bfloat16(near) if narrow else near))
                if rounding == EVEN:
                    rest2 = np.float32(v - half)
                    rest2 = _bfloat16(rest2) if narrow else rest2
                    # 0.5, 2.5, 4.5, ...: the floor of half has no remainder either.
                    pair = np.float32(rest2 * half)
                    if rest2 >= 0 and np.float32(np.floor(pair)) == pair:
                        r = np.float32(r - np.float32(1))
            p = np.float32(r * down)
            p = largest if p > largest else p
            p = p if by == by else np.float32(0)
            out[i] = np.float32(-p) if y < 0 else p


@jit
def decoded(values, factor, wide, g, has_amax, divisor, has_divisor):
    """``values`` times their block's factor, times g, over `divisor`, in place, in float32."""
    for k in range(len(factor)):
        by = factor[k]
        for i in range(k * wide, (k + 1) * wide):
            v = np.float32(values[i] * by)
            if has_amax:
                v = np.float32(v * g)
            if has_divisor:
                v = np.float32(v / divisor)
            values[i] = v
