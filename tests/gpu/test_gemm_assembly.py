"""Every family of GEMM kernels becomes PTX and machine code here, where there is no GPU."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: nothing assembles PTX")

from fpemu.backends import triton_build
from fpemu.gemm import get_unit, list_units, triton_
from fpemu.gemm import triton_kernels as kernels

#: Unit, output, and what the request adds: special values, promotion, factors.
FAMILIES = {
    "plain": ("hopper.wgmma.e4m3", "fp32", ()),
    "factors": ("hopper.wgmma.e4m3", "fp32", (True, True, True)),
    "wide": ("hopper.wgmma.bf16", "fp32", ()),
    "half": ("hopper.mma_sync.e4m3", "fp16", (True, True, False)),
    "scaled": ("blackwell.tcgen05.mxfp8_e4m3", "fp32", ()),
    "groups": ("blackwell.tcgen05.nvfp4", "fp32", ()),
    "sequential": ("fp32.sequential", "fp32", ()),
    "fused": ("fp32.fma", "fp32", ()),
}
FLOATS, INTS = "sig_a scale_a sig_b scale_b d factor_a factor_b a b", "exp_a exp_b"
POINTERS = dict.fromkeys(FLOATS.split(), "*fp32") | dict.fromkeys(INTS.split(), "*i32")
TYPES = POINTERS | dict.fromkeys(["index_a", "index_b"], "*i64")
NUMBERS = dict.fromkeys(["panels_a", "panels_b", "blocks", "late", "depth"], "i32")


@cache
def build(name: str, out: str, added: tuple[bool, ...], target: str) -> triton_build.Assembly:
    unit = get_unit(name)
    if unit.is_reference:
        kernel = kernels.reference
        constants = {"FUSED": unit.order == "fma", "ROWS": triton_.ROWS, "COLS": triton_.COLS}
    else:
        kernel, constants = kernels.gemm, triton_.constants(unit, out, *(added or (False,)))
    return triton_build.compile_kernel(
        kernel, TYPES | NUMBERS, constants, target=target, aligned=set(TYPES) & set(kernel.arg_names),
        num_warps=triton_.OPTIONS["num_warps"],
    )  # fmt: skip


@pytest.mark.parametrize("target", triton_build.TARGETS)
@pytest.mark.parametrize("family", FAMILIES)
def test_assembles_to_plain_ieee_operations(family: str, target: str) -> None:
    """Products round, subnormals stay, conversions truncate; the assembler contracts nothing."""
    made = build(*FAMILIES[family], target)
    assert f".target {target}" in made.ptx and made.cubin.startswith(b"\x7fELF")
    opcodes = triton_build.ptx_opcodes(made.ptx)
    floats = {op for op in opcodes if re.search(r"f(16|32|64)", op)}
    assert not [op for op in floats if re.match(r"fma|mad|div|rcp|ex2|lg2", op)]
    assert not [op for op in opcodes if ".ftz" in op or ".approx" in op]
    arithmetic = {op for op in floats if re.match(r"(add|sub|mul)\.", op)}
    assert arithmetic and all(".rn." in op for op in arithmetic)
    if family in ("sequential", "fused"):
        product = "mul.rn.f64" if family == "fused" else "mul.rn.f32"  # or f32x2
        assert any(op.startswith(product) for op in opcodes)
    else:
        assert opcodes["cvt.rzi.s32.f32"] >= 16
    if family == "half":
        assert "cvt.rn.f16.f32" in opcodes  # late addition, rounded on
    machine = triton_build.sass_opcodes(made.cubin)
    if machine is not None:
        assert not [op for op in machine if op.startswith(("FFMA", "DFMA"))]
        # These two divide the number of a tile, an integer.
        division = {"MUFU.RCP", "F2I.FTZ.U32.TRUNC.NTZ"}
        assert not [op for op in set(machine) - division if "MUFU" in op or ".FTZ" in op]


def test_every_unit_is_served_or_refused() -> None:
    refused = {name for name in list_units() if triton_.refuses(get_unit(name))}
    assert refused == {"exact", "fp32.pairwise"}


# What it costs -------------------------------------------------------------------------------------

#: Results per clock and SM of compute capability 9.0, by the start of the SASS opcode; the integer
#: and logic pipe for the rest. (Conversions: the lowest rate that any source gives.)
RATES = {
    "IMAD": 64, "FMUL": 128, "FADD": 128, "F2I": 16, "I2F.": 16, "LDG": 32, "MOV": 128, "": 64,
}  # fmt: skip
SMS, CLOCK, ISSUE = 132, 1.8e9, 128  # of an H200; instructions per clock and SM


def loops(cubin: bytes) -> list[tuple[int, Counter[str]]]:
    """Each loop's depth and the opcodes that are its own, in the order of the code."""
    text = triton_build._run("nvdisasm", "-c", cubin=cubin)
    if text is None:
        pytest.skip("this Triton carries no nvdisasm")
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+([^;]+);", line):
            code.append(found[1])
    jumps = [(re.search(r"BRA.*\((\.L_\w+)\)", line), end) for end, line in enumerate(code)]
    spans = sorted((labels[j[1]], end) for j, end in jumps if j and labels[j[1]] < end)
    counts = []
    for start, end in spans:
        inner = [s for s in spans if start <= s[0] and s[1] <= end and s != (start, end)]
        own = [i for i in range(start, end + 1) if not any(x <= i <= y for x, y in inner)]
        depth = sum(x <= start and end <= y for x, y in spans)
        words = [re.sub(r"^@!?U?P\w+\s+", "", code[i]).split()[0] for i in own]
        counts.append((depth, Counter(words)))
    return counts


