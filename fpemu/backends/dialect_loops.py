"""numba loops of the dialects, on runs of sixteen float32 elements.

A block is one run or several; elements lie in flat arrays of whole blocks, with one operand and one
factor each. Every function releases the GIL and touches only what it is given.
"""

from __future__ import annotations

import numpy as np

from fpemu.backends.dialect_kernels import (
    error16,
    flush16,
    microxcaling16,
    minus_zero16,
    narrow16,
    over16,
    quiet16,
    round16,
    sums16,
    times16,
    widen16,
)
from fpemu.backends.jit import jit
from fpemu.backends.kernels import bits_of_f32, f32_of_bits, fold16
from fpemu.backends.loops import cast_flat, cast_flat_sr, largest

_MAG, _INF, _SIGN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x80000000)
_SEVEN = np.float32(7)  # from here on E2M1 without a largest value goes to 8
ZERO_KEEP, ZERO_PLUS, ZERO_MINUS = range(3)
MAE, MSE, MAX = range(3)
MULTIPLY, DIVIDE, DIVIDE_TIMES_3 = range(3)
RUN = 16
CHUNK = 4096  # elements between one step and the next: 16 KiB of float32


@jit
def _bfloat16(x):
    bits = bits_of_f32(x)
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd)
    return f32_of_bits(np.uint32(rounded & np.uint32(0xFFFF0000)))


@jit
def widen_bfloat16(src, out):
    """float32 values of bfloat16 bits (uint16)."""
    whole = len(src) // RUN * RUN
    for i in range(0, whole, RUN):
        widen16(src, i, out, i)
    for i in range(whole, len(src)):
        out[i] = f32_of_bits(np.uint32(np.uint32(src[i]) << np.uint32(16)))


@jit
def round_bfloat16(src, out):
    """float32 values on bfloat16's grid, to nearest even; NaN stays."""
    whole = len(src) // RUN * RUN
    for i in range(0, whole, RUN):
        round16(src, i, out, i)
    for i in range(whole, len(src)):
        x = src[i]
        out[i] = _bfloat16(x) if x == x else x


@jit
def amax_with_nan(src):
    """Largest ``|x|`` as float32 bits; NaN is larger than infinity."""
    top = np.zeros(64, np.uint32)
    whole = len(src) // 64 * 64
    for i in range(0, whole, 64):
        for k in range(4):
            fold16(src, i + 16 * k, top, 16 * k, None, None)
    for i in range(whole, len(src), 16):
        fold16(src, i, top, 0, None, min(len(src) - i, 16))
    return largest(top)


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
def scaled(src, operand, size, how, zero, out):
    """What is cast, for blocks of `size` elements."""
    keep = np.float32(-0.0)
    add = np.float32(0) if zero == ZERO_PLUS else keep
    for k in range(len(operand)):
        by = operand[k]
        for i in range(k * size, (k + 1) * size, RUN):
            if how == MULTIPLY:
                times16(src, i, by, add, out, i)
            else:
                over16(src, i, by, add, out, i)
                if how == DIVIDE_TIMES_3:
                    times16(out, i, np.float32(3), keep, out, i)
            if zero == ZERO_MINUS:
                minus_zero16(out, i)


@jit
def replace_nan(src, operand, size, p, value, made, finite, signed, x_first, inf):
    """NaN in `p` becomes `value`, or `made` where the operation made it (`finite`: else it stays
    NaN); its sign survives where `signed`.

    Infinity becomes `inf`. Of two NaNs the operand's survives, or that of x where `x_first`; one made by the operation is
    negative.
    """
    for k in range(len(operand)):
        for i in range(k * size, (k + 1) * size):
            if p[i] == p[i]:
                if abs(p[i]) == np.float32(np.inf):
                    p[i] = np.float32(inf) if p[i] > 0 else np.float32(-inf)
                continue
            x, by = src[i], operand[k]
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
    low = a < np.float32(2)
    mid = a < np.float32(4)
    step = np.float32(0.5) if low else (np.float32(1) if mid else np.float32(2))
    per = np.float32(2) if low else (np.float32(1) if mid else np.float32(0.5))
    return np.float32(np.float32(np.rint(np.float32(a * per))) * step)


@jit
def total_error(d, measure, pairs):
    """Sum or largest of a block's errors; see `sums16`, which adds those of sixteen blocks."""
    total = np.float32(0)
    if measure == MAX:
        for i in range(len(d)):
            total = d[i] if not (d[i] <= total) and total == total else total
    elif pairs:
        half = len(d) // 2
        for i in range(half):
            total = np.float32(total + np.float32(d[i] + d[i + half]))
    else:
        for i in range(len(d)):
            total = np.float32(total + d[i])
    return total


