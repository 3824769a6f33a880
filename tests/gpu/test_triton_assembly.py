"""Every family of quantizer kernels, assembled for sm_90 and sm_100a without a GPU, and read.

What is compiled is what a launch would compile: the backend runs with `launch` replaced. In a
process that interprets kernels (``TRITON_INTERPRET=1``) there is nothing to compile.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="triton is not installed: nothing to assemble")

import triton.language as tl  # noqa: E402

import fpemu  # noqa: E402
from fpemu.backends import Parts, Request, scales_dtype, scales_shape, triton_build  # noqa: E402
from fpemu.backends import triton_ as backend  # noqa: E402
from fpemu.formats import BlockFormat, get_format  # noqa: E402
from fpemu.rng import Random  # noqa: E402

if backend.INTERPRETED:
    pytest.skip("TRITON_INTERPRET is set: kernels are not compiled", allow_module_level=True)


class Launch(NamedTuple):
    kernel: Any
    grid: int
    warps: int
    device: Any
    arguments: Any
    constants: Any

    def build(self, target: str) -> triton_build.Assembly:
        return triton_build.compile_launch(
            self.kernel, self.arguments, self.constants, target=target, num_warps=self.warps
        )


def launches(monkeypatch: pytest.MonkeyPatch, run: Any) -> list[Launch]:
    found: list[Launch] = []
    monkeypatch.setattr(backend, "launch", lambda *a: found.append(Launch(*a)))
    backend._unscaled.cache_clear()
    run()
    backend._unscaled.cache_clear()
    return found


def request(x: Any, fmt: str, rounding: str = "rne", **rest: Any) -> Request:
    row = get_format(fmt)
    overflow = (row.element if isinstance(row, BlockFormat) else row).overflow
    random = Random(1) if rounding == "sr" else None
    rest.setdefault("axis", x.dim() - 1)
    kind = str(x.dtype).removeprefix("torch.")
    return Request(x, kind, row, rounding, rest.pop("overflow", overflow), random=random, **rest)


def empty(dtype: str, shape: tuple[int, ...] = (64, 256)) -> Any:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


#: One of each way of scaling, of treating what has no code, and of decoding.
DIALECTS = [
    ("nvfp4/te-ref", "bfloat16", "bfloat16", {}),
    ("nvfp4/te-ref", "bfloat16", "codes", {"axis": 0}),
    ("nvfp4/te-ref", "bfloat16", "within", {}),
    ("nvfp4/te-fast", "float32", "codes", {}),
    ("nvfp4/te-4over6-mse-256", "bfloat16", "codes", {}),
    ("nvfp4/te-4over6-mae-256-fast", "float32", "float32", {"shape": (7, 33)}),
    ("nvfp4/fouroversix-mae", "bfloat16", "bfloat16", {}),
    ("nvfp4/fouroversix-absmax", "float32", "codes", {"axis": 0}),
    ("nvfp4/modelopt", "float16", "float16", {}),
    ("nvfp4/torchao", "float32", "float64", {}),
    ("nvfp4/quark", "bfloat16", "codes", {"rounding": "sr"}),
    ("mxfp4/modelopt", "bfloat16", "bfloat16", {"rounding": "rnz"}),
    ("mxfp4/qutlass-absmax", "bfloat16", "bfloat16", {}),
    ("mxfp8_e5m2/torchao-0.18-even", "float64", "codes", {}),
    ("mxfp8_e4m3/te", "float32", "bfloat16", {}),
    ("mxint8/compressed-tensors", "bfloat16", "codes", {}),
]


def _family(name: str) -> Any:
    """What one family launches."""

    def quantize(fmt: str, kind: str, out: str, rounding: str = "rne", **rest: Any) -> Any:
        x = empty(kind, rest.pop("shape", (64, 256)))
        rotation = rest.pop("rotation", None)
        ask = request(x, fmt, rounding, **rest)
        if out == "codes":
            return lambda: backend.encode(ask, rotation)
        if out == "within":
            return lambda: backend.within(ask)
        return lambda: backend.quantize(ask, empty(out, x.shape), rotation)

    def decode(fmt: str, out: str) -> Any:
        row = get_format(fmt)
        code = (row.element if isinstance(row, BlockFormat) else row).code_dtype.name
        codes, scales, tensor = empty(code), None, None
        if isinstance(row, BlockFormat):
            shape = scales_shape(row, (64, 256), 1)
            scales = None if shape is None else empty(scales_dtype(row).name, shape)
            tensor = empty("float32", ()) if row.tensor_scaled else None
        return lambda: backend.decode(row, Parts(codes, scales, tensor), 1, empty(out))

    families = {
        "far strides": quantize("mxfp4", "bfloat16", "bfloat16", shape=(64, 1 << 27), axis=0),
        "columns": quantize("nvfp4", "bfloat16", "bfloat16", axis=0),
        "odd sizes": quantize("mxfp4", "float32", "float32", shape=(7, 33)),
        "odd sizes, sr": quantize("e4m3", "float32", "float32", "sr", shape=(7, 33)),
        "stochastic codes": quantize("nvfp4", "bfloat16", "codes", "sr"),
        "stochastic, general": quantize("e8m0", "float32", "codes", "sr"),
        "nonsat": quantize("e4m3", "float32", "float32", overflow="nonsat"),
        "rotated": quantize("nvfp4", "bfloat16", "codes", rotation=backend.Rotation(16, None)),
        "rotated columns, sr": quantize(
            "nvfp4", "bfloat16", "bfloat16", "sr", axis=0, rotation=backend.Rotation(16, None)
        ),
        "rotated by 128": quantize(
            "mxfp4", "float32", "codes", rotation=backend.Rotation(128, None)
        ),
    }
    for fmt in ("e4m3", "bf16", "nvfp4", "mxfp4", "fp8_block_e4m3"):
        for kind, out in (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "codes")):
            families[f"{fmt} {kind} {out}"] = quantize(fmt, kind, out)
        families[f"{fmt} float32 float64"] = quantize(fmt, "float32", "float64")
        families[f"{fmt} within"] = quantize(fmt, "bfloat16", "within")
        families[f"decode {fmt}"] = decode(fmt, "bfloat16")
        families[f"{fmt} rtp"] = quantize(fmt, "float32", "float16", "rtp")
    for fmt, kind in itertools.product(("fp16", "mxfp8_e5m2"), ("float64", "int64", "uint32")):
        families[f"{fmt} {kind}"] = quantize(fmt, kind, "float32")

    def measure(fmt: str) -> Any:
        ask, parts = request(empty("bfloat16"), fmt, "sr"), empty("float64", (0, backend.MEASURES))

        def run() -> None:
            call = backend._Call(ask)
            call.run(parts, "stats", call.scales())

        return run

    families["measures"] = measure("nvfp4")
    families["measures of a dialect"] = measure("nvfp4/te-ref")
    for fmt, kind, out, rest in DIALECTS:
        families[f"{fmt} {kind} {out}"] = quantize(fmt, kind, out, **rest)
    for fmt in ("nvfp4/te-ref", "nvfp4/fouroversix-mae", "nvfp4/modelopt", "mxfp8_e4m3/te"):
        families[f"decode {fmt}"] = decode(fmt, "bfloat16")
    for fmt in ("int8", "e8m0", "ue4m3", "e4m3fnuz", "nvfp4/2d", "fp8_block_e4m3/2d/fp32"):
        families[f"{fmt} bfloat16"] = quantize(fmt, "bfloat16", "bfloat16")
    return families if name == "" else families[name]


def faults(ptx: str) -> list[str]:
    """Instructions that contract a product, flush subnormals or are not IEEE's."""
    wrong = re.compile(r"^fma\.|\.ftz\b|\.approx\b|^div\.full|^(ex2|lg2|sin|cos|rcp|rsqrt)\.")
    return sorted(op for op in triton_build.ptx_opcodes(ptx) if wrong.search(op))


