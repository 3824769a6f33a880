"""Histograms of exponents: which binade values lie in, and how far below their block's maximum.

All by integer arithmetic on the bits of float64, so that no bin depends on a logarithm's rounding.
"""

from __future__ import annotations

import numpy as np

#: Histograms stop here; what lies beyond is counted in the first and the last bin.
LOWEST, HIGHEST = -64, 64
FARTHEST = 64
PART = 1 << 18  # elements at a time: a histogram needs a few temporary arrays


def float64_bits(x: np.ndarray) -> np.ndarray:
    """Bits of |x| as float64, which are ordered as the values are; the exponent is above bit 52."""
    return np.abs(x).astype(np.float64).view(np.int64)


def exponent_counts(x: np.ndarray) -> np.ndarray:
    """How many values lie in each binade ``[2**e, 2**(e+1))``, e from `LOWEST` to `HIGHEST`.

    The first and the last bin also take what lies beyond; zeros, NaN and Inf are left out.
    """
    counts = np.zeros(HIGHEST - LOWEST + 1, np.int64)
    flat = x.reshape(-1)
    for start in range(0, flat.size, PART):
        part = flat[start : start + PART]
        e = (float64_bits(part[np.isfinite(part) & (part != 0)]) >> 52) - 1023
        counts += np.bincount(np.clip(e, LOWEST, HIGHEST) - LOWEST, minlength=len(counts))
    return counts


def rows_of(x: np.ndarray, block: int) -> np.ndarray:
    """Blocks along the last axis as rows; the last one of each row of x is filled with zeros."""
    rows = x.reshape(1, -1) if x.ndim == 0 else x.reshape(-1, x.shape[-1])
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % block))).reshape(-1, block)


def maximum_counts(x: np.ndarray, block: int) -> np.ndarray:
    """`exponent_counts` of the blocks' largest magnitudes; zero, NaN and Inf are left out."""
    return exponent_counts(np.abs(rows_of(x, block)).max(axis=1))


def distance_counts(x: np.ndarray, block: int) -> np.ndarray:
    """How many non-zero values lie d to d + 1 binades below the largest of their block.

    d = floor(log2(largest / |x|)), exactly: in the difference of two floats' bits the mantissas
    borrow from the exponents just where the larger mantissa is below.

    Parameters
    ----------
    x : ndarray
    block : int
        Length of a block along the last axis (the last one may be short); 0: the whole tensor.
        A block with NaN or Inf is left out.
    """
    counts = np.zeros(FARTHEST + 1, np.int64)
    if block == 0:
        flat, top = x.reshape(1, -1), np.abs(x).max()
        pieces = [(flat[:, i : i + PART], top) for i in range(0, flat.shape[1], PART)]
    else:
        rows, step = rows_of(x, block), max(1, PART // block)
        parts = (rows[i : i + step] for i in range(0, len(rows), step))
        pieces = [(part, np.abs(part).max(axis=1, keepdims=True)) for part in parts]
    for part, top in pieces:
        d = (float64_bits(top) - float64_bits(part) >> 52)[np.isfinite(top) & (part != 0)]
        counts += np.bincount(np.minimum(d, FARTHEST), minlength=len(counts))
    return counts