@jit
def choose_four(
    src, runs, six, four, g, s, top, measure, largest, squared, fast, clamp, pairs
):  # fmt: skip
    """Where the error with a block's largest value at 4 is smaller, `six` takes the scales of
    `four`: tuples of arrays (stored, multiplier, scale, decode factor) with an entry per block.

    `largest`, `squared`, `fast`, `clamp` and `pairs` are None or a number, as `error16` and
    `sums16` want them. `pairs`: torch adds sixteen floats so on a CPU.
    """
    size, count = runs * RUN, len(six[0])
    d6, d4 = np.empty(RUN * size, np.float32), np.empty(RUN * size, np.float32)
    e6, e4 = np.empty(RUN, np.float32), np.empty(RUN, np.float32)
    for first in range(0, count, RUN):
        some = min(RUN, count - first)
        for k in range(first, first + some):
            for r in range(runs):
                at, to = (k * runs + r) * RUN, ((k - first) * runs + r) * RUN
                error16(src, at, six[1][k], six[2][k], g, s, top, squared, fast, clamp, d6, to)
                error16(src, at, four[1][k], four[2][k], g, s, top, squared, fast, clamp, d4, to)
        if runs == 1:
            sums16(d6, 0, largest, pairs, e6, 0)
            sums16(d4, 0, largest, pairs, e4, 0)
        else:
            for k in range(some):
                e6[k] = total_error(d6[k * size : (k + 1) * size], measure, pairs is not None)
                e4[k] = total_error(d4[k * size : (k + 1) * size], measure, pairs is not None)
        for k in range(some):
            if e4[k] < e6[k]:
                six[0][first + k] = four[0][first + k]
                six[1][first + k] = four[1][first + k]
                six[2][first + k] = four[2][first + k]
                six[3][first + k] = four[3][first + k]


@jit
def block_error(
    src, operand, scale, g, s, top, measure, largest, squared, fast, clamp, pairs
):  # fmt: skip
    """The error of one block under one candidate, as `choose_four` works it out."""
    d = np.empty(len(src), np.float32)
    for i in range(0, len(src), RUN):
        error16(src, i, operand, scale, g, s, top, squared, fast, clamp, d, i)
    return total_error(d, measure, pairs is not None)


@jit
def _packed_code(p, dead):
    """The bits that fouroversix packs for one element, before the byte is cut to nibbles."""
    bits = np.uint32(bits_of_f32(p))
    mag = np.uint32(bits & _MAG)
    if dead:
        return np.uint32(0)
    if mag >= _INF:
        return np.uint32(0x0B)
    v = e2m1_unbounded(f32_of_bits(mag))
    sign = np.uint32(8) if bits & _SIGN else np.uint32(0)
    if v < 1:
        return np.uint32(np.uint32(v * np.float32(2)) | sign)
    one = np.uint32(1)
    rounded = np.uint32(bits_of_f32(_bfloat16(v)) >> np.uint32(16))
    exponent = np.uint32(np.uint32(rounded >> np.uint32(7)) - np.uint32(126))
    mantissa = np.uint32((rounded >> np.uint32(6)) & one)
    return np.uint32(np.uint32(np.uint32(exponent << one) | mantissa | sign) & np.uint32(0xFF))


@jit
def _e2m1_value(code):
    small = np.uint32(code & np.uint32(7))
    if small < 2:
        value = np.float32(np.float32(small) * np.float32(0.5))
    else:  # exponent and one mantissa bit
        value = f32_of_bits(np.uint32(np.uint32(small + np.uint32(252)) << np.uint32(22)))
    return np.float32(-value) if code & np.uint32(8) else value


@jit
def wrap(p, operand, size):
    """E2M1 values of what fouroversix packs: no clamp, bfloat16's exponent cut to one byte.

    A byte's high nibble (the odd element) also takes the bits that overflow from the even one.
    Bytes whose elements are both below 7 stay. Blocks whose operand is -Inf are zero throughout.
    """
    for k in range(len(operand)):
        dead = operand[k] == np.float32(-np.inf)
        for i in range(k * size, (k + 1) * size, 2):
            if abs(p[i]) < _SEVEN and abs(p[i + 1]) < _SEVEN:
                continue
            low, high = _packed_code(p[i], dead), _packed_code(p[i + 1], dead)
            high = np.uint32(high | np.uint32(low >> np.uint32(4)))
            p[i], p[i + 1] = _e2m1_value(low), _e2m1_value(high)


@jit
def microxcaling(src, operand, size, rule, reach, nearest, even, narrow, out):
    """Elements as microxcaling rounds them: a private exponent by float log2, then floor.

    `rule`: (fraction bits of the scaled integer, smallest exponent, bits of the largest value).
    `reach`: how far below 2^k a logarithm rounds up to k, for k = 1, -1, -2, -4, -8, -16 (those
    between are alike), or None for an integer format. `nearest`: half is added before the floor;
    `even`: half an odd number is taken back (None or a number each); `narrow`: sums are rounded
    to bfloat16 (1) or float16 ((1,)). `out` receives values on the element's grid, 0 where the block is NaN.
    """
    for k in range(len(operand)):
        for i in range(k * size, (k + 1) * size, RUN):
            microxcaling16(src, i, operand[k], rule, reach, nearest, even, narrow, out, i)