@pytest.mark.parametrize("target", triton_build.TARGETS)
@pytest.mark.parametrize("name", _family(""))
def test_kernels_assemble(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches(monkeypatch, _family(name))
    assert found
    for launch in found:
        built = launch.build(target)
        assert built.cubin.startswith(b"\x7fELF") and f".target {target.rstrip('a')}" in built.ptx
        assert not faults(built.ptx), built.name
        if built.name != "scalars_kernel":
            assert addresses_are_wide(built.ptx)
            used = triton_build.resources(built.cubin)
            assert used is None or used["STACK"] == used["LOCAL"] == 0, f"{name} spills: {used}"


def addresses_are_wide(ptx: str) -> bool:
    """Offsets of tiles are 64-bit products, and every access goes through a 64-bit register."""
    lines = triton_build.ptx_lines(ptx)
    opcodes = Counter(line.split()[0] for line in lines)
    products = sum(
        n for op, n in opcodes.items() if re.match(r"(mul|mad)\.(lo\.s64|wide)|shl\.b64", op)
    )
    accesses = [line for line in lines if re.match(r"(ld|st)\.global|atom\.", line)]
    return products > 0 and all(re.search(r"\[ ?%rd\d+", line) for line in accesses)


def test_dialects_divide_correctly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a library divides, the quotient is rounded once; where it multiplies, none is formed."""
    for name, divides in (
        ("nvfp4/modelopt float16 float16", True),
        ("nvfp4/te-ref bfloat16 bfloat16", False),
    ):
        built = launches(monkeypatch, _family(name))[-1].build("sm_90")
        opcodes = triton_build.ptx_opcodes(built.ptx)
        assert (opcodes["div.rn.f32"] > 0) == divides, name
        assert not any("f64" in op for op in opcodes), name


def test_stores_and_loads_are_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense tensor moves 16 bytes an instruction."""
    for name in ("e4m3 bfloat16 bfloat16", "nvfp4 bfloat16 bfloat16", "mxfp4 float32 float32"):
        built = launches(monkeypatch, _family(name))[-1].build("sm_90")
        opcodes = triton_build.ptx_opcodes(built.ptx)
        assert any(re.match(r"ld\.global\.v4\.b32", op) for op in opcodes), name
        assert any(re.match(r"st\.global\.v4\.b32", op) for op in opcodes), name


#: SASS instructions per element on sm_90 that leave a kernel bound by memory, with some room: an
#: H200 issues 30 per bfloat16 element, 60 per float32 element, in the time the memory takes.
BUDGETS = {
    "e4m3 bfloat16 bfloat16": 17, "e4m3 float32 float32": 17, "mxfp4 bfloat16 bfloat16": 23,
    "mxfp4 float32 float32": 30, "nvfp4 bfloat16 bfloat16": 27, "nvfp4 float32 float32": 30,
}  # fmt: skip


@pytest.mark.parametrize("name", BUDGETS)
def test_instructions_per_element(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, kind, _ = name.split()
    x = empty(kind, (4096, 4096))
    found = launches(monkeypatch, lambda: backend.quantize(request(x, fmt), torch.empty_like(x)))
    launch = found[-1]
    opcodes = triton_build.sass_opcodes(launch.build("sm_90").cubin)
    if opcodes is None:
        pytest.skip("this Triton carries no nvdisasm")
    elements = launch.constants["BR"] * launch.constants["BC"] / (32 * launch.warps)
    assert sum(opcodes.values()) / elements <= BUDGETS[name]


# The reader can fail -----------------------------------------------------------------------------


@triton.jit
def _planted(x_ptr, y_ptr, N: tl.constexpr, WHAT: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    if WHAT == "fma":
        y = tl.fma(x, x, x)
    elif WHAT == "ftz":
        y = tl.inline_asm_elementwise(
            "mul.ftz.f32 $0, $1, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    elif WHAT == "divide":
        y = x / (x + 1)
    elif WHAT == "exp2":
        y = tl.exp2(x)
    else:
        y = x * x + x
    tl.store(y_ptr + i, y)


@pytest.mark.parametrize("what", ["fma", "ftz", "divide", "exp2", "nothing"])
def test_the_reader_sees_what_is_planted(what: str) -> None:
    x = torch.empty(128)
    built = triton_build.compile_launch(_planted, [x, x], {"N": 128, "WHAT": what})
    assert bool(faults(built.ptx)) == (what != "nothing")
    assert not addresses_are_wide(built.ptx.replace("%rd", "%r"))


def test_constants_of_rows_are_plain() -> None:
    """Rows are cache keys of compiled kernels: numbers and text only."""
    for name in fpemu.list_formats():
        row = get_format(name)
        element = row.element if isinstance(row, BlockFormat) else row
        for value in backend.row_of(element):
            assert type(value) in (int, bool, str) and not isinstance(value, np.generic)
            assert not isinstance(value, int) or -(1 << 31) <= value < 1 << 60
