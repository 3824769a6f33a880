"""What `matmul` does around the product, for arrays and for tensors that stay on their device.

Each function takes either. A float32 operation of torch, alone, is the IEEE operation that numpy's
is, so the bits do not depend on where a step runs.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def is_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def like(array: Any, x: Any) -> Any:
    """A host array (or None) where `x` is."""
    if array is None or is_tensor(array) or not is_tensor(x):
        return array
    import torch

    return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(x.device)


def take(x: Any, k: np.ndarray, axis: int) -> Any:
    """Some of an axis, contiguous."""
    if is_tensor(x):
        return x.index_select(axis, like(k, x))
    return np.ascontiguousarray(x.take(k, axis))


def lookup(table: np.ndarray, codes: Any) -> Any:
    """``table[codes]``."""
    if not is_tensor(codes):
        return table[codes]
    import torch

    index = codes.reshape(-1).to(torch.int32)
    return like(table, codes).index_select(0, index).reshape(codes.shape)


def as_floats(codes: Any, bits: int) -> Any:
    """Codes whose `bits` are the top ones of a float32 as that float32's values; contiguous."""
    if is_tensor(codes):
        torch = sys.modules["torch"]
        return (codes.view(torch.int32) << 32 - bits).contiguous().view(torch.float32)
    return np.ascontiguousarray(codes << 32 - bits).view(np.float32)


def zeros(shape: tuple[int, ...], x: Any) -> Any:
    """float32 zeros where `x` is."""
    return x.new_zeros(shape) if is_tensor(x) else np.zeros(shape, np.float32)


def spread(x: Any, shape: tuple[int, ...]) -> Any:
    """`x` broadcast to a shape, contiguous."""
    if is_tensor(x):
        return x.expand(shape).contiguous()
    return np.ascontiguousarray(np.broadcast_to(x, shape))


def repeat(x: Any, times: int, axis: int) -> Any:
    return x.repeat_interleave(times, axis) if is_tensor(x) else np.repeat(x, times, axis)


def single(x: Any) -> tuple[Any, int]:
    """A tensor's values as contiguous float32, and how many of them float32 does not have.

    Float8 tensors have no comparison in torch and fit anyway, as everything of two bytes does.
    """
    import torch

    y = x.to(torch.float32).contiguous()
    if x.element_size() <= 2 or x.dtype == torch.float32:
        return y, 0
    wrong = y.to(x.dtype) != x
    if x.is_floating_point():
        wrong &= ~(y.isnan() & x.isnan())
    return y, int(wrong.sum())


def half(x: Any) -> Any:
    """float32 values rounded to float16 (nearest even), as float32."""
    if is_tensor(x):
        return x.half().float()
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def result(d: Any, is_half: bool, nan_bits: int) -> Any:
    """D as float32 or float16, every NaN with the given bits."""
    if not is_tensor(d):
        y = d.astype(np.float16) if is_half else d
        nan = np.isnan(d)
        if nan.any():
            y = np.ascontiguousarray(y)
            y.view(np.uint16 if is_half else np.uint32)[nan] = nan_bits
        return y
    import torch

    y = d.half() if is_half else d
    bits = y.view(torch.int16 if is_half else torch.int32)
    return torch.where(d.isnan(), nan_bits, bits).to(bits.dtype).view(y.dtype)
