"""numba loops around the tiles of `fpemu.gemm.kernels`, and the reference units.

Layouts (all flat): row operands are [matrix, row, k], rows and k padded with zeros; panel operands
[matrix, panel, k, 16], a panel being 16 columns of B; D is float32 bits [matrix, row, column].
Everything here releases the GIL and writes only the outputs of its own piece.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fpemu.backends.kernels import bits_of_f32
from fpemu.gemm.kernels import ROWS, add16, fma, group_tile, split16, tile

jit = njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)

#: Elements of K that go through all panels before the next: their 16 columns stay in the L2 cache.
CHUNK = 2048

# Operands ------------------------------------------------------------------------------------------


@jit
def split_rows(src, rows, padded, cols, row0, row1, sig, exp, width, params):
    """Padded rows ``row0 .. row1`` of src[matrices, rows, cols] into sig and exp
    [matrices, padded, width]; returns how many values are none of the format."""
    bad = 0
    for row in range(row0, row1):
        r = row % padded
        at = (row // padded * rows + r) * cols
        for k in range(0, width, 16):
            n = min(16, cols - k) if r < rows and k < cols else 0
            start = at + k if n else 0
            bad += split16(src, start, n, sig, exp, row * width + k, params)
    return bad


@jit
def split_panels(src, rows, cols, panel0, panel1, sig, exp, width, params):
    """Panels ``panel0 .. panel1`` of src[matrices, rows, cols], rows along K, into
    [matrices, panels, width, 16]; returns as `split_rows`."""
    bad = 0
    panels = (cols + 15) // 16
    for panel in range(panel0, panel1):
        matrix, j = panel // panels, panel % panels * 16
        for k in range(width):
            n = min(16, cols - j) if k < rows else 0
            at = (matrix * rows + k) * cols + j if n else 0
            bad += split16(src, at, n, sig, exp, (panel * width + k) * 16, params)
    return bad


@jit
def shift_rows(sig, exp, width, scale_sig, scale_exp, per_row, size, row0, row1):
    """Add the exponent of each element's scale block (`size` elements) to the element's own."""
    for row in range(row0, row1):
        for k in range(min(width, per_row * size)):
            i = row * per_row + k // size
            exp[row * width + k] += scale_exp[i]
            sig[row * width + k] *= scale_sig[i]


@jit
def shift_panels(sig, exp, width, scale_sig, scale_exp, per_row, size, panel0, panel1):
    """`shift_rows` for panels; scales are [panels, per_row, 16]."""
    for panel in range(panel0, panel1):
        for k in range(min(width, per_row * size)):
            at, i = (panel * width + k) * 16, (panel * per_row + k // size) * 16
            for lane in range(16):
                exp[at + lane] += scale_exp[i + lane]
                sig[at + lane] *= scale_sig[i + lane]


# The units -----------------------------------------------------------------------------------------


@jit
def gemm(
    sig_a, exp_a, sig_b, exp_b, d, index_a, index_b, rows, width, panels, blocks, length,
    matrix0, matrix1, row0, row1, panel0, panel1, late, factor_a, factor_b, half, params,
):  # fmt: skip
    """D += A @ B for matrices, rows (multiples of 4) and panels of one piece.

    `late` blocks at a time start from +0 and are added to D when they are done (0: never, D of one
    block is c of the next); `factor_a` [matrix, row, period] and `factor_b` [matrix, panel, period,
    16], or None, multiply them then.
    """
    stride = panels * 16
    partial = np.zeros(ROWS * 16, np.int32)
    size = CHUNK // length if late == 0 else max(CHUNK // (length * late), 1) * late
    periods = (blocks + late - 1) // late if late else 0
    for m in range(matrix0, matrix1):
        ma, mb = index_a[m], index_b[m]
        for block0 in range(0, blocks, size):
            block1 = min(block0 + size, blocks)
            for panel in range(panel0, panel1):
                b = mb * panels + panel
                for row in range(row0, row1, ROWS):
                    a = ma * rows + row
                    at = (m * rows + row) * stride + panel * 16
                    if late == 0:
                        tile(
                            sig_a, exp_a, a * width + block0 * length, width, sig_b, exp_b,
                            (b * width + block0 * length) * 16, d, at, stride, block1 - block0,
                            length, params,
                        )  # fmt: skip
                        continue
                    for block in range(block0, block1, late):
                        partial[:] = 0
                        tile(
                            sig_a, exp_a, a * width + block * length, width, sig_b, exp_b,
                            (b * width + block * length) * 16, partial, 0, 16,
                            min(late, blocks - block), length, params,
                        )  # fmt: skip
                        period = block // late
                        for r in range(ROWS):
                            add16(
                                partial, r * 16, d, at + r * stride, factor_a,
                                (a + r) * periods + period, factor_b, (b * periods + period) * 16,
                                half,
                            )  # fmt: skip


@jit
def group_gemm(
    sig_a, scale_a, exp_a, sig_b, scale_b, exp_b, d, index_a, index_b, rows, width, panels, blocks,
    groups, size, low, matrix0, matrix1, row0, row1, panel0, panel1, params,
):  # fmt: skip
    """`gemm` for units that add groups of products exactly; scales are per group."""
    stride, per_row = panels * 16, width // size
    most = max(CHUNK // (groups * size), 1)
    for m in range(matrix0, matrix1):
        ma, mb = index_a[m], index_b[m]
        for block0 in range(0, blocks, most):
            block1 = min(block0 + most, blocks)
            k, g = block0 * groups * size, block0 * groups
            for panel in range(panel0, panel1):
                b = mb * panels + panel
                for row in range(row0, row1, ROWS):
                    a = ma * rows + row
                    group_tile(
                        sig_a, a * width + k, width, scale_a, exp_a, a * per_row + g, per_row,
                        sig_b, (b * width + k) * 16, scale_b, exp_b, (b * per_row + g) * 16, d,
                        (m * rows + row) * stride + panel * 16, stride, block1 - block0, groups,
                        size, low, params,
                    )  # fmt: skip


# References ----------------------------------------------------------------------------------------


@jit
def sequential(a, b, d, row0, row1, col0, col1, depth, cols):
    """d[rows, cols] += a[rows, depth] @ b[depth, cols]: product and sum rounded, in order of k."""
    for i in range(row0, row1):
        row = d[i * cols : (i + 1) * cols]
        for k in range(depth):
            x, column = a[i * depth + k], b[k * cols : (k + 1) * cols]
            for j in range(col0, col1):
                row[j] = row[j] + x * column[j]


@jit
def fused(a, b, d, row0, row1, col0, col1, depth, cols):
    """`sequential` with one rounding for product and sum."""
    for i in range(row0, row1):
        row = d[i * cols : (i + 1) * cols]
        for k in range(depth):
            x, column = a[i * depth + k], b[k * cols : (k + 1) * cols]
            for j in range(col0, col1):
                row[j] = fma(x, column[j], row[j])


@jit
def pairwise(a, b, d, row0, row1, col0, col1, depth, cols):
    """Products rounded, then neighbours added until one is left (an odd last one moves up); c last."""
    level = np.empty((depth, 16), np.float32)
    for i in range(row0, row1):
        for j in range(col0, col1, 16):
            n = min(16, col1 - j)
            for k in range(depth):
                for lane in range(n):
                    level[k, lane] = a[i * depth + k] * b[k * cols + j + lane]
            left = depth
            while left > 1:
                for k in range(left // 2):
                    for lane in range(n):
                        level[k, lane] = level[2 * k, lane] + level[2 * k + 1, lane]
                if left % 2:
                    for lane in range(n):
                        level[left // 2, lane] = level[left - 1, lane]
                left = (left + 1) // 2
            for lane in range(n):
                d[i * cols + j + lane] = d[i * cols + j + lane] + level[0, lane]


# The exact sum as a fixed-point number: 32 bits a limb from 2**-298 (the least product of two
# float32) up, two limbs to spare for carries.
_LIMBS, _LOW = 21, -298


@jit
def _accumulate(limbs, sig, exp):
    """limbs += sig * 2**exp (|sig| < 2**48)."""
    at = exp - _LOW
    limb, shift = at >> 5, np.uint64(at & 31)
    mag = np.uint64(abs(sig))
    low, high = (mag & np.uint64(0xFFFFFFFF)) << shift, (mag >> np.uint64(32)) << shift
    sign = np.int64(-1) if sig < 0 else np.int64(1)
    mask = np.uint64(0xFFFFFFFF)
    limbs[limb] += sign * np.int64(low & mask)
    limbs[limb + 1] += sign * np.int64((low >> np.uint64(32)) + (high & mask))
    limbs[limb + 2] += sign * np.int64(high >> np.uint64(32))


@jit
def _carry(limbs):
    """Limbs into 0 .. 2**32 - 1; returns the sign that is left above them (0 or -1)."""
    carry = np.int64(0)
    for i in range(_LIMBS):
        total = limbs[i] + carry
        limbs[i] = total & 0xFFFFFFFF
        carry = total >> 32
    return carry


@jit
def _rounded(limbs, man_bits, emin, emax):
    """The fixed-point number to nearest even as a float64 that the format holds; Inf past it."""
    negative = _carry(limbs) < 0
    if negative:
        for i in range(_LIMBS):
            limbs[i] = -limbs[i]
        _carry(limbs)
    top = -1
    for i in range(_LIMBS - 1, -1, -1):
        if limbs[i]:
            top = i * 32 + 31
            while not (limbs[i] >> np.int64(top & 31)) & 1:
                top -= 1
            break
    if top < 0:
        return 0.0
    last = max(top - man_bits, emin - man_bits - _LOW)  # position of the last bit that is kept
    kept, rest, half = np.int64(0), False, False
    for i in range(top, max(last, 0) - 1, -1):
        kept = kept * 2 + ((limbs[i >> 5] >> np.int64(i & 31)) & 1)
    half = last > 0 and ((limbs[(last - 1) >> 5] >> np.int64((last - 1) & 31)) & 1) == 1
    for i in range(min(last - 1, top + 1)):
        if (limbs[i >> 5] >> np.int64(i & 31)) & 1:
            rest = True
            break
    if half and (rest or kept & 1):
        kept += 1
    value, exponent = np.float64(kept), last + _LOW
    step = 2.0 if exponent >= 0 else 0.5
    for _ in range(abs(exponent)):
        value *= step
    limit = 2.0
    for _ in range(emax):
        limit *= 2.0
    value = value if value < limit else np.inf
    return -value if negative else value


@jit
def exact(a, b, d, row0, row1, col0, col1, depth, cols, man_bits, emin, emax):
    """d (float32) = a @ b + d with one rounding to nearest even."""
    limbs = np.zeros(_LIMBS, np.int64)
    for i in range(row0, row1):
        for j in range(col0, col1):
            limbs[:] = 0
            special = np.float32(0)
            for k in range(depth + 1):
                x, y = (
                    (a[i * depth + k], b[k * cols + j])
                    if k < depth
                    else (d[i * cols + j], np.float32(1))
                )
                if not (np.isfinite(x) and np.isfinite(y)):
                    special += x * y
                elif x != 0 and y != 0:
                    sx, ex = _parts(x)
                    sy, ey = _parts(y)
                    _accumulate(limbs, sx * sy, ex + ey)
            value = np.float32(_rounded(limbs, man_bits, emin, emax))
            d[i * cols + j] = special if special != 0 else value


@jit
def _parts(x):
    """Integer significand and exponent of a finite float32."""
    bits = np.int64(bits_of_f32(x))
    field = (bits >> 23) & 0xFF
    sig = bits & 0x7FFFFF
    if field:
        sig |= 1 << 23
    return (-sig if bits >> 31 & 1 else sig), max(field, 1) - 150
