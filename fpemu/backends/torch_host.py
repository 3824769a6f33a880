"""The backends on torch tensors, on numpy arrays: for machines without numba."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from fpemu.backends import Parts, Request
from fpemu.formats import BlockFormat, Format


def tensor_of(array: np.ndarray, kind: str) -> torch.Tensor:
    """An array's memory as a tensor (a copy where torch cannot have it)."""
    if any(s < 0 for s in array.strides) or not array.flags.writeable:
        array = array.copy()
    if kind == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def tensor_request(request: Request) -> Request:
    words = request.random_bits
    return Request(
        tensor_of(request.x, request.kind), request.kind, request.fmt, request.rounding,
        request.overflow, request.axis, request.amax, request.random,
        None if words is None else torch.from_numpy(words.astype(np.int64)), request.sr_bits,
    )  # fmt: skip


def _into(out: np.ndarray, kind: str, fill) -> None:  # type: ignore[no-untyped-def]
    """Call `fill` with a tensor of out's memory, or of a copy that is written back."""
    direct = out.flags.writeable and all(s >= 0 for s in out.strides)
    landing = out if direct else np.empty(out.shape, out.dtype)
    fill(tensor_of(landing, kind))
    if not direct:
        out[...] = landing


class OnArrays:
    """A backend on tensors as one on numpy arrays."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.supports, self.__name__ = module, module.supports, module.__name__

    def quantize(self, request: Request, out: np.ndarray) -> None:
        kind = "bfloat16" if out.dtype == np.uint16 else out.dtype.name
        _into(out, kind, lambda target: self.module.quantize(tensor_request(request), target))

    def encode(self, request: Request) -> Parts:
        parts = self.module.encode(tensor_request(request))
        return Parts(*(None if p is None else p.numpy() for p in parts))

    def within(self, request: Request) -> np.ndarray:
        return self.module.within(tensor_request(request)).numpy()  # type: ignore[no-any-return]

    def decode(
        self, fmt: Format | BlockFormat, parts: Parts, axis: int, out: np.ndarray, kind: str = ""
    ) -> None:
        tensors = Parts(*(None if p is None else torch.from_numpy(np.asarray(p)) for p in parts))
        kind = "bfloat16" if out.dtype == np.uint16 else out.dtype.name
        _into(out, kind, lambda target: self.module.decode(fmt, tensors, axis, target))
