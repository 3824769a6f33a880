"""Scalar numba loops for sources that float32 cannot hold: float64 and 32/64-bit integers.

A value is ``sig * 2**exp`` with a 64-bit significand, so every input is exact. The recipe is that
of the vector body (`fpemu.backends.kernels`), on 64 bits.

Sources arrive as int64 arrays holding float64 bits, int64 or uint64 bits; `form` says which.
Values leave as float64, which holds every format's values exactly.
"""

from __future__ import annotations

import numpy as np

from fpemu.backends.jit import jit
from fpemu.backends.loops import fill_words

FLOAT64, INT64, UINT64 = range(3)
NUMBER, INFINITE, NAN = range(3)

_U0, _U1 = np.uint64(0), np.uint64(1)


@jit
def split(bits, form):
    """(kind, negative, significand, exponent) of one source element."""
    if form == FLOAT64:
        mag = np.uint64(bits) & np.uint64(0x7FFFFFFFFFFFFFFF)
        field = np.int64(mag >> np.uint64(52))
        man = mag & np.uint64((1 << 52) - 1)
        if field == 0x7FF:
            return (NAN if man else INFINITE), bits < 0, _U0, 0
        if field:
            man |= np.uint64(1 << 52)
        return NUMBER, bits < 0, man, max(field, 1) - 1075
    if form == INT64 and bits < 0:
        return NUMBER, True, _U0 - np.uint64(bits), 0
    return NUMBER, False, np.uint64(bits), 0


@jit
def bit_length(sig):
    """Number of bits of a 64-bit significand (0 for 0)."""
    length = 0
    for step in (32, 16, 8, 4, 2, 1):
        if sig >> np.uint64(length + step - 1) != _U0:
            length += step
    return length + np.int64(sig >> np.uint64(length) != _U0) if length < 64 else 64


@jit
def magnitude(negative, sig, exp, p, stochastic, word):
    """Magnitude of ``sig * 2**exp`` in the format of `p`, exponent unbounded above."""
    man_bits, emin, offset = p[0], p[1] - 127, p[3]
    if sig == _U0:
        return max(0, offset) - offset
    top = exp + bit_length(sig) - 1
    above = max(top - emin, 0)
    # The last kept bit weighs 2**(max(top, emin) - man_bits).
    discard = max(top, emin) - man_bits - exp
    if discard <= 0:
        kept = np.int64(sig << np.uint64(-discard))
    else:
        d = np.uint64(min(discard, 63))
        rest = sig & ((_U1 << d) - _U1) if discard < 64 else sig
        kept = np.int64(sig >> d) if discard < 64 else 0
        if stochastic:
            if discard <= 32:
                fraction = rest << np.uint64(32 - discard)
            else:
                fraction = rest >> np.uint64(min(discard - 32, 63)) if discard < 96 else _U0
            mask = np.uint64(np.uint32(p[20]))
            carry = (fraction & mask) + (np.uint64(word) & mask)
            kept += np.int64(carry >> np.uint64(32))
        else:
            odd = kept & 1
            direction = p[14] if negative else p[13]
            half = _U1 << np.uint64(discard - 1) if discard <= 64 else _U0
            if discard > 64:
                over_half, tie = False, False
            else:
                over_half, tie = rest > half, rest == half
            up = False
            if p[10]:
                up = over_half or (tie and (not p[11] or (p[12] and odd)))
            if direction and rest != _U0 and (p[15] or not odd):
                up = True
            kept += np.int64(up)
    mag = kept + (np.int64(above) << man_bits)
    return max(mag, offset) - offset


@jit
def code_of(kind, negative, sig, exp, p, stochastic, word):
    """Code of one element; `p` is `kernels.bias_params` for codes."""
    if kind == NAN:
        return p[8]
    if p[9] and negative and (kind == INFINITE or sig != _U0):
        return p[8]
    if kind == INFINITE:
        return p[7] if negative else p[6]
    mag = magnitude(negative, sig, exp, p, stochastic, word)
    if mag > p[2]:
        return p[5] if negative else p[4]
    if negative:
        if p[17]:
            return -mag & p[17]
        if mag or p[18]:
            return mag | p[16]
    return mag


@jit
def cast_strips_wide(
    src, form, codes, table, values, scales, first, last, rows, cols, tall, wide, p, scaled,
    threshold, emax, rng,
):  # fmt: skip
    """Strips ``first .. last``: codes into `codes`, values into `values`, those that are not empty.

    `table` has the float64 value of every code. `scaled`: MX scales by `threshold` (52 bits) and
    `emax`, else none. `rng` as in `loops.cast_strips`.
    """
    strips, blocks = (rows + tall - 1) // tall, (cols + wide - 1) // wide
    stochastic = rng is not None
    drawn = np.empty(0 if rng is None else wide + 64, np.uint32)
    for s in range(first, last):
        row = s // strips * rows + s % strips * tall
        height = min(tall, rows - s % strips * tall)
        for k in range(blocks):
            start, end = k * wide, min((k + 1) * wide, cols)
            shift, dead, factor = 0, False, 1.0
            if scaled:
                best_exp, best_man = -(1 << 20), np.uint64(0)
                for r in range(height):
                    for c in range(start, end):
                        kind, negative, sig, exp = split(src[(row + r) * cols + c], form)
                        if kind != NUMBER:
                            dead = True
                        elif sig != _U0:
                            n = bit_length(sig)
                            # 52 mantissa bits below the leading one; a lost bit stays as sticky.
                            if n <= 53:
                                man = (sig << np.uint64(53 - n)) & np.uint64((1 << 52) - 1)
                            else:
                                lost = sig & ((_U1 << np.uint64(n - 53)) - _U1)
                                man = (sig >> np.uint64(n - 53)) & np.uint64((1 << 52) - 1)
                                man |= np.uint64(lost != _U0)
                            e = exp + n - 1
                            if e > best_exp:
                                best_exp, best_man = e, man
                            elif e == best_exp:
                                best_man = max(best_man, man)
                byte = best_exp - emax + np.int64(best_man > np.uint64(threshold)) + 127
                byte = min(max(byte, 0), 254)
                byte = 255 if dead else byte
                shift = byte - 127
                if len(scales):
                    scales[s * blocks + k] = byte
                factor = np.nan if dead else 1.0
            for r in range(height):
                at = (row + r) * cols + start
                words, wi = drawn, 0
                if rng is not None:
                    words, wi = rng[0], at
                    if len(words) == 0:
                        words = drawn
                        wi = fill_words(drawn, rng[1] + at, end - start, rng[2], rng[3])
                for c in range(end - start):
                    code = 0
                    if not dead:
                        word = words[wi + c] if stochastic else np.uint32(0)
                        kind, negative, sig, exp = split(src[at + c], form)
                        code = code_of(kind, negative, sig, exp - shift, p, stochastic, word)
                    if len(codes):
                        codes[at + c] = code
                    if len(values):
                        value = table[code] * factor
                        if scaled and not dead:
                            value *= power_of_two(shift)
                        values[at + c] = value


@jit
def power_of_two(exponent):
    """2.0**exponent as float64, for -1022 .. 1023."""
    power = 1.0
    step = 2.0 if exponent >= 0 else 0.5
    n = abs(exponent)
    while n:
        if n & 1:
            power *= step
        step *= step
        n >>= 1
    return power
