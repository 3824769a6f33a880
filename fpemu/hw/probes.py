"""Single matrix instructions on a GPU: one, or as few as Triton will make.

`run_mma_sync` is inline PTX: a warp holds one matrix product in its registers, laid out as the PTX ISA
says (9.7.14, fragments of ``mma.m16n8k*``). `run_dot` and `run_dot_scaled` leave it to Triton, which makes
``wgmma`` of them on sm_90 and ``tcgen05.mma`` on sm_100a; tests read that in the PTX.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LANES = 32
#: Rows and columns of the product that one ``mma.sync`` makes.
ROWS, COLS = 16, 8


# mma.sync: text, registers, fragments ------------------------------------------------------------


def registers(bits: int, depth: int, c_bits: int) -> tuple[int, int, int]:
    """32-bit registers of a thread for A, B and C.

    Parameters
    ----------
    bits, c_bits : int
        Bits of an element of A and B, and of C.
    depth : int
        K of the instruction.

    Examples
    --------
    >>> registers(16, 16, 32)
    (4, 2, 4)
    """
    return ROWS * depth * bits // 1024, COLS * depth * bits // 1024, ROWS * COLS * c_bits // 1024


def assembly(ptx: str, counts: tuple[int, int, int]) -> str:
    """The inline PTX of `mma_sync`: results $0 to $3, then A from $4, B from $8, C from $10.

    Examples
    --------
    >>> assembly("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", (2, 1, 4))
    'mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {$0, $1, $2, $3}, {$4, $5}, {$8}, {$10, $11, $12, $13};'
    """

    def braces(first: int, count: int) -> str:
        return "{" + ", ".join(f"${i}" for i in range(first, first + count)) + "}"

    a, b, c = counts
    operands = ", ".join(map(braces, (0, 4, 8, 10), (c, a, b, c)))
    unused = "".join(f" mov.b32 ${i}, 0;" for i in range(c, 4))
    return f"{ptx} {operands};{unused}"


def to_fragments(x: torch.Tensor) -> torch.Tensor:
    """Operand A [batch, 16, K] or B as [batch, 8, K] as int32 registers [batch, registers, 32].

    Register r of lane t holds the elements of row ``t//4 + 8*(r%2)`` (A; B has 8 rows alone) that
    start at column ``t%4 * E + 4*E*(r//2)``, E being the elements that 32 bits hold.
    """
    import torch

    batch, rows, depth = x.shape
    per = 4 // x.element_size()
    tiles = x.contiguous().reshape(batch, rows // 8, 8, depth // (4 * per), 4, per)
    order = tiles.permute(0, 3, 1, 2, 4, 5).contiguous()  # K half, row half, row, thread, element
    return order.view(torch.int32).reshape(batch, -1, LANES)


def accumulator_to_fragments(c: torch.Tensor) -> torch.Tensor:
    """C [batch, 16, 8] as registers: lane t holds row ``t//4`` and, last, ``t//4 + 8``."""
    import torch

    batch = c.shape[0]
    per = 4 // c.element_size()
    tiles = c.contiguous().reshape(batch, 2, 8, 4, 2 // per, per)  # row half, row, thread, pair
    order = tiles.permute(0, 1, 4, 2, 3, 5).contiguous()
    return order.view(torch.int32).reshape(batch, -1, LANES)


def accumulator_from_fragments(registers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse: D [batch, 16, 8]."""
    batch = registers.shape[0]
    per = 4 // dtype.itemsize
    tiles = registers.contiguous().view(dtype).reshape(batch, 2, 2 // per, 8, 4, per)
    return tiles.permute(0, 1, 3, 4, 2, 5).reshape(batch, ROWS, COLS).contiguous()


# Launching ---------------------------------------------------------------------------------------


def _on(device: torch.device) -> Any:
    """Launch there; interpreted kernels take host tensors."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def run_mma_sync(ptx: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """D [batch, 16, 8] of A [batch, 16, K], B as [batch, 8, K] and C, one instruction each."""
    import torch

    from fpemu.hw.probe_kernels import mma_sync

    counts = registers(8 * a.element_size(), a.shape[-1], 8 * c.element_size())
    operands = to_fragments(a), to_fragments(b), accumulator_to_fragments(c)
    d = torch.empty_like(operands[2])
    with _on(a.device):
        mma_sync[(a.shape[0],)](*operands, d, assembly(ptx, counts), *counts, num_warps=1)
    return accumulator_from_fragments(d, c.dtype)


def run_dot(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """D [batch, M, N] of A [batch, M, K], B as [batch, N, K] and C."""
    import torch
    import triton.language as tl

    from fpemu.hw.probe_kernels import dot

    (batch, m, k), n = a.shape, b.shape[1]
    d = torch.empty_like(c)
    out = tl.float16 if c.dtype == torch.float16 else tl.float32
    with _on(a.device):
        dot[(batch,)](a, b, c, d, m, n, k, out, num_warps=4)
    return d


def run_dot_scaled(
    a: torch.Tensor, scale_a: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor,
    c: torch.Tensor, formats: tuple[str, str],
) -> torch.Tensor:  # fmt: skip
    """D of block-scaled operands: codes (FP4 packed along K) and scale codes along K."""
    import torch

    from fpemu.hw.probe_kernels import dot_scaled

    batch, m, n = c.shape
    constants = scaled_constants(formats, m, n, scale_a.shape[-1], str(scale_a.dtype))
    d = torch.empty_like(c)
    with _on(a.device):
        dot_scaled[(batch,)](a, scale_a, b, scale_b, c, d, **constants, num_warps=4)
    return d


def scaled_constants(
    formats: tuple[str, str], m: int, n: int, scales: int, scale_type: str
) -> dict[str, Any]:
    """The constants of `dot_scaled`: 16 of K share a scale where that is E4M3, else 32."""
    group = 16 if "e4m3" in scale_type else 32
    pack = [2 if name == "e2m1" else 1 for name in formats]
    return {
        "M": m, "N": n, "K": group * scales, "GROUP": group,
        "A": formats[0], "B": formats[1], "PACK_A": pack[0], "PACK_B": pack[1],
    }  # fmt: skip
