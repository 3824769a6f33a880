"""numba loops over arrays: the frames around `cast16`.

All indices are 64-bit. Every function releases the GIL and touches only what it is given, so any
number of threads may call at once.
"""

from __future__ import annotations

import numpy as np

from fpemu.backends.jit import jit
from fpemu.backends.kernels import (
    amax16,
    amax_blocks16,
    bits_of_f32,
    cast16,
    f32_of_bits,
    fold16,
    lead64,
    philox16,
)

# Scalars of the whole tensor, a float32 array. fp8_block uses only [2]: the element's max.
TENSOR = ("S", "tensor_scale", "fl(S * fl(1/max))", "fl(1/S)")
# Scale rules that are fused; `numba_` maps names to these.
RULE_GIVEN, RULE_MX, RULE_NVFP4, RULE_FP8, RULE_FP8_POW2 = range(5)
CHUNK = 8192  # elements handled between reduce and apply: 32 KiB of float32
# While a chunk is cast, the next one is fetched: its amaxes are then read from the cache.
AHEAD = CHUNK
WORDS = CHUNK + 64  # random words of a chunk, starting at any counter

_INF = np.uint32(0x7F800000)
_ALL = np.int32(-1)


@jit
def largest(values):
    """``values.max()`` (numpy's takes numba a second to compile)."""
    best = np.uint32(0)
    for value in values:
        best = max(best, value)
    return best


