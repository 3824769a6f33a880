"""The probes of matrix instructions: what Triton and ptxas make of them, and where operands lie."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton compiles the probes")
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

import triton.language as tl

from fpemu.backends.triton_build import TARGETS, compile_kernel, ptx_opcodes, sass_opcodes
from fpemu.hw import gemms, probe_kernels, probes

CAPABILITY = {"sm_90": (9, 0), "sm_100a": (10, 0)}
_TYPES = {"fp16": "fp16", "bf16": "bf16", "tf32": "fp32", "fp32": "fp32", "e4m3": "fp8e4nv",
          "e5m2": "fp8e5", "e2m1": "u8", "e8m0": "u8"}  # fmt: skip
_BITS = {"fp16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8}


def cases(path: str) -> list[Any]:
    return [
        pytest.param(target, row, id=f"{target} {row.name}")
        for target in TARGETS
        for row in gemms.rows(CAPABILITY[target])
        if row.path == path
    ]


def matrix_opcodes(ptx: str) -> dict[str, int]:
    waits = ("fence", "wait", "commit", "arrive")
    return {
        name: count
        for name, count in ptx_opcodes(ptx).items()
        if "mma" in name and not any(word in name for word in waits)
    }


# Assembly ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "row"), cases("mma.sync"))
def test_mma_sync_is_one_instruction(target: str, row: gemms.Gemm) -> None:
    ((_, _, depth),) = row.shapes
    counts = probes.registers(_BITS[row.a], depth, 32 if row.out == "fp32" else 16)
    pointers = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr", "d_ptr"), "*i32")
    constants = dict(zip("ABC", counts, strict=True), ASM=probes.assembly(row.name, counts))
    built = compile_kernel(probe_kernels.mma_sync, pointers, constants, target=target, num_warps=1)
    assert matrix_opcodes(built.ptx) == {row.name: 1}
    sass = sass_opcodes(built.cubin)
    if sass is None:
        pytest.skip("Triton came without nvdisasm")
    used = {name: n for name, n in sass.items() if "MMA" in name}
    fp8 = row.a[0] == "e"
    # FP8 is no FP8 unit: two FP16 instructions and, in float32, four additions.
    assert sum(used.values()) == (2 if fp8 else 1), used
    assert all(name.startswith("HMMA") for name in used), used
    adds = sum(n for name, n in sass.items() if name.startswith("FADD"))
    assert adds == (4 if fp8 and row.out == "fp32" else 0), sass


@pytest.mark.parametrize(("target", "row"), cases("tl.dot"))
def test_dot_is_the_instruction_of_the_target(target: str, row: gemms.Gemm) -> None:
    ((m, n, k),) = row.shapes
    signature = {f"{x}_ptr": f"*{_TYPES[name]}"
                 for x, name in (("a", row.a), ("b", row.b), ("c", row.out), ("d", row.out))}  # fmt: skip
    out = tl.float32 if row.out == "fp32" else tl.float16
    constants = {"M": m, "N": n, "K": k, "OUT": out}
    built = compile_kernel(probe_kernels.dot, signature, constants, target=target)
    steps = 2 if row.a == "tf32" else 1  # Triton wants 16 of K, the instruction takes 8
    if target == "sm_90":
        assert matrix_opcodes(built.ptx) == {row.name: steps}
    else:
        kind = row.name.split()[1]
        assert matrix_opcodes(built.ptx) == {f"tcgen05.mma.cta_group::1.{kind}": steps}


@pytest.mark.parametrize(("target", "row"), cases("tl.dot_scaled"))
def test_dot_scaled_is_one_block_scaled_instruction(target: str, row: gemms.Gemm) -> None:
    ((m, n, k),) = row.shapes
    scale = "fp8e4nv" if row.a == "nvfp4" else "u8"
    formats = gemms.element(row.a).name, gemms.element(row.b).name
    signature = {"a_ptr": f"*{_TYPES[formats[0]]}", "b_ptr": f"*{_TYPES[formats[1]]}",
                 "c_ptr": "*fp32", "d_ptr": "*fp32",
                 "scale_a_ptr": f"*{scale}", "scale_b_ptr": f"*{scale}"}  # fmt: skip
    group = 16 if row.a == "nvfp4" else 32
    kind = "torch.float8_e4m3fn" if row.a == "nvfp4" else "torch.uint8"
    constants = probes.scaled_constants(formats, m, n, k // group, kind)
    assert (constants["K"], constants["GROUP"]) == (k, group)
    built = compile_kernel(probe_kernels.dot_scaled, signature, constants, target=target)
    vector = {"mxf8f6f4": 1, "mxf4": 2, "mxf4nvf4": 4}[row.name.split()[1].partition("::")[2]]
    name = f"tcgen05.mma.cta_group::1.{row.name.split()[1]}.block_scale.scale_vec::{vector}X"
    assert matrix_opcodes(built.ptx) == {name: 1}


def test_hopper_has_no_block_scaled_probe() -> None:
    assert {case.values[0] for case in cases("tl.dot_scaled")} == {"sm_100a"}
    assert len(cases("tl.dot_scaled")) == 10


# Fragments: the PTX ISA's tables, written out per thread -----------------------------------------


@pytest.mark.parametrize(
    ("dtype", "depth"),
    [(torch.float16, 16), (torch.float16, 8), (torch.float32, 8), (torch.float32, 4),
     (torch.uint8, 32), (torch.uint8, 16)],
)  # fmt: skip
def test_operands_lie_where_the_ptx_isa_says(dtype: torch.dtype, depth: int) -> None:
    per = 4 // dtype.itemsize
    for rows in (16, 8):
        x = (torch.arange(3 * rows * depth).reshape(3, rows, depth) % 251).to(dtype)
        packed = probes.to_fragments(x).view(dtype).reshape(3, -1, 32, per)
        for lane in range(32):
            group, thread = lane // 4, lane % 4
            for register in range(packed.shape[1]):
                if rows == 16:  # A: registers alternate between a row and the one 8 below
                    row, half = group + 8 * (register % 2), register // 2
                else:
                    row, half = group, register
                first = thread * per + 4 * per * half
                want = x[:, row, first : first + per]
                assert torch.equal(packed[:, register, lane], want), (rows, lane, register)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_accumulators_lie_where_the_ptx_isa_says(dtype: torch.dtype) -> None:
    c = torch.arange(2 * 128).reshape(2, 16, 8).to(dtype)
    packed = probes.accumulator_to_fragments(c)
    values = packed.view(dtype).reshape(2, -1, 32, 4 // dtype.itemsize)
    for lane in range(32):
        four = values[1, :, lane].reshape(4)  # c0 .. c3
        for i in range(4):
            assert four[i] == c[1, lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2]
    assert torch.equal(probes.accumulator_from_fragments(packed, dtype), c)


def test_inline_assembly_names_each_operand_once() -> None:
    text = probes.assembly("mma.sync.X", (4, 2, 2))
    assert (
        text
        == "mma.sync.X {$0, $1}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11}; mov.b32 $2, 0; mov.b32 $3, 0;"
    )
    assert probes.registers(8, 32, 16) == (4, 2, 2)


# Interpreted -------------------------------------------------------------------------------------

INTERPRETED = """
import numpy as np, torch
from fpemu.hw import probes
rng = np.random.default_rng(0)
def small(*shape):
    return torch.from_numpy(rng.integers(-4, 5, shape).astype(np.float32))
