"""Hadamard transforms as torch operations: for other devices, and machines without numba.

The same float32 sums in the same order as `butterfly`, so the same bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fpemu.backends.torch_ import CHUNK, _denormals


def rotate(
    x: Tensor, out: Tensor, axis: int, size: int, signs: tuple[int, ...] | None, inverse: bool
) -> None:
    """The transform of x along `axis` into `out`."""
    if x.numel() == 0:
        return
    moved = x.movedim(axis, -1)
    blocks = moved.reshape(-1, size)
    # On a CPU in small chunks: every operation then runs on this thread, whose denormal mode we set.
    step = max(CHUNK // size, 1) if x.device.type == "cpu" else len(blocks)
    result = torch.empty_like(blocks)
    with torch.no_grad(), _denormals():
        flips = None if signs is None else torch.tensor(signs, dtype=torch.float32, device=x.device)
        scale = torch.tensor(float(np.float32(size**-0.5)), dtype=torch.float32, device=x.device)
        for k in range(0, len(blocks), step):
            y = blocks[k : k + step].to(torch.float32)
            if flips is not None and not inverse:
                y = y * flips
            h = 1
            while h < size:
                a, b = y.reshape(-1, size // (2 * h), 2, h).unbind(2)
                y = torch.stack((a + b, a - b), 2)
                h *= 2
            y = y.reshape(-1, size) * scale
            if flips is not None and inverse:
                y = y * flips
            y = torch.where(torch.isnan(y), torch.nan, y)  # the canonical one
            result[k : k + step] = y.to(x.dtype)
        out.copy_(result.reshape(moved.shape).movedim(-1, axis))