@jit
def fill_words(out, index, count, seed, stream):
    """Words of `count` elements from `index` on into `out`; returns where the first one stands."""
    block = index >> 2
    for k in range(((index & 3) + count + 63) // 64):
        philox16(out, k * 64, block + k * 16, seed, stream)
    return index & 3


@jit
def cast_flat(src, dst, start, stop, params, mult, tensor, stream):
    """Elements ``start .. stop`` with one scale for all: ``mult[0]`` and ``tensor[1]``, or None.

    `stream` ``(1,)`` (float32 `dst` only) writes past the caches, whole lines at a time.
    """
    first = start
    if stream is not None:
        first = min(start + lead64(dst, start), stop)
        if start < first:
            cast16(
                src, start, dst, start, params, mult, None, None, tensor, None, (0,), None, 0,
                first - start, None, None,
            )  # fmt: skip
    whole = first + (stop - first) // 16 * 16
    for i in range(first, whole, 16):
        cast16(
            src, i, dst, i, params, mult, None, None, tensor, None, (0,), None, 0, None, stream,
            None,
        )  # fmt: skip
    if whole < stop:
        cast16(
            src, whole, dst, whole, params, mult, None, None, tensor, None, (0,), None, 0,
            stop - whole, None, None,
        )  # fmt: skip


@jit
def cast_flat_sr(src, dst, start, stop, params, mult, tensor, words, index, seed, stream):
    """As `cast_flat`, stochastic; element i uses the word of index ``index + i``.

    `words` has one word per element, or length 0: then they are drawn.
    """
    drawn = np.empty(WORDS, np.uint32)
    for base in range(start, stop, CHUNK):
        end = min(base + CHUNK, stop)
        source, at = words, base
        if len(words) == 0:
            source, at = drawn, fill_words(drawn, index + base, end - base, seed, stream)
        whole = base + (end - base) // 16 * 16
        for i in range(base, whole, 16):
            cast16(
                src, i, dst, i, params, mult, None, None, tensor, None, (0,), source,
                at + i - base, None, None, None,
            )  # fmt: skip
        if whole < end:
            cast16(
                src, whole, dst, whole, params, mult, None, None, tensor, None, (0,), source,
                at + whole - base, end - whole, None, None,
            )  # fmt: skip


@jit
def shard_words(out, cols, index, bases, seed, stream):
    """Words of a shard, row after row: row r's first element has index ``index + bases[r]``."""
    drawn = np.empty(WORDS, np.uint32)
    for r in range(len(bases)):
        for c in range(0, cols, CHUNK):
            width = min(CHUNK, cols - c)
            at = fill_words(drawn, index + np.int64(bases[r]) + c, width, seed, stream)
            for k in range(width):
                out[r * cols + c + k] = drawn[at + k]


@jit
def amax_flat(src, start, stop):
    """Largest finite-or-infinite ``|x|`` as float32 bits; NaN is skipped."""
    top = np.zeros(64, np.uint32)
    whole = start + (stop - start) // 64 * 64
    for i in range(start, whole, 64):
        for k in range(4):
            fold16(src, i + 16 * k, top, 16 * k, 1, None)
    for i in range(whole, stop, 16):
        fold16(src, i, top, 0, 1, min(stop - i, 16))
    return largest(top)


@jit
def block_amaxes(src, base, cols, wide, amax):
    """Largest ``|x|`` bits of each run of `wide` of ``src[base : base + cols]``."""
    done = 0
    if wide == 16:
        done = cols // 256 * 16
        for k in range(0, done, 16):
            amax_blocks16(src, base + k * 16, (0,), amax, k)
    elif wide == 32:
        done = cols // 512 * 16
        for k in range(0, done, 16):
            amax_blocks16(src, base + k * 32, (0, 0), amax, k)
    for k in range(done, (cols + wide - 1) // wide):
        end = min((k + 1) * wide, cols)
        best = np.uint32(0)
        for i in range(k * wide, end, 16):
            best = max(best, amax16(src, base + i, min(16, end - i)))
        amax[k] = best


@jit
def amax_without_nan(src, base, rows, stride, wide):
    """Largest ``|x|`` bits of one block, NaN skipped."""
    top = np.zeros(16, np.uint32)
    for r in range(rows):
        for i in range(0, wide, 16):
            fold16(src, base + r * stride + i, top, 0, 1, min(16, wide - i))
    return largest(top)


@jit
def strip_amaxes(src, base, rows, stride, cols, wide, skip_nan, tops, amax):
    """Block amaxes of a strip: `rows` rows of `cols` columns, blocks `wide` columns each.

    A NaN is larger than infinity here, unless `skip_nan`.
    """
    if rows == 1 and wide > 1:
        block_amaxes(src, base, cols, wide, amax)
    else:
        target = amax if wide == 1 else tops
        for i in range(cols):
            target[i] = 0
        whole = cols // 16 * 16
        for r in range(rows):
            at = base + r * stride
            for i in range(0, whole, 16):
                fold16(src, at + i, target, i, None, None)
            if whole < cols:
                fold16(src, at + whole, target, whole, None, cols - whole)
        if wide > 1:
            for k in range((cols + wide - 1) // wide):
                best = np.uint32(0)
                for i in range(k * wide, min((k + 1) * wide, cols)):
                    best = max(best, tops[i])
                amax[k] = best
    if skip_nan:
        for k in range((cols + wide - 1) // wide):
            if amax[k] > _INF:
                width = min(wide, cols - k * wide)
                amax[k] = amax_without_nan(src, base + k * wide, rows, stride, width)


@jit
def mx_scales(amax, count, threshold, emax, code, mult, shift, dec, keep):
    """The exponent rules of `fpemu.scaling` on float32 amax bits (`threshold` on 23 bits)."""
    for k in range(count):
        bits = np.int64(amax[k])
        if bits >= 0x7F800000:
            code[k], shift[k], keep[k] = 255, 0, 0
            mult[k], dec[k] = np.float32(0), np.float32(np.nan)
            continue
        if bits < 0x00800000:
            # Normalise a subnormal: its integer, exactly, is a float with the same mantissa.
            bits = np.int64(bits_of_f32(np.float32(bits))) - (149 << 23)
        exponent = (bits >> 23) + np.int64((bits & 0x7FFFFF) > threshold) - emax
        byte = min(max(exponent, 0), 254)
        byte = byte if amax[k] else 0
        code[k], shift[k], keep[k] = byte, byte - 127, -1
        # 2**-127 is subnormal: its only mantissa bit is the top one.
        up, down = (byte << 23) if byte else 0x00400000, ((254 - byte) << 23)
        mult[k] = f32_of_bits(np.uint32(down if byte < 254 else 0x00400000))
        dec[k] = f32_of_bits(np.uint32(up))


@jit
def nvfp4_scales(amax, count, per_element, inverse, code, mult, dec, keep):
    """`fpemu.scaling.nvfp4_block`: per_element = fl(S * fl(1/6)), inverse = fl(1/S)."""
    one, top = np.float32(1), np.float32(3.4028234663852886e38)
    magic = np.float32(2.0**14)  # E4M3: steps of 2**-9 below its first normal 2**-6
    for k in range(count):
        p = f32_of_bits(amax[k]) * per_element
        bits = np.int32(bits_of_f32(p))
        normal = np.int32(
            np.int32(bits + np.int32(0x7FFFF) + np.int32(np.int32(bits >> 20) & np.int32(1))) >> 20
        ) - np.int32(120 << 3)
        low = np.float32(p + magic)
        small = np.int32(bits_of_f32(low)) - np.int32(0x46800000)
        byte = np.int32(small if bits < 0x3C800000 else normal)
        byte = np.int32(min(byte, np.int32(126)))
        step = np.float32(byte) * np.float32(2.0**-9)
        value = f32_of_bits(np.uint32((byte + np.int32(120 << 3)) << 20))
        scale = step if byte < 8 else value
        e = one / np.float32(scale * inverse)
        e = e if e < top else top
        bad = amax[k] > _INF
        code[k] = np.uint8(127) if bad else np.uint8(byte)
        mult[k] = np.float32(0) if bad else e
        dec[k] = np.float32(np.nan) if bad else scale
        keep[k] = np.int32(0) if bad else _ALL


@jit
def fp8_scales(amax, count, top, pow2, code, mult, dec, keep):
    """`fpemu.scaling.fp8_block` and `fp8_block_pow2`; `code` receives the decode scale."""
    one, largest = np.float32(1), np.float32(3.4028234663852886e38)
    for k in range(count):
        a = f32_of_bits(amax[k])
        scale = top / a
        scale = scale if scale < largest else largest
        if amax[k] == 0 or amax[k] >= _INF:
            scale = one
        if pow2:
            scale = f32_of_bits(bits_of_f32(scale) & _INF)
        code[k], mult[k], dec[k], keep[k] = one / scale, scale, one / scale, -1


@jit
def cast_row(
    src, base, dst, to, cols, wide, params, mult, shift, dec, tensor, keep, words, wi, stream
):
    """One row of a strip: blocks of `wide` columns, or one scale per column where wide is 1.

    `mult`, `shift`, `dec`, `keep` are arrays per block or None; `words` is an array or None.
    """
    if wide == 1:
        whole = cols // 16 * 16
        for i in range(0, whole, 16):
            cast16(
                src, base + i, dst, to + i, params, mult, shift, dec, tensor, keep, i, words,
                wi + i, None, stream, None,
            )  # fmt: skip
        if whole < cols:
            cast16(
                src, base + whole, dst, to + whole, params, mult, shift, dec, tensor, keep, whole,
                words, wi + whole, cols - whole, None, None,
            )  # fmt: skip
        return
    full = cols // wide if wide % 16 == 0 else 0
    for k in range(full):
        for i in range(k * wide, (k + 1) * wide, 16):
            cast16(
                src, base + i, dst, to + i, params, mult, shift, dec, tensor, keep, (k,), words,
                wi + i, None, stream, AHEAD,
            )  # fmt: skip
    for k in range(full, (cols + wide - 1) // wide):
        end = min((k + 1) * wide, cols)
        for i in range(k * wide, end, 16):
            cast16(
                src, base + i, dst, to + i, params, mult, shift, dec, tensor, keep, (k,), words,
                wi + i, min(16, end - i), None, None,
            )  # fmt: skip


@jit
def chunk_columns(tall, wide):
    """Columns handled at once: about CHUNK elements of a strip, a multiple of the block."""
    if wide == 1:
        return max(4 * CHUNK // tall // 16 * 16, 64)
    return max(CHUNK // tall // wide, 1) * wide


@jit
def amax_strips(src, amax, first, last, col0, col1, rows, cols, tall, wide, skip_nan):
    """Block amaxes (float32 bits) of strips ``first .. last``, columns ``col0 .. col1``."""
    chunk = chunk_columns(tall, wide)
    strips, blocks = (rows + tall - 1) // tall, (cols + wide - 1) // wide
    tops = np.empty(chunk if wide > 1 and tall > 1 else 0, np.uint32)
    for s in range(first, last):
        row = s // strips * rows + s % strips * tall
        height = min(tall, rows - s % strips * tall)
        for c in range(col0, col1, chunk):
            width = min(chunk, col1 - c)
            g = s * blocks + c // wide
            strip_amaxes(
                src, row * cols + c, height, cols, width, wide, skip_nan, tops,
                amax[g : g + (width + wide - 1) // wide],
            )  # fmt: skip


@jit
def cast_strips(
    src, dst, scales, first, last, col0, col1, rows, cols, tall, wide, params, by_shift, scalars,
    tensor, rule, skip_nan, threshold, emax, given, rng, stream,
):  # fmt: skip
    """Reduce, apply the scale rule and cast, chunk by chunk: one pass over memory.

    `scales` receives the stored scales unless it is empty (its dtype is their type). With
    ``rule == RULE_GIVEN`` the tuple `given` has (mult, shift, dec, keep) for every block instead.
    `scalars` is laid out as `TENSOR`; `tensor` is the same array where its [1] multiplies decoded
    values, else None. `stream` other than None (float32 `dst`) writes past the caches. `rng` is None or (words, first index, seed, stream); `words` may be empty.
    """
    chunk = chunk_columns(tall, wide)
    strips, blocks = (rows + tall - 1) // tall, (cols + wide - 1) // wide
    most = (min(chunk, col1 - col0) + wide - 1) // wide
    scratch = 0 if rule == RULE_GIVEN else most
    tops = np.empty(chunk if wide > 1 and tall > 1 else 0, np.uint32)
    amax, code = np.empty(scratch, np.uint32), np.empty(scratch, scales.dtype)
    mult_, shift_ = np.empty(scratch, np.float32), np.empty(scratch, np.int32)
    dec_, keep_ = np.empty(scratch, np.float32), np.empty(scratch, np.int32)
    drawn = np.empty(0 if rng is None else chunk + 64, np.uint32)
    for s in range(first, last):
        row = s // strips * rows + s % strips * tall
        height = min(tall, rows - s % strips * tall)
        for step in range((col1 - col0 + chunk - 1) // chunk):
            c = col0 + step * chunk
            width = min(chunk, col1 - c)
            count = (width + wide - 1) // wide
            g = s * blocks + c // wide
            base = row * cols + c
            if rule == RULE_GIVEN:
                mult, shift = given[0][g : g + count], given[1][g : g + count]
                dec, keep = given[2][g : g + count], given[3][g : g + count]
            else:
                mult, shift, dec, keep = mult_, shift_, dec_, keep_
                strip_amaxes(src, base, height, cols, width, wide, skip_nan, tops, amax)
                if rule == RULE_MX:
                    mx_scales(amax, count, threshold, emax, code, mult, shift, dec, keep)
                elif rule == RULE_NVFP4:
                    nvfp4_scales(amax, count, scalars[2], scalars[3], code, mult, dec, keep)
                else:
                    pow2 = rule == RULE_FP8_POW2
                    fp8_scales(amax, count, scalars[2], pow2, code, mult, dec, keep)
                if len(scales):
                    for k in range(count):  # a slice assignment costs seconds to compile
                        scales[g + k] = code[k]
            for r in range(height):
                at = base + r * cols
                if rng is None:
                    if by_shift is None:
                        cast_row(
                            src, at, dst, at, width, wide, params, mult, None, dec, tensor, keep,
                            None, 0, stream,
                        )  # fmt: skip
                    else:
                        cast_row(
                            src, at, dst, at, width, wide, params, None, shift, dec, tensor, keep,
                            None, 0, stream,
                        )  # fmt: skip
                else:
                    words, wi = rng[0], at
                    if len(words) == 0:
                        words = drawn
                        wi = fill_words(drawn, rng[1] + at, width, rng[2], rng[3])
                    if by_shift is None:
                        cast_row(
                            src, at, dst, at, width, wide, params, mult, None, dec, tensor, keep,
                            words, wi, stream,
                        )  # fmt: skip
                    else:
                        cast_row(
                            src, at, dst, at, width, wide, params, None, shift, dec, tensor, keep,
                            words, wi, stream,
                        )  # fmt: skip


@jit
def tensor_scalars(rule, amax, element_max, scale_max, out):
    """`TENSOR` scalars of `fpemu.scaling.nvfp4_tensor` and `fp8_tensor` from amax bits."""
    one, largest = np.float32(1), np.float32(3.4028234663852886e38)
    g = f32_of_bits(np.uint32(amax))
    if rule == RULE_NVFP4:
        top = np.float32(element_max * scale_max)
        s = top / g
        decode = g / top
        if s > largest:
            s, decode = largest, one / largest
        if g == 0 or s == 0:
            s, decode = one, one
    else:
        s = np.float32(element_max) / g
        if s > largest:
            s = largest
        if g == 0 or g > largest:
            s = one
        decode = one / s
    out[0], out[1], out[2], out[3] = s, decode, s * (one / np.float32(element_max)), one / s
