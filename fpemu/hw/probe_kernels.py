"""Kernels that run one matrix instruction, or as few as Triton will make of a small product."""

# mypy: ignore-errors
# Triton compiles the text of the functions; their arguments have no Python types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mma_sync(
    a_ptr, b_ptr, c_ptr, d_ptr, ASM: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """One warp, one instruction: fragments of A, B and C 32-bit registers per thread."""
    at = tl.program_id(0).to(tl.int64) * 32
    lane = tl.arange(0, 32)
    a = a_ptr + at * A + lane
    b = b_ptr + at * B + lane
    c = c_ptr + at * C + lane
    d = d_ptr + at * C + lane
    a0 = tl.load(a)
    a1 = tl.load(a + 32)
    a2, a3 = a1, a1
    if A == 4:
        a2, a3 = tl.load(a + 64), tl.load(a + 96)
    b0 = tl.load(b)
    b1 = b0
    if B == 2:
        b1 = tl.load(b + 32)
    c0 = tl.load(c)
    c1 = tl.load(c + 32)
    c2, c3 = c1, c1
    if C == 4:
        c2, c3 = tl.load(c + 64), tl.load(c + 96)
    d0, d1, d2, d3 = tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    tl.store(d, d0)
    tl.store(d + 32, d1)
    if C == 4:
        tl.store(d + 64, d2)
        tl.store(d + 96, d3)


@triton.jit
def dot(
    a_ptr, b_ptr, c_ptr, d_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, OUT: tl.constexpr
):
    """D = A @ B + C of one small matrix a program; B is stored [N, K]."""
    at = tl.program_id(0).to(tl.int64)
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    a = tl.load(a_ptr + at * (M * K) + m * K + k[None, :])
    b = tl.load(b_ptr + at * (N * K) + n * K + k[:, None])
    c = tl.load(c_ptr + at * (M * N) + m * N + n)
    d = tl.dot(a, b, acc=c, input_precision="tf32", out_dtype=OUT)
    tl.store(d_ptr + at * (M * N) + m * N + n, d)


@triton.jit
def dot_scaled(
    a_ptr, scale_a_ptr, b_ptr, scale_b_ptr, c_ptr, d_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, PACK_A: tl.constexpr, PACK_B: tl.constexpr,
):  # fmt: skip
    """The same with a scale per GROUP of K; FP4 is packed, PACK elements a byte."""
    at = tl.program_id(0).to(tl.int64)
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    ka, kb = tl.arange(0, K // PACK_A)[None, :], tl.arange(0, K // PACK_B)[:, None]
    s = tl.arange(0, K // GROUP)[None, :]
    a = tl.load(a_ptr + at * (M * K // PACK_A) + m * (K // PACK_A) + ka)
    b = tl.load(b_ptr + at * (N * K // PACK_B) + n * (K // PACK_B) + kb)
    scale_a = tl.load(scale_a_ptr + at * (M * K // GROUP) + m * (K // GROUP) + s)
    row = tl.arange(0, N)[:, None]
    scale_b = tl.load(scale_b_ptr + at * (N * K // GROUP) + row * (K // GROUP) + s)
    c = tl.load(c_ptr + at * (M * N) + m * N + n)
    d = tl.dot_scaled(a, scale_a, A, b, scale_b, B, acc=c)
    tl.store(d_ptr + at * (M * N) + m * N + n, d)