@jit
def any_nan(amax):
    """Whether any of these float32 bits (without sign) is NaN."""
    return largest(amax) > _INF


@jit
def needs_care(amax, operand, how, wraps):
    """Whether an element of these blocks may become NaN or, where `wraps`, wrap around.

    The largest result of a block is that of its amax, since rounding is monotone.
    """
    care = False
    for k in range(len(amax)):
        by, a = operand[k], f32_of_bits(amax[k])
        p = np.float32(a * by) if how == MULTIPLY else np.float32(a / by)
        # The smallest elements, zeros, are NaN where the operand is infinite (or 0 and divides).
        zero = np.float32(np.float32(0) * by) if how == MULTIPLY else np.float32(np.float32(0) / by)
        care = care | (not p < np.float32(np.inf)) | (zero != 0) | (wraps & (p >= _SEVEN))
    return care


@jit
def decoded(values, factor, size, g, times_g, divisor, divides, plus_zero):
    """``values`` times their block's factor, times g, over `divisor`, in place; NaN is canonical.

    `plus_zero`: -0 becomes +0 first.
    """
    keep = np.float32(-0.0)
    for k in range(len(factor)):
        for i in range(k * size, (k + 1) * size, RUN):
            if plus_zero:
                times16(values, i, np.float32(1), np.float32(0), values, i)
            times16(values, i, factor[k], keep, values, i)
            if times_g:
                times16(values, i, g, keep, values, i)
            if divides:
                over16(values, i, divisor, keep, values, i)
            quiet16(values, i)


@jit
def mx_lookup(amax, table, stored, multiplier, factor):
    """Scales from float32 amax bits by the table of `numba_dialects.mx_table`."""
    for k in range(len(amax)):
        bits = amax[k]
        e = np.int64(bits >> np.uint32(23)) if bits else np.int64(256)
        row = 2 * e + np.int64((bits & np.uint32(0x7FFFFF)) > table[0, 2 * e])
        stored[k] = table[1, row]
        multiplier[k] = f32_of_bits(table[2, row])
        factor[k] = f32_of_bits(table[3, row])


@jit
def no_negative_zero(out, minus):
    """-0 becomes +0, in values (`minus` is a float) or codes, in place."""
    for i in range(len(out)):
        out[i] = 0 if out[i] == minus else out[i]


@jit
def narrow_bfloat16(src, out):
    """bfloat16 bits (uint16) of float32, to nearest even, NaN canonical."""
    whole = len(src) // RUN * RUN
    for i in range(0, whole, RUN):
        narrow16(src, i, out, i)
    for i in range(whole, len(src)):
        x = src[i]
        bits = np.uint32(bits_of_f32(_bfloat16(x)) >> np.uint32(16))
        out[i] = np.uint16(bits) if x == x else np.uint16(0x7FC0)


@jit
def cast_blocks(
    src, operand, size, out, params, safe_params, careful, narrow, how, zero, wraps, nan, own, words,
    nan_code, bit, flush, minus, factor, order,
):  # fmt: skip
    """Scale and cast blocks of `size` elements: codes, or values of the element format.

    `careful`: what is cast may be NaN, or wrap around where `wraps`. `safe_params` serve where a NaN
    is left, and for `words`, the random ones or None. `nan` is (value, made, finite, signed, x
    first, inf). `own`: None, or the last arguments of `microxcaling`. `bit` is the sign bit of a format
    that has a NaN, else 0. `factor` and `order` (None, or the last arguments of `decoded`) turn
    element values into decoded ones.
    """
    step = max(CHUNK // size, 1)  # blocks between one step and the next
    scratch = np.empty(step * size, np.float32)
    for first in range(0, len(operand), step):
        last = min(first + step, len(operand))
        by, x = operand[first:last], src[first * size : last * size]
        p, target = scratch[: len(x)], out[first * size : last * size]
        left = False
        if narrow:
            for i in range(0, len(x), RUN):
                round16(x, i, p, i)
            x = p
        if own is not None:
            microxcaling(x, by, size, own[0], own[1], own[2], own[3], own[4], p)
        else:
            scaled(x, by, size, how, zero, p)
            if flush is not None:
                for i in range(0, len(p), RUN):
                    flush16(p, i, flush)
            if careful:
                if wraps:
                    wrap(p, by, size)
                else:
                    replace_nan(x, by, size, p, nan[0], nan[1], nan[2], nan[3], nan[4], nan[5])
                    left = not nan[2]
        if words is not None:
            some = words[first * size : last * size]
            cast_flat_sr(p, target, 0, len(p), safe_params, None, None, some, 0, 0, 0)
        elif left:
            cast_flat(p, target, 0, len(p), safe_params, None, None, None)
        else:
            cast_flat(p, target, 0, len(p), params, None, None, None)
        if minus is not None:
            no_negative_zero(target, minus)
        if left and bit:
            negative_nan_codes(p, target, nan_code, bit)
        if order is not None:
            by = factor[first:last]
            decoded(target, by, size, order[0], order[1], order[2], order[3], order[4])