def per_mac(name: str) -> dict[str, float]:
    """Instructions of the chain over K per multiply-add, and the clocks of the busiest pipe."""
    unit = get_unit(name)
    constants = triton_.constants(unit, "fp32")
    trips = unit.L // (unit.group if unit.group > 1 else constants["UNROLL"])
    total: Counter[str] = Counter()
    nest = loops(build(name, "fp32", (), "sm_90").cubin)
    assert [depth for depth, _ in nest] == [1, 2] + [3] * (1 if unit.group > 1 else 2)
    for depth, own in nest[1:]:
        for opcode, count in own.items():
            total[opcode] += count * (trips if depth == 3 else 1)
    outputs = triton_.ROWS * triton_.COLS // (32 * triton_.OPTIONS["num_warps"])
    pipes = dict.fromkeys(RATES, 0.0)
    for opcode, count in total.items():
        if not opcode.startswith(("U", "BRA", "NOP")):
            start = next(s for s in RATES if opcode.startswith(s))
            pipes[start] += count / (outputs * unit.L)
    instructions = sum(pipes.values())
    return {
        "instructions": instructions,
        "integer": pipes[""] + pipes["IMAD"],
        "conversions": pipes["F2I"] + pipes["I2F."],
        "loads": pipes["LDG"],
        "clocks": max(instructions / ISSUE, *(pipes[start] / RATES[start] for start in pipes)),
    }


def documented() -> dict[str, list[float]]:
    """The numbers of the table in docs/tensor_cores.md, the bound in 1e12 a second last."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "tensor_cores.md").read_text()
    rows = [
        r.strip("|").split("|") for r in text.splitlines() if re.match(r"\| `.*\* 10\^12 \|$", r)
    ]
    return {
        name.strip(" `"): [float(x.replace("* 10^12", "")) for x in numbers]
        for name, *numbers in rows
    }


@pytest.mark.parametrize("name", sorted(documented()))
def test_a_multiply_add_takes_few_instructions(name: str) -> None:
    """The busiest pipe leaves room for 1e12 multiply-adds a second, nothing is spilled, and the docs
    say so. That is a count of instructions and no measurement."""
    cost = per_mac(name)
    bound = SMS * CLOCK / cost["clocks"]
    assert cost["instructions"] < 16 and bound > 1e12
    resources = triton_build.resources(build(name, "fp32", (), "sm_90").cubin)
    assert resources is None or resources["STACK"] == resources["LOCAL"] == 0
    found = [cost[key] for key in ("instructions", "integer", "conversions", "loads")]
    # Other releases of Triton and ptxas choose other instructions.
    for said, counted in zip(documented()[name], [*found, bound / 1e12], strict=True):
        assert abs(said - counted) <= 0.1 * counted + 0.05


def test_the_documented_counts_are_there() -> None:
    assert len(documented()) >= 5
