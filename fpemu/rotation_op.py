"""`fpemu.hadamard` as a torch operator: compiled graphs, fake tensors, gradients, vmap.

The transform is linear, so its gradient is its transpose.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fpemu import rotation

_LIBRARY = torch.library.Library("fpemu", "FRAGMENT")
_LIBRARY.define(
    "hadamard(Tensor x, int size, str signs, int axis, bool inverse) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _hadamard(x: Tensor, size: int, signs: str, axis: int, inverse: bool) -> Tensor:
    box, axis = rotation._checked(x, axis, size, "hadamard")
    result = torch.empty_like(x)
    vector = rotation.sign_vector(signs, size)
    rotation._rotate(box, result, axis, size, vector, inverse)
    return result


def _fake_hadamard(x: Tensor, size: int, signs: str, axis: int, inverse: bool) -> Tensor:
    rotation._checked(x, axis, size, "hadamard")
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rest = inputs[1:]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    size, signs, axis, inverse = ctx.rest
    return hadamard(gradient, size, signs, axis, not inverse), None, None, None, None


def _over_batch(
    info: Any, in_dims: tuple[Any, ...], x: Tensor, size: int, signs: str, axis: int, inverse: bool
) -> tuple[Tensor, int]:
    x = x.movedim(in_dims[0], 0)
    return hadamard(x, size, signs, axis if axis < 0 else axis + 1, inverse), 0


_LIBRARY.impl("hadamard", _hadamard, "CompositeExplicitAutograd")
torch.library.register_fake("fpemu::hadamard", _fake_hadamard, lib=_LIBRARY)
torch.library.register_autograd(
    "fpemu::hadamard", _backward, setup_context=_setup_context, lib=_LIBRARY
)
torch.library.register_vmap("fpemu::hadamard", _over_batch, lib=_LIBRARY)


def hadamard(x: Tensor, size: int, signs: str, axis: int, inverse: bool) -> Tensor:
    """`fpemu.hadamard` through the dispatcher; `signs` as `fpemu.rotation.spell_signs` writes it."""
    return torch.ops.fpemu.hadamard(x, size, signs, axis, inverse)
