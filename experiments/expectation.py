"""Exact moments of stochastic rounding, without draws and without a second cast.

With n random bits a magnitude goes up for floor(f 2^n) of the 2^n words, f being the discarded
fraction of a step (docs/bits.md). The words are ordered, so the cast itself tells the count: a
bisection of 32 casts with `random_bits=` finds, for every element, how many of the 2^32 words send
it up. That holds for every format, block scale and dialect that `fpemu.quantize` knows, and for the
row of this file, `UP`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import fpemu
from fpemu import formats, scaling
from fpemu.formats import BlockFormat, Format

WORD_BITS = 32


class Rounded(NamedTuple):
    """What stochastic rounding can make of each element, float64, and how often."""

    down: np.ndarray  # value where the word is 0
    up: np.ndarray  # value where all its bits are set
    words: np.ndarray  # uint64: how many of the 2^32 give `up`; 0 where both are the same


def chances(x: np.ndarray, fmt: str | Format | BlockFormat, axis: int = -1) -> Rounded:
    """The two values that stochastic rounding chooses between, and for how many words each.

    Parameters
    ----------
    x : ndarray of float16, float32 or float64
        Finite.
    fmt : str, Format or BlockFormat
    axis : int
        Along which blocks lie.

    Returns
    -------
    Rounded

    Examples
    --------
    >>> down, up, words = chances(np.float32([1.25, 1.5]), "e2m1")
    >>> down.tolist(), up.tolist(), (words / 2.0**32).tolist()
    ([1.0, 1.5], [1.5, 1.5], [0.5, 0.0])
    """

    def cast(words: np.ndarray) -> Any:
        return fpemu.encode(x, fmt, rounding="sr", axis=axis, random_bits=words.astype(np.uint32))

    whole = np.uint64(1 << WORD_BITS)
    count = np.zeros(x.shape, np.uint64)
    down, up = cast(count), cast(count + (whole - np.uint64(1)))
    for bit in reversed(range(WORD_BITS)):
        trial = count | np.uint64(1 << bit)
        # At least `trial` words go up just where the word 2^32 - trial does.
        count = np.where(cast(whole - trial).codes != down.codes, trial, count)
    return Rounded(down.decode("float64"), up.decode("float64"), count)


def share_up(rounded: Rounded, bits: int = WORD_BITS) -> np.ndarray:
    """Exact probability of `up` with that many random bits: floor(f 2^n) / 2^n."""
    return (rounded.words >> np.uint64(WORD_BITS - bits)) / 2.0**bits


def mean(rounded: Rounded, bits: int = WORD_BITS) -> np.ndarray:
    """Expected value of each element."""
    return rounded.down + share_up(rounded, bits) * (rounded.up - rounded.down)


def variance(rounded: Rounded, bits: int = WORD_BITS) -> np.ndarray:
    """Variance of each element; different elements have different words, so covariances are 0."""
    p = share_up(rounded, bits)
    return p * (1 - p) * (rounded.up - rounded.down) ** 2


# NVFP4 whose block scales are rounded up ----------------------------------------------------------


def round_scale_up(
    ops: scaling.Ops, fmt: BlockFormat, amax: Any, tensor: scaling.TensorScale
) -> scaling.Scales:
    """As `fpemu.scaling.nvfp4_block`, the scale being the smallest E4M3 that is not below its value.

    So a block's largest value lies within +-6, but for the roundings of float32.
    """
    assert fmt.scale is not None
    one = ops.f32(amax, 1.0)
    wanted = amax * (tensor.encode * (one / ops.f32(amax, fmt.element.max)))
    code, value = ops.scale(fmt.scale, wanted)
    code = code + ops.count((value < wanted) & (code < fmt.scale.max_mag))
    factor = scaling.decode_mag(ops, fmt.scale, code)
    multiplier = one / (factor * (one / tensor.encode))
    largest = ops.f32(amax, scaling.FLT_MAX)
    return scaling.Scales(code, ops.module.where(multiplier > largest, largest, multiplier), factor)


scaling.RULES["nvfp4_up"] = scaling.Rule(scaling.nvfp4_tensor, round_scale_up, "poison")
#: No library's: what NVFP4 would be with its E4M3 scales rounded up instead of to nearest.
UP = BlockFormat(
    "nvfp4/up", formats.E2M1, (16,), formats.E4M3, "nvfp4_up", tensor_scaled=True,
    source="this experiment's: nvfp4 with scales rounded up",
)  # fmt: skip
