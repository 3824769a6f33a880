"""Counter-based random words: Philox4x32-10, the same on every backend and for every chunking.

The word of an element depends on its index in the whole tensor, the seed and the stream only, so
neither threads nor chunks nor shards change it.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np

# Round multipliers and key increments of Philox4x32 (Salmon et al., table 2 and section 4.3).
PHILOX_M = (0xD2511F53, 0xCD9E8D57)
PHILOX_W = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1, as 32-bit fractions
PHILOX_ROUNDS = 10


@dataclass(frozen=True)
class Random:
    """Where the random words of one call come from.

    Parameters
    ----------
    seed, stream : int
        64-bit key and upper half of the counter.
    bits : int
        How many of each word's top bits are used (1 to 32).
    offset : int
        Index, in the whole tensor, of the call's first element (added to a shard's indices too).
    global_shape, start : tuple of int or None
        The whole tensor's shape and this shard's first multi-index.
    """

    seed: int
    stream: int = 0
    bits: int = 32
    offset: int = 0
    global_shape: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None

    def shard(self, index: tuple[slice, ...]) -> Random:
        """The words of a part of this shard."""
        assert self.start is not None
        start = tuple(a + s.start for a, s in zip(self.start, index, strict=True))
        return replace(self, start=start)

    def row_bases(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """Index of the first element of each row (last axis) of a shard; None for a whole range."""
        if self.global_shape is None:
            return None
        assert self.start is not None
        base = np.zeros(shape[:-1], dtype=np.uint64)
        for axis, size in enumerate(shape[:-1]):
            step = prod(self.global_shape[axis + 1 :])
            index = (np.arange(size, dtype=np.uint64) + np.uint64(self.start[axis])) * np.uint64(
                step
            )
            base += index.reshape([size if a == axis else 1 for a in range(len(shape) - 1)])
        return base.ravel() + np.uint64(self.start[-1] + self.offset)


def philox(index: np.ndarray, seed: int, stream: int) -> np.ndarray:
    """The word of each index.

    Parameters
    ----------
    index : ndarray of uint64
    seed, stream : int
        64 bits each.

    Returns
    -------
    ndarray of uint32, shape of `index`
        Word ``index & 3`` of Philox4x32-10 at counter
        ``(index>>2 low, index>>2 high, stream low, stream high)``.
    """
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    block = index >> np.uint64(2)
    x0, x1 = block & low, block >> shift
    x2 = np.full_like(x0, stream & 0xFFFFFFFF)
    x3 = np.full_like(x0, stream >> 32 & 0xFFFFFFFF)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = x0 * np.uint64(PHILOX_M[0]), x2 * np.uint64(PHILOX_M[1])
        x0, x1, x2, x3 = (
            (p1 >> shift) ^ x1 ^ np.uint64(k0), p1 & low,
            (p0 >> shift) ^ x3 ^ np.uint64(k1), p0 & low,
        )  # fmt: skip
        k0, k1 = k0 + PHILOX_W[0] & 0xFFFFFFFF, k1 + PHILOX_W[1] & 0xFFFFFFFF
    lane = index & np.uint64(3)
    return np.choose(lane.astype(np.intp), (x0, x1, x2, x3)).astype(np.uint32)


def indices(shape: tuple[int, ...], random: Random) -> np.ndarray:
    """Index in the whole tensor of every element of a call, shape `shape`, uint64."""
    bases = random.row_bases(shape)
    if bases is None:
        return np.arange(prod(shape), dtype=np.uint64).reshape(shape) + np.uint64(random.offset)
    return (bases[:, None] + np.arange(shape[-1], dtype=np.uint64)).reshape(shape)


def signed64(word: int) -> int:
    """The int64 with the bits of a 64-bit word."""
    return word - (1 << 64) if word >> 63 else word
