"""The instructions themselves, where there is a GPU that has them: run equals replay."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from helpers import assert_same_bits, assert_same_parts, block_data

import fpemu
from fpemu import formats, hw
from fpemu.backends import element_format, hardware
from fpemu.hw import casts, device
from fpemu.hw.emulation import unsigned

torch = pytest.importorskip("torch", reason="torch is not installed")
if device.gpu() is None:
    pytest.skip("no CUDA device is here", allow_module_level=True)

STEP = 1 << 22
#: float32 patterns tried for each instruction (a multiple of STEP).
PATTERNS = 1 << 23


@pytest.fixture(params=list(hw.INSTRUCTIONS))
def row(request: pytest.FixtureRequest) -> hw.Instruction:
    found = hw.INSTRUCTIONS[request.param]
    reason = casts.missing(found)
    if reason is not None:
        pytest.skip(reason)
    return found


def inputs(row: hw.Instruction) -> Iterator[np.ndarray]:
    width = unsigned(row.source_bits)
    if row.source_format.bits <= 16:
        every = np.arange(1 << row.source_format.bits, dtype=width)
        yield every
        yield every[::-1].copy()
        return
    rng = np.random.default_rng(23)
    for _ in range(PATTERNS // STEP):
        bits = rng.integers(0, 1 << 32, STEP, np.uint32)
        # Half of them where every destination has most of its values.
        near = rng.integers(100, 146, STEP // 2).astype(np.uint32) << np.uint32(23)
        bits[::2] = bits[::2] & np.uint32(0x807FFFFF) | near
        bits[1::8] &= np.uint32(0xFFFF0000)  # exact in bfloat16: ties
        yield bits


def test_run_is_replay(row: hw.Instruction) -> None:
    rng = np.random.default_rng(29)
    for bits in inputs(row):
        words = gpu_words = None
        if row.random:
            words = rng.integers(0, 1 << 32, bits.size // row.lanes, np.uint32)
            if row.form == "f16x2":
                words &= np.uint32(0x1FFF1FFF)
            gpu_words = torch.from_numpy(words.view(np.int32)).cuda()
        signed = f"i{bits.itemsize}"
        got = hw.run(row.ptx, torch.from_numpy(bits.view(signed)).cuda(), gpu_words).cpu().numpy()
        assert_same_bits(got, hw.replay(row.ptx, bits, words), bits, row.ptx)


def test_views_and_odd_shapes() -> None:
    bits = torch.arange(0x3F000000, 0x3F000000 + 6 * 50, dtype=torch.int32).view(6, 50).cuda()
    name = "cvt.rn.f16x2.f32"
    for part in (bits.T, bits[::2, ::5], bits[:, 10:30], bits[:0], bits[None, 1:2]):
        want = hw.replay(name, part.cpu().numpy())
        assert_same_bits(hw.run(name, part).cpu().numpy(), want)


@pytest.mark.parametrize(
    "fmt", ["e4m3", "e5m2", "fp16", "tf32", "mxfp8_e4m3", "fp8_block_e4m3", "nvfp4"]
)
def test_encode_by_the_instruction(fmt: str) -> None:
    row = formats.get_format(fmt)
    element = element_format(row)
    reason = casts.missing(hardware.instruction(element, "rne", element.overflow))
    if reason is not None:
        pytest.skip(reason)
    x = torch.from_numpy(block_data(64, 96, seed=8)).cuda()
    got = fpemu.encode(x, fmt, backend="hardware")
    assert_same_parts(got, fpemu.encode(x, fmt, backend="torch"), note=fmt)
    values = fpemu.quantize(x, fmt, backend="hardware")
    assert_same_bits(values, fpemu.quantize(x, fmt, backend="torch"), x, fmt)