for kind in (torch.float16, torch.float32, torch.float8_e4m3fn):
    a, b, c = small(3, 64, 32), small(3, 64, 32), small(3, 64, 64)
    d = probes.run_dot(a.to(kind), b.to(kind), c)
    assert torch.equal(d, a @ b.transpose(1, 2) + c), kind  # small integers: exact in any order
    assert not torch.equal(d, a @ b.transpose(1, 2))
print("equal")
"""


def test_dot_reads_its_operands_where_they_are() -> None:
    """Triton's interpreter multiplies in numpy: it shows the addresses, not the rounding."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.stdout.strip() == "equal", done.stderr[-2000:]


def test_teeth_another_instruction_is_seen() -> None:
    """The reader tells mma.sync from wgmma: FP8 with exact partial sums is made of FP16's."""
    signature = {"a_ptr": "*fp16", "b_ptr": "*fp16", "c_ptr": "*fp32", "d_ptr": "*fp32"}
    constants = {"M": 16, "N": 64, "K": 16, "OUT": tl.float32}  # too few rows for wgmma
    built = compile_kernel(probe_kernels.dot, signature, constants, target="sm_90")
    found = matrix_opcodes(built.ptx)
    assert found and all(re.match("mma.sync", name) for name in found)
    assert np.all([not name.startswith("wgmma") for name in found])
