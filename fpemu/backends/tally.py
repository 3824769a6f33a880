"""numba loops that measure contiguous pieces: counts, moments, exponents, errors. None casts.

Values come with their bits as unsigned integers; `mag` masks the sign away and `inf` is the bits of
infinity, so what is masked orders as the magnitudes do, infinity and NaN on top. Sums are float64,
in `LANES` interleaved parts that are added in order: the same on every processor.
"""

from __future__ import annotations

import numpy as np

from fpemu.backends.jit import jit

LANES = 16


@jit
def survey(bits, mag, inf):
    """Zeros, infinities, NaN, and the bits of the largest finite magnitude."""
    zeros, infinite, nans, largest = 0, 0, 0, mag ^ mag
    for i in range(len(bits)):
        a = bits[i] & mag
        zeros += a == 0
        infinite += a == inf
        nans += a > inf
        a = a if a < inf else mag ^ mag
        largest = max(largest, a)
    return zeros, infinite, nans, largest


@jit
def total(x):
    """Sum of finite values."""
    lanes = np.zeros(LANES)
    whole = len(x) // LANES * LANES
    for i in range(0, whole, LANES):
        for k in range(LANES):
            lanes[k] += np.float64(x[i + k])
    for i in range(whole, len(x)):
        lanes[i - whole] += np.float64(x[i])
    return lanes.sum()


@jit
def powers(x, mean):
    """Sums of the second, third and fourth power of ``x - mean``, x finite."""
    second, third, fourth = np.zeros(LANES), np.zeros(LANES), np.zeros(LANES)
    whole = len(x) // LANES * LANES
    for i in range(0, whole, LANES):
        for k in range(LANES):
            d = np.float64(x[i + k]) - mean
            square = d * d
            second[k] += square
            third[k] += square * d
            fourth[k] += square * square
    for i in range(whole, len(x)):
        d = np.float64(x[i]) - mean
        square = d * d
        second[i - whole] += square
        third[i - whole] += square * d
        fourth[i - whole] += square * square
    return second.sum(), third.sum(), fourth.sum()


@jit
def exponents(bits, mag, shift, counts):
    """Count every element's biased exponent into a row of `counts`, four rows in turn.

    (One row would make each addition wait for the one before: neighbours often share a bin.)
    """
    whole = len(bits) // 4 * 4
    for i in range(0, whole, 4):
        for k in range(4):
            counts[k, (bits[i + k] & mag) >> shift] += 1
    for i in range(whole, len(bits)):
        counts[0, (bits[i] & mag) >> shift] += 1


@jit
def column_maxima(bits, mag, inf, largest):
    """Raise `largest` to the bits of the largest finite magnitude of each column."""
    for r in range(bits.shape[0]):
        for c in range(bits.shape[1]):
            a = bits[r, c] & mag
            a = a if a < inf else mag ^ mag
            largest[c] = max(largest[c], a)


@jit
def losses(x_bits, q_bits, mag, inf, inside):
    """Nonzero x that became zero; finite x cast from beyond the range; NaN q; unusable pairs.

    `inside` says where the value that is cast lies within the format's range. A pair is unusable
    for errors where either is infinite or NaN.
    """
    underflow, saturated, nans, unusable = 0, 0, 0, 0
    for i in range(len(x_bits)):
        a, b = x_bits[i] & mag, q_bits[i] & mag
        underflow += (b == 0) & (a != 0)
        saturated += (a < inf) & (b <= inf) & (not inside[i])
        nans += b > inf
        unusable += (a >= inf) | (b >= inf)
    return underflow, saturated, nans, unusable


@jit
def errors(x, q):
    """Sums of ``x**2`` and ``(q - x)**2``, both finite."""
    signal, noise = np.zeros(LANES), np.zeros(LANES)
    whole = len(x) // LANES * LANES
    for i in range(0, whole, LANES):
        for k in range(LANES):
            v = np.float64(x[i + k])
            e = np.float64(q[i + k]) - v
            signal[k] += v * v
            noise[k] += e * e
    for i in range(whole, len(x)):
        v = np.float64(x[i])
        e = np.float64(q[i]) - v
        signal[i - whole] += v * v
        noise[i - whole] += e * e
    return signal.sum(), noise.sum()
