"""What a backend is: a module with the functions below, each taking a `Request`.

========== =========================================================================
quantize   ``(request, out) -> None``: values into `out`, an array of the caller's
encode     ``(request) -> Parts``: codes and scales
decode     ``(parts, request_like..., out) -> None``: values of codes and scales
within     ``(request) -> bool array``: where the value that is cast lies in +-max
supports   ``(request) -> str | None``: why this backend cannot serve, or None
========== =========================================================================

`oracle` and `numba_` work on numpy arrays, `torch_` on torch tensors. bfloat16 numpy arrays
arrive as their uint16 bits with ``kind == "bfloat16"``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from fpemu.formats import BlockFormat, Format
from fpemu.rng import Random

FLOAT_KINDS = ("float16", "bfloat16", "float32", "float64")
#: Kinds that float32 holds exactly.
NARROW_KINDS = ("float16", "bfloat16", "float32", "int8", "uint8", "int16", "uint16")


@dataclass(slots=True)
class Request:
    """One validated call: everything a backend needs, nothing it must check again.

    Parameters
    ----------
    x : ndarray or Tensor
        Any shape and strides; never modified. For ``kind == "bfloat16"`` in numpy: uint16 bits.
    kind : str
        Element type of x: a name in `FLOAT_KINDS` or of an integer type ("int32", "uint8", ...).
    fmt : Format or BlockFormat
    rounding, overflow : str
        Resolved names; see `fpemu.casting`.
    axis : int
        Non-negative block axis (0 for a 0-d x). Unused by element, tensor and 2D formats.
    amax : float or None
        The caller's tensor amax (a float32 value), for formats with a tensor scale.
    random : Random or None
        Source of random words where ``rounding == "sr"`` and `random_bits` is None.
    random_bits : ndarray or Tensor of uint32, or None
        The words themselves, in x's shape. (In torch: int64 holding 0 .. 2**32 - 1.)
    sr_bits : int
        How many top bits of each word are used.
    """

    x: Any
    kind: str
    fmt: Format | BlockFormat
    rounding: str = "rne"
    overflow: str = "sat"
    axis: int = 0
    amax: float | None = None
    random: Random | None = None
    random_bits: Any = None
    sr_bits: int = 32

    def part(self, index: tuple[slice, ...]) -> Request:
        """The request for a part of x that holds whole blocks.

        The tensor amax must be known by then and random words indexed by shape (`Random.start`).
        """
        random = None if self.random is None else self.random.shard(index)
        words = None if self.random_bits is None else self.random_bits[index]
        return replace(self, x=self.x[index], random=random, random_bits=words)


class Parts(NamedTuple):
    """Codes (shape of x), scales (blocks in place of elements) and the tensor scale.

    `codes` is uint8/uint16/uint32; `scales` uint8 codes or float32, or None; `tensor_scale` a
    0-d float32 array, or None. (For a dialect: the number that its library stores.)
    """

    codes: Any
    scales: Any
    tensor_scale: Any


def element_format(fmt: Format | BlockFormat) -> Format:
    return fmt.element if isinstance(fmt, BlockFormat) else fmt


def scales_shape(fmt: BlockFormat, shape: tuple[int, ...], axis: int) -> tuple[int, ...] | None:
    """Shape of the block scales of an array, a 0-d one counting as one short block."""
    if fmt.block is None:
        return None
    if len(fmt.block) == 2:
        rows, cols = fmt.block
        return (*shape[:-2], ceil(shape[-2] / rows), ceil(shape[-1] / cols))
    if not shape:
        return ()
    (size,) = fmt.block
    return (*shape[:axis], ceil(shape[axis] / size), *shape[axis + 1 :])


def scales_dtype(fmt: BlockFormat) -> np.dtype:
    """uint8 for scale formats of at most 8 bits, float32 for FP32 scales."""
    assert fmt.scale is not None
    return np.dtype(np.uint8 if fmt.scale.bits <= 8 else np.float32)
