"""``backend="hardware"``: the values that reach the instruction, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import BF16, assert_same_bits, assert_same_parts, block_data, give, request

from fpemu import formats, hw
from fpemu.hw import casts, device

torch = pytest.importorskip("torch", reason="torch is not installed")

from fpemu.backends import hardware, torch_  # noqa: E402 (torch_ loads torch)

ELEMENTS = ["fp16", "bf16", "tf32", "e4m3", "e5m2", "e2m3", "e3m2", "e2m1"]
BLOCKS = [
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxfp4/rceil", "mxfp4/even",
    "nvfp4", "nvfp4/2d", "nvfp4/1level", "fp8_tensor_e4m3", "fp8_tensor_e5m2", "fp8_block_e4m3",
    "fp8_block_e4m3/2d",
]  # fmt: skip


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The instruction's place taken by its replay; the names that were asked for."""
    asked = []

    def run(name: str, bits: Any, rbits: Any = None) -> Any:
        asked.append(name)
        return torch.from_numpy(hw.replay(name, bits.numpy(), rbits))

    monkeypatch.setattr(casts, "run", run)
    monkeypatch.setattr(casts, "missing", lambda row: None)
    return asked


def _ask(x: np.ndarray, fmt: str, options: dict[str, Any]) -> Any:
    wanted = request(x, fmt, **options)
    wanted.x = give("torch", x)
    return wanted


@pytest.mark.parametrize("fmt", ELEMENTS + BLOCKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_instruction_gets_the_scaled_values(fmt: str, dtype: str, emulated: list[str]) -> None:
    with np.errstate(over="ignore"):
        x = block_data(40, 71, seed=3).astype(BF16 if dtype == "bfloat16" else dtype)
    wanted = _ask(x, fmt, {})
    assert_same_parts(hardware.encode(wanted), torch_.encode(_ask(x, fmt, {})), note=fmt)
    element = wanted.fmt if isinstance(wanted.fmt, formats.Format) else wanted.fmt.element
    assert set(emulated) == {hardware.instruction(element, "rne", element.overflow).ptx}


@pytest.mark.parametrize(
    ("fmt", "rounding", "overflow", "name"),
    [
        ("fp16", "rne", "nonsat", "cvt.rn.f16x2.f32"),
        ("fp16", "rtz", "sat", "cvt.rz.satfinite.f16x2.f32"),
        ("bf16", "rtp", "nonsat", "cvt.rp.bf16.f32"),
        ("bf16", "rtn", "nonsat", "cvt.rm.bf16.f32"),
        ("tf32", "rtz", "nonsat", "cvt.rz.tf32.f32"),
        ("tf32", "rne", "sat", "cvt.rn.satfinite.tf32.f32"),
        ("e4m3", "rne", "sat", "cvt.rn.satfinite.e4m3x2.f32"),
        ("e2m1", "rne", "nonsat", "cvt.rn.satfinite.e2m1x2.f32"),
    ],
)
def test_which_instruction_is_used(
    fmt: str, rounding: str, overflow: str, name: str, emulated: list[str]
) -> None:
    x = block_data(16, 33, seed=4)
    options = {"rounding": rounding, "overflow": overflow}
    got = hardware.encode(_ask(x, fmt, options))
    assert_same_parts(got, torch_.encode(_ask(x, fmt, options)), x)
    assert emulated == [name]
    out, want = torch.empty(x.shape), torch.empty(x.shape)
    hardware.quantize(_ask(x, fmt, options), out)
    torch_.quantize(_ask(x, fmt, options), want)
    assert_same_bits(out, want, x)


def test_a_wrong_instruction_is_seen(emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = block_data(16, 64, seed=4)
    wrong = hw.INSTRUCTIONS["cvt.rn.satfinite.relu.e2m1x2.f32"]
    monkeypatch.setattr(hardware, "instruction", lambda *_: wrong)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_parts(
            hardware.encode(_ask(x, "mxfp4", {})), torch_.encode(_ask(x, "mxfp4", {}))
        )


def test_layouts(emulated: list[str]) -> None:
    x = block_data(24, 40, seed=6)
    for fmt, axis in (("e4m3", 0), ("mxfp4", 0), ("mxfp4", 1), ("nvfp4", 0)):
        got = hardware.encode(_ask(x.T, fmt, {"axis": axis}))
        assert_same_parts(got, torch_.encode(_ask(x.T, fmt, {"axis": axis})), note=fmt)
    for shape in ((), (0,), (3, 0), (1,)):
        part = np.full(shape, 3.3, np.float32)
        assert_same_parts(
            hardware.encode(_ask(part, "e2m1", {})), torch_.encode(_ask(part, "e2m1", {}))
        )


@pytest.mark.parametrize(
    ("fmt", "options", "message"),
    [
        ("e4m3", {"rounding": "sr"}, "share a random word"),
        ("e4m3", {"rounding": "rtz"}, "no cvt instruction rounds to 'e4m3' by 'rtz' with 'sat'"),
        (
            "e4m3",
            {"overflow": "nonsat"},
            "no cvt instruction rounds to 'e4m3' by 'rne' with 'nonsat'",
        ),
        ("int8", {}, "no cvt instruction rounds to 'int8'"),
        ("mxint8", {}, "no cvt instruction rounds to 'int8"),
        ("e4m3fnuz", {}, "no cvt instruction"),
        ("e8m0", {"rounding": "rtz"}, "drops the sign"),
        ("tf32", {"rounding": "rna"}, "ptxas writes it out in integers"),
        ("nvfp4/torchao", {}, "cast by its library's rule; use 'nvfp4'"),
    ],
)
def test_what_has_no_instruction(fmt: str, options: dict[str, Any], message: str) -> None:
    assert message in (hardware.supports(_ask(np.zeros((4, 32), np.float32), fmt, options)) or "")


def test_what_supports_says(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = np.zeros((4, 32), np.float32)
    wide = _ask(zeros.astype(np.float64), "e4m3", {})
    assert "does not hold every float64" in (hardware.supports(wide) or "")
    monkeypatch.setattr(device, "gpu", lambda: None)
    assert hardware.supports(_ask(zeros, "nvfp4", {})) == (
        "cvt.rn.satfinite.e2m1x2.f32 needs a GPU of compute capability 10.0 or later and none was"
        " found"
    )
    monkeypatch.setattr(device, "gpu", lambda: device.Gpu("NVIDIA H200", (9, 0)))
    assert hardware.supports(_ask(zeros, "nvfp4", {})) == (
        "cvt.rn.satfinite.e2m1x2.f32 needs compute capability 10.0 or later and the GPU found,"
        " NVIDIA H200, has 9.0"
    )
    reason = hardware.supports(_ask(zeros, "mxfp8_e4m3", {}))
    assert (
        reason
        == "cvt.rn.satfinite.e4m3x2.f32 reads CUDA tensors and x is in host memory; move it with x.cuda()"
    )
