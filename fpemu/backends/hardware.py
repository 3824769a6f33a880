"""The GPU's own ``cvt`` instructions as a backend: the scales by their rule, the elements by it.

Scales are computed as `fpemu.backends.torch_` computes them, on the tensor's GPU; then the values
that are left go through one instruction of `fpemu.hw`, as raw bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fpemu.backends import NARROW_KINDS, Parts, Request, element_format
from fpemu.dialects import dialect_of
from fpemu.formats import TF32, Format

if TYPE_CHECKING:
    from torch import Tensor

    from fpemu.hw.instructions import Instruction


@lru_cache(maxsize=256)
def instruction(element: Format, rounding: str, overflow: str) -> Instruction | str:
    """The instruction that casts float32 to a format, or why there is none."""
    from fpemu.hw.instructions import INSTRUCTIONS, ROUNDINGS

    if rounding == "sr":
        return (
            "the .rs instructions share a random word among 2 or 4 elements, which encode's words,"
            " one for each, are not; fpemu.hw.run takes theirs and fpemu.cvt_rs replays them"
        )
    if element.name == "e8m0":
        return "cvt.*.ue8m0x2 drops the sign, and 'e8m0' gives NaN for negative values"
    if element == TF32 and rounding == "rna":
        return "cvt.rna.tf32 is no instruction of any GPU: ptxas writes it out in integers"
    saturates = overflow == "sat" or element.special == "finite"
    fitting = [
        row
        for row in INSTRUCTIONS.values()
        if row.destination_format == element
        and row.source == "f32"
        and ROUNDINGS[row.rounding] == rounding
        and row.satfinite == saturates
        and not row.relu
    ]
    if not fitting:
        return f"no cvt instruction rounds to {element.name!r} by {rounding!r} with {overflow!r}"
    return max(fitting, key=lambda row: row.lanes)


def supports(request: Request) -> str | None:
    """Why this backend cannot serve `request`, or None."""
    from fpemu.hw.casts import missing

    if dialect_of(request.fmt) is not None:
        return f"{request.fmt.name!r} is cast by its library's rule; use {_plain(request)!r}"
    if request.kind not in NARROW_KINDS:
        return f"the instructions' source is float32, which does not hold every {request.kind}"
    row = instruction(element_format(request.fmt), request.rounding, request.overflow)
    if isinstance(row, str):
        return row
    reason = missing(row)
    device = getattr(getattr(request.x, "device", None), "type", "cpu")  # numpy: the host
    if reason is None and device != "cuda":
        reason = f"{row.ptx} reads CUDA tensors and x is in host memory; move it with x.cuda()"
    return reason


def _plain(request: Request) -> str:
    """A dialect's format by its rule in the package: ``nvfp4`` for ``nvfp4/torchao``."""
    return request.fmt.name.split("/")[0]


def encode(request: Request) -> Parts:
    """Codes and scales of x, a CUDA tensor."""
    import torch

    from fpemu.backends import torch_

    row = instruction(element_format(request.fmt), request.rounding, request.overflow)
    assert not isinstance(row, str)
    if isinstance(request.fmt, Format):
        return Parts(_cast(row, request.x.to(torch.float32)), None, None)

    def codes(request: Request, chunk: Any, granule: Any, scaled: torch_.Scaled) -> Tensor:
        # Float32 holds the scaled values, but for those of MX blocks below 2**-149: they are
        # rounded there, and lie so far below half a step that the element is the same zero.
        found = _cast(row, torch_._store(scaled.value, torch.float32)).to(torch.int64)
        return found if scaled.bad is None else found.masked_fill(scaled.bad.unsqueeze(-1), 0)

    return torch_.encode(request, codes)


def quantize(request: Request, out: Tensor) -> None:
    """Values of ``decode(encode(x))`` into `out`, each rounded once into its dtype."""
    decode(request.fmt, encode(request), request.axis, out)


def decode(fmt: Any, parts: Parts, axis: int, out: Tensor) -> None:
    """Values of codes and scales into `out`: multiplication, which no ``cvt`` does."""
    from fpemu.backends import torch_

    torch_.decode(fmt, parts, axis, out)


def within(request: Request) -> Tensor:
    """Where the value that is cast lies in ±max: decided before any instruction."""
    from fpemu.backends import torch_

    return torch_.within(request)


def _cast(row: Instruction, x: Tensor) -> Tensor:
    """Codes of float32 values, in x's shape."""
    import torch

    from fpemu.hw.casts import run

    bits = x.detach().resolve_neg().view(torch.int32).reshape(-1)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % row.lanes))
    codes = run(row.ptx, bits)[: x.numel()].view(x.shape)
    if row.destination == "tf32":  # the register holds float32 bits
        codes = (codes.view(torch.int32) >> 13 & (1 << TF32.bits) - 1).view(torch.uint32)
    return codes
