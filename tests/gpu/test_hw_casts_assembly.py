"""Every instruction becomes PTX and machine code here, where there is no GPU; the PTX is read."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fpemu import BackendError, hw
from fpemu.hw import casts, device
from fpemu.hw.emulation import unsigned

pytest.importorskip("triton", reason="triton is not installed: nothing assembles PTX")

from fpemu.backends import triton_build
from fpemu.hw.cast_kernel import cast_kernel

ROWS = list(hw.INSTRUCTIONS.values())
PAIRS = [(row.ptx, target) for row in ROWS for target in row.targets]


@cache
def build(name: str, target: str, planted: tuple[tuple[str, Any], ...] = ()) -> Any:
    row = hw.INSTRUCTIONS[name]
    signature = {
        "bits_ptr": f"*i{8 * unsigned(row.source_bits).itemsize}",
        "rbits_ptr": "*i32",
        "out_ptr": f"*i{8 * unsigned(row.result_bits).itemsize}",
        "groups": "i64",
    }
    constants = casts.constants(row) | dict(planted)
    return triton_build.compile_kernel(cast_kernel, signature, constants, target=target)


def conversions(ptx: str) -> set[str]:
    """The float conversions of a PTX text with the shape of their operands."""
    found = re.findall(r"\b(cvt\.r\S+) ([^;]*);", ptx)
    return {f"{opcode} {re.sub('%r[0-9]+', 'r', operands)}" for opcode, operands in found}


def wanted(row: hw.Instruction) -> str:
    """The one conversion that a kernel has, from the text of the PTX ISA's syntax."""
    packed = row.source != "f32"
    width = row.lanes * row.result_bits
    d = "r" if width == 32 else "d"
    a = "s" if packed and row.lanes * row.source_bits < 32 else "r"
    operands = {1: a, 2: a if packed else "r, r", 4: "{r, r, r, r}"}[row.lanes]
    return f"{row.ptx} {d}, {operands}" + ", r" * row.random


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@cache
def newest() -> str:
    """The PTX ISA that this Triton writes for Blackwell: 9.1 from 3.7 on."""
    found = re.search(r"^\.version (\S+)", build("cvt.rn.tf32.f32", "sm_100a").ptx, re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_each_instruction_assembles(name: str, target: str) -> None:
    row = hw.INSTRUCTIONS[name]
    if number(row.since_ptx) > number(newest()):
        pytest.skip(f"{name} needs PTX ISA {row.since_ptx} and this triton writes {newest()}")
    built = build(name, target)
    assert conversions(built.ptx) == {wanted(row)}
    assert f".target {target.removesuffix('a')}a" in built.ptx
    assert built.cubin[:4] == b"\x7fELF"
    assert not any(".ftz" in line for line in triton_build.ptx_lines(built.ptx))
    assert re.search(rf"mul\.wide\.[us]32\s+%rd\d+, %r\d+, {casts.BLOCK};", built.ptx)  # int64


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("cvt.rn.f16x2.f32", "cvt.rz.f16x2.f32"),
        ("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e5m2x2.f32"),
        ("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.relu.e4m3x2.f32"),
    ],
)
def test_a_wrong_modifier_is_seen(name: str, wrong: str) -> None:
    row = hw.INSTRUCTIONS[name]
    text, _ = casts.assembly(row)
    built = build(name, "sm_90", (("ASM", text.replace(name, wrong)),))
    assert conversions(built.ptx) != {wanted(row)}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cvt.rn.tf32.f32", "cvt.rn.tf32.f32 $0, $1;"),
        ("cvt.rn.bf16x2.f32", "cvt.rn.bf16x2.f32 $0, $2, $1;"),
        ("cvt.rn.f16.f32", "{ .reg .b16 d; cvt.rn.f16.f32 d, $1; cvt.u32.u16 $0, d; }"),
        ("cvt.rn.f16x2.e2m1x2",
         "{ .reg .b8 s; cvt.u8.u32 s, $1; cvt.rn.f16x2.e2m1x2 $0, s; }"),
        ("cvt.rs.satfinite.e2m1x4.f32",
         "{ .reg .b16 d; cvt.rs.satfinite.e2m1x4.f32 d, {$4, $3, $2, $1}, $5; cvt.u32.u16 $0, d; }"),
        ("cvt.rs.satfinite.e4m3x4.f32", "cvt.rs.satfinite.e4m3x4.f32 $0, {$4, $3, $2, $1}, $5;"),
    ],
)  # fmt: skip
def test_the_top_lane_is_named_first(name: str, text: str) -> None:
    assert casts.assembly(hw.INSTRUCTIONS[name])[0] == text


