"""Random streams: which Philox words an operand of a layer draws.

The 64-bit key is the model's seed; the 64-bit stream says who draws and when::

    bits 32-63  call      forward calls for X and W, backward calls for dY
    bits 16-31  layer     in the order of `fpemu.nn.convert`
    bits  3-15  rank      of `torch.distributed`; 0 for weights, whose replicas must agree
    bits  0-2   operand   in the order of `fpemu.recipes.OPERANDS`

so no two draws share a word up to 2**32 calls, 2**16 layers and 2**13 ranks (beyond, fields wrap).
The index of an element in its tensor does the rest (`fpemu.rng`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fpemu.recipes import OPERANDS
from fpemu.rng import signed64

_NUMBER = {name: number for number, name in enumerate(OPERANDS)}


def ticket(seed: int, layer: int, call: int) -> Tensor:
    """The key and the upper half of the stream, as a tensor that autograd can save."""
    return torch.tensor([seed, signed64((call & 0xFFFFFFFF) << 32 | (layer & 0xFFFF) << 16)])


def user_ticket(seed: int, stream: int) -> Tensor:
    """A ticket whose 48 bits of call and layer the caller chose."""
    return torch.tensor([signed64(seed), signed64((stream << 16) & (1 << 64) - 1)])


def of_operand(ticket: Tensor, operand: str) -> tuple[int, int]:
    """Seed and stream of one operand."""
    seed, base = ticket.tolist()
    rank = 0 if operand.endswith(".w") else _rank()
    return seed, base | (rank & 0x1FFF) << 3 | _NUMBER[operand]


def draw_seed() -> int:
    """A seed from torch's global generator, which `torch.manual_seed` governs."""
    return int(torch.randint(0, (1 << 63) - 1, (), dtype=torch.int64))


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0
