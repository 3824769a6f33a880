"""experiments/speed.py: bytes against real encodings and published sizes, and that a run records."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import fpemu
from benchmarks import bench_training as bench
from experiments import harness, model, speed
from fpemu.recipes import RECIPES


def test_llama_has_its_published_number_of_parameters():
    shapes = speed.Llama().shapes()
    assert sum(math.prod(shape) for shape in shapes.values()) == 8_030_261_248


@pytest.mark.parametrize("fmt", speed.FORMATS + ("mxfp6_e2m3", "int8_tensor", "fp16", "tf32"))
@pytest.mark.parametrize("shape", [(256, 384), (33, 47), (1, 1)])
@pytest.mark.parametrize("axis", [0, -1])
def test_bytes_without_data_are_those_of_encoded_data(fmt, shape, axis):
    """Short blocks and odd lengths included."""
    real = fpemu.encode(np.ones(shape, np.float32), fmt, axis=axis)
    assert speed.from_shape(shape, fmt, axis) == real.nbytes == speed.formula(shape, fmt, axis)


def test_bits_a_value():
    """NVFP4: 4 + 8/16; MX: 8/32 more; 2D tiles: 8/256; and 32 bits of the tensor."""
    n = 4096 * 4096
    bits = {row["format"]: row["nbytes"] * 8 for row in speed.format_rows((4096, 4096))}
    assert bits["bf16"] == 16 * n and bits["mxfp8_e4m3"] == 8.25 * n and bits["mxfp4"] == 4.25 * n
    assert bits["nvfp4"] == 4.5 * n + 32 and bits["nvfp4/2d"] == (4 + 1 / 32) * n + 32
    assert bits["fp8_tensor_e4m3"] == 8 * n + 32


def test_a_huge_tensor_takes_no_memory():
    encoded = speed.empty_encoded((1 << 20, 1 << 20), "nvfp4", -1)
    assert encoded.nbytes == (1 << 39) + (1 << 36) + 4
    assert encoded.codes.strides == (0, 0)


@pytest.mark.parametrize(
    ("recipe", "count"),
    [("fp32", 1), ("bf16", 1), ("fp8_current", 1), ("fp8_block", 1), ("mxfp8", 2), ("nvfp4", 1)],
)
def test_how_many_casts_of_a_weight_a_recipe_reads(recipe, count):
    """MX blocks along in and along out are two; 2D blocks and tensor scales have no direction."""
    assert len(speed.casts(RECIPES[recipe])) == count


def test_the_state_of_a_model():
    shapes = {"embedding": (10, 32), "blocks.0.up": (64, 32), "blocks.0.norm1": (32,)}
    n, matrix = 320 + 2048 + 32, 2048
    found = {
        layout.name: speed.state_bytes(layout, shapes, speed.from_shape) for layout in speed.LAYOUTS
    }
    assert sum(found["fp32"].values()) == 16 * n
    assert sum(found["bf16, no master"].values()) == 12 * n
    assert sum(found["bf16"].values()) == 18 * n
    assert found["mxfp8"]["weights"] == 2 * (n - matrix) + 2 * (matrix + matrix // 32)
    assert found["mxfp8"]["masters"] == found["mxfp8"]["gradients"] == 4 * n
    # NVFP4's recipe keeps 2/62 and 8/62 of the layers, rounded up: here the only one.
    assert found["nvfp4"]["weights"] == 2 * n


def test_layers_that_a_recipe_keeps_are_bf16():
    shapes = {f"blocks.{i}.up": (128, 128) for i in range(62)}
    layout = next(row for row in speed.LAYOUTS if row.name == "nvfp4")
    tile = 128 * 128 // 2 + 64 + 4
    found = speed.state_bytes(layout, shapes, speed.from_shape)["weights"]
    assert found == 52 * tile + 10 * 2 * 128 * 128


def test_real_weights_take_the_bytes_of_their_shapes():
    gpt = model.GPT(model.Shape(width=32, layers=1, heads=2, context=32), torch.Generator())
    shapes = speed.gpt_shapes(gpt)
    assert sum(math.prod(s) for s in shapes.values()) == sum(p.numel() for p in gpt.parameters())
    rows = speed.bytes_rows("GPT", shapes, speed.encoded_size(gpt))
    assert rows == speed.bytes_rows("GPT", shapes, speed.from_shape)
    assert all(row["total"] == row["formula"] for row in rows)


def test_a_run_fills_its_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "SHAPE", model.Shape(width=32, layers=1, heads=2, context=32))
    monkeypatch.setattr(bench, "BATCH", 1)
    threads = torch.get_num_threads(), fpemu.get_num_threads()
    try:
        assert speed.main(["--quick", "--out", str(tmp_path), "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(threads[0])
        fpemu.set_num_threads(threads[1])
    metrics = harness.read_record(tmp_path / "speed.json")["metrics"]
    assert [row["recipe"] for row in metrics["steps"]] == ["torch", *RECIPES]
    for row in metrics["steps"]:
        assert row["seconds"] == pytest.approx(
            row["quantize"] + row["gemm"] + row["rest"], rel=1e-4
        )
    assert (tmp_path / "speed.pdf").read_bytes().startswith(b"%PDF")


def test_a_gpu_is_not_timed_here(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        speed.parse(["--device", "cuda"])
    assert "bench_gpu" in capsys.readouterr().err