def offsets_of_operands(ptx: str) -> list[int]:
    """Byte offsets from a group's first value of what the first conversion reads, as it names it."""
    steps = {d: (base, int(n)) for d, base, n in
             re.findall(r"add\.s64\s+(%rd\d+), (%rd\d+), (\d+);", ptx)}  # fmt: skip
    loads = dict(re.findall(r"ld\.global\.b32 \{ (%r\d+) \}, \[ (%rd\d+) \+ 0 \]", ptx))
    found = re.search(r"\bcvt\.r\S+ [^,]*, ([^;]*);", ptx)
    assert found is not None
    offsets = []
    for register in re.findall(r"%r\d+", found[1]):
        address, offset = loads[register], 0
        while address in steps:
            address, step = steps[address]
            offset += step
        offsets.append(offset)
    return offsets


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("cvt.rn.f16x2.f32", [4, 0]),
        ("cvt.rn.satfinite.e2m1x2.f32", [4, 0]),
        ("cvt.rs.satfinite.e4m3x4.f32", [12, 8, 4, 0, 0]),  # and the random word
    ],
)
def test_the_top_lane_is_the_last_value_in_memory(name: str, want: list[int]) -> None:
    assert offsets_of_operands(build(name, "sm_100a").ptx) == want


# What is refused ---------------------------------------------------------------------------------


