"""Run an instruction on a GPU: its PTX text, and the launch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fpemu.errors import BackendError
from fpemu.hw import device
from fpemu.hw.emulation import check_shapes, unsigned
from fpemu.hw.instructions import Instruction, get_instruction

if TYPE_CHECKING:
    import torch

#: Groups per program.
BLOCK = 512


def run(name: str, bits: torch.Tensor, rbits: torch.Tensor | None = None) -> torch.Tensor:
    """What an instruction gives, by the GPU that the bits are on.

    Parameters
    ----------
    name : str
        PTX name, for example ``"cvt.rn.satfinite.e4m3x2.f32"``; a key of `INSTRUCTIONS`.
    bits : CUDA Tensor of int32 or uint32 (f32 sources), 16 or 8 bits, any shape and strides
        As in `replay`.
    rbits : CUDA Tensor of int32 or uint32, shape (..., n / lanes), optional
        One random word per group, for the ``.rs`` forms alone.

    Returns
    -------
    Tensor of uint8, uint16 or uint32, in `bits`'s shape, on its device
        The layout of `replay`: one result per source value.

    Notes
    -----
    Special values: whatever the GPU does with them.

    Raises
    ------
    BackendError
        Where there is no GPU, the bits are not on one, or it does not have the instruction; the
        message names the instruction, what it needs and what was found.
    ValueError
        As `replay`.
    """
    row = get_instruction(name, "run")
    reason = missing(row)
    if reason is None and bits.device.type != "cuda":
        reason = f"{row.ptx} reads CUDA tensors and bits is on {bits.device}; move it with .cuda()"
    if reason is not None:
        raise BackendError(f"run: {reason}. fpemu.hw.replay says what the emulator gives.")
    words = None if rbits is None else (_name(rbits), tuple(rbits.shape))
    check_shapes(row, "run", _name(bits), tuple(bits.shape), words)
    return _launch(row, bits, rbits)


def missing(row: Instruction) -> str | None:
    """Why this machine cannot run an instruction, or None."""
    gpu = device.gpu()
    if gpu is None:
        return f"{row.ptx} needs a GPU of {row.needs} and none was found"
    if not row.runs_on(gpu.capability):
        found = "{}.{}".format(*gpu.capability)
        return f"{row.ptx} needs {row.needs} and the GPU found, {gpu.name}, has {found}"
    if find_spec("triton") is None:
        return f"{row.ptx} is launched by Triton, which is not installed"
    return None


def assembly(row: Instruction) -> tuple[str, str]:
    """The PTX of one group and its register constraints, as Triton's inline assembly takes them.

    Operands are 32-bit registers: $0 the result word, then the sources from the lowest lane up,
    then the random word. Narrower ones pass through a register of the width that PTX asks for.

    Examples
    --------
    >>> from fpemu.hw import INSTRUCTIONS
    >>> from fpemu.hw.casts import assembly
    >>> assembly(INSTRUCTIONS["cvt.rs.bf16x2.f32"])
    ('cvt.rs.bf16x2.f32 $0, $2, $1, $3;', '=r,r,r,r')
    >>> assembly(INSTRUCTIONS["cvt.rn.satfinite.e2m1x2.f32"])[0]
    '{ .reg .b8 d; cvt.rn.satfinite.e2m1x2.f32 d, $2, $1; cvt.u32.u8 $0, d; }'
    """
    count = 1 if row.packed else row.lanes
    sources = [f"${i}" for i in range(count, 0, -1)]  # PTX names the top lane first
    before = after = ""
    result = "$0"
    width = row.lanes * row.result_bits
    if width < 32:
        before, result = f".reg .b{width} d; ", "d"
        after = f" cvt.u32.u{width} $0, d;"
    width = row.lanes * row.source_bits
    if row.packed and width < 32:
        before += f".reg .b{width} s; cvt.u{width}.u32 s, $1; "
        sources = ["s"]
    operands = ", ".join(sources)
    if row.lanes == 4:
        operands = f"{{{operands}}}"
    if row.random:
        operands += f", ${count + 1}"
    text = f"{row.ptx} {result}, {operands};"
    if before:
        text = f"{{ {before}{text}{after} }}"
    return text, ",".join(["=r"] + ["r"] * (count + row.random))


def constants(row: Instruction) -> dict[str, Any]:
    """The constants of `cast_kernel` for an instruction."""
    text, constraints = assembly(row)
    return {
        "ASM": text, "CONSTRAINTS": constraints, "RANDOM": row.random, "PACKED": row.packed,
        "LANES": row.lanes, "SOURCE_BITS": row.source_bits, "RESULT_BITS": row.result_bits,
        "BLOCK": BLOCK,
    }  # fmt: skip


def _launch(row: Instruction, bits: torch.Tensor, rbits: torch.Tensor | None) -> torch.Tensor:
    import torch
    from triton.runtime.errors import PTXASError

    from fpemu.hw.cast_kernel import cast_kernel

    def signed(t: torch.Tensor) -> torch.Tensor:
        return t.view(getattr(torch, _name(t).removeprefix("u"))).contiguous()

    dtype = unsigned(row.result_bits).name
    out = torch.empty(bits.shape, dtype=getattr(torch, dtype), device=bits.device)
    groups = bits.numel() // row.lanes
    if groups:
        source = signed(bits)
        words = source if rbits is None else signed(rbits.to(bits.device))
        grid = ((groups + BLOCK - 1) // BLOCK,)
        try:
            with torch.cuda.device(bits.device):
                cast_kernel[grid](source, words, signed(out), groups, **constants(row))
        except PTXASError as error:
            raise BackendError(
                f"run: {row.ptx} needs PTX ISA {row.since_ptx}, and Triton's ptxas refuses it."
                " Update Triton."
            ) from error
    return out


def _name(t: torch.Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")