def rejected(rows: list[hw.Instruction], target: str, version: str = "") -> dict[str, str]:
    """Which instructions ptxas refuses for a target, and what it says."""
    version = version or newest()
    from triton import backends

    ptxas = Path(backends.__file__).parent / "nvidia" / "bin" / "ptxas-blackwell"
    if not ptxas.exists():
        pytest.skip("this triton carries no ptxas for Blackwell")
    head = [f".version {version}", f".target {target}", ".address_size 64",
            ".visible .entry k()", "{", ".reg .b32 %r<9>;"]  # fmt: skip
    body = [re.sub(r"\$(\d)", r"%r\1", casts.assembly(row)[0]) for row in rows]
    text = "\n".join([*head, *body, "ret;", "}", ""])
    done = subprocess.run(
        [str(ptxas), f"-arch={target}", "-o", "/dev/null", "/dev/stdin"],
        input=text, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    found: dict[str, str] = {}
    for number, message in re.findall(r"line (\d+); error\s*: (.*)", done.stdout + done.stderr):
        found.setdefault(rows[int(number) - len(head) - 1].ptx, message)
    unknown = re.search(r"Unsupported \.version|is not defined for option 'gpu-name'", done.stderr)
    if unknown is not None:
        pytest.skip(f"this triton's ptxas does not know {target} or PTX ISA {version}")
    assert bool(found) == (done.returncode != 0), done.stderr
    return found


def late(version: str) -> set[str]:
    """Instructions that a PTX ISA does not have yet."""
    return {row.ptx for row in ROWS if number(row.since_ptx) > number(version)}


@pytest.mark.parametrize(
    ("target", "capability"),
    [
        ("sm_80", (8, 0)), ("sm_89", (8, 9)), ("sm_90", (9, 0)), ("sm_90a", (9, 0)),
        ("sm_100a", (10, 0)), ("sm_103a", (10, 3)), ("sm_110a", (11, 0)), ("sm_120a", (12, 0)),
        ("sm_121a", (12, 1)),
    ],
)  # fmt: skip
def test_the_assembler_refuses_what_the_table_does(
    target: str, capability: tuple[int, int]
) -> None:
    absent = {row.ptx for row in ROWS if not row.runs_on(capability)}
    assert set(rejected(ROWS, target)) == absent | late(newest())
    assert (len(absent) > 0) == (capability not in ((10, 0), (10, 3)))


def test_blackwell_needs_the_a_target() -> None:
    """Plain sm_100 has none of the FP6, FP4, UE8M0 and .rs forms; Triton asks for sm_100a."""
    plain = {row.ptx for row in ROWS if row.runs_on((9, 0)) or row.ptx.endswith("tf32.f32")}
    assert set(rejected(ROWS, "sm_100")) == {row.ptx for row in ROWS} - plain


@pytest.mark.parametrize("version", ["7.0", "7.8", "8.1", "8.6", "8.7", "9.0"])
def test_each_instruction_is_as_old_as_the_table_says(version: str) -> None:
    assert late(version)
    assert set(rejected(ROWS, "sm_100a", version)) == late(version)


@pytest.mark.parametrize(
    ("like", "name", "message"),
    [
        ("cvt.rn.bf16.f32", "cvt.rna.bf16.f32", "rounding modifier"),
        ("cvt.rn.f16.f32", "cvt.rna.f16.f32", "rounding modifier"),
        ("cvt.rn.f16x2.f32", "cvt.rm.f16x2.f32", ""),
        ("cvt.rna.tf32.f32", "cvt.rna.relu.tf32.f32", ""),
        ("cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.e4m3x2.f32", "'.satfinite' modifier required"),
        ("cvt.rn.satfinite.e4m3x2.f32", "cvt.rz.satfinite.e4m3x2.f32", "rounding modifier"),
        ("cvt.rn.satfinite.e2m1x2.f32", "cvt.rs.satfinite.e2m1x2.f32", ""),
        ("cvt.rz.ue8m0x2.f32", "cvt.rn.ue8m0x2.f32", "rounding modifier"),
        ("cvt.rn.bf16x2.ue8m0x2", "cvt.rn.f16x2.ue8m0x2", ""),
        ("cvt.rn.f16x2.e4m3x2", "cvt.rn.bf16x2.e4m3x2", ""),
        ("cvt.rs.satfinite.e4m3x4.f32", "cvt.rs.e4m3x4.f32", "'.satfinite' modifier required"),
        ("cvt.rn.f16.f32", "cvt.rs.f16.f32", ""),
    ],
)
def test_what_no_gpu_has(like: str, name: str, message: str) -> None:
    assert name not in hw.INSTRUCTIONS
    row = dataclasses.replace(hw.INSTRUCTIONS[like], ptx=name)
    assert message.lower() in rejected([row], "sm_100a")[name].lower()


def test_rna_to_tf32_is_written_out_in_integers() -> None:
    """What `replay` says of its NaNs is read here: add 0x1000, cut 13 bits, one step down."""
    for name, steps in (("cvt.rna.tf32.f32", 4), ("cvt.rna.satfinite.tf32.f32", 8)):
        for target in ("sm_90", "sm_100a"):
            lines = triton_build.sass_lines(build(name, target).cubin)
            assert lines is not None
            assert not any(line.startswith("F2F") for line in lines)
            assert sum("0xffffe000, RZ, 0xc0" in line for line in lines) == 4  # values of a thread
            compared = [line for line in lines if "FSETP.GEU" in line and "|, +INF" in line]
            assert len(compared) == steps, lines
    assert any(line.startswith("F2FP.TF32") for line in
               triton_build.sass_lines(build("cvt.rn.tf32.f32", "sm_90").cubin) or ())  # fmt: skip


# What is said where it cannot run ----------------------------------------------------------------


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(device, "gpu", lambda: None)
    with pytest.raises(BackendError) as caught:
        hw.run("cvt.rn.satfinite.e4m3x2.f32", torch.zeros(2, dtype=torch.int32))
    assert str(caught.value) == (
        "run: cvt.rn.satfinite.e4m3x2.f32 needs a GPU of compute capability 8.9 or later and none"
        " was found. fpemu.hw.replay says what the emulator gives."
    )


def test_the_wrong_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(device, "gpu", lambda: device.Gpu("NVIDIA H200", (9, 0)))
    zeros = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(
        BackendError,
        match=r"e2m1x4.f32 needs compute capability 10.0 or 10.3 and the GPU found, NVIDIA H200,"
        r" has 9.0",
    ):
        hw.run("cvt.rs.satfinite.e2m1x4.f32", zeros, zeros[:1])
    with pytest.raises(BackendError, match="reads CUDA tensors and bits is on cpu"):
        hw.run("cvt.rn.f16x2.f32", zeros)


def test_runs_on() -> None:
    has = {
        "cvt.rn.f16.f32": [(8, 0), (9, 0), (12, 0)],
        "cvt.rn.satfinite.e4m3x2.f32": [(8, 9), (9, 0), (10, 3)],
        "cvt.rn.satfinite.e2m1x2.f32": [(10, 0), (10, 3), (12, 0)],
        "cvt.rs.f16x2.f32": [(10, 0), (10, 3)],
    }
    every = [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
    for name, some in has.items():
        runs = [c for c in every if hw.INSTRUCTIONS[name].runs_on(c)]
        assert set(some) <= set(runs) and (7, 5) not in runs, name
    assert not hw.INSTRUCTIONS["cvt.rs.f16x2.f32"].runs_on((12, 0))
