"""Bad input to `matmul` and `explain`: one clear error each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fpemu
from fpemu.gemm import explain, get_recipe, matmul

A, B = np.ones((2, 32), np.float32), np.ones((32, 3), np.float32)
E4M3, NVFP4 = "hopper.wgmma.e4m3", "blackwell.tcgen05.nvfp4"


def enc(x: np.ndarray, fmt: str, axis: int = -1) -> fpemu.Encoded:
    return fpemu.encode(x, fmt, axis=axis)


BAD: list[tuple[Any, Any, dict[str, Any], type[Exception], list[str]]] = [
    (A, B, {"unit": "hopper.wgma.e4m3"}, ValueError, ["unit", "hopper.wgma.e4m3", "Did you mean"]),
    (A, B, {"unit": None}, TypeError, ["unit", "NoneType"]),
    (A * 0.1, B, {"unit": E4M3}, ValueError, ["64 of 64", "values of a", "e4m3", "quantize"]),
    (A, B + 0.001 * (np.arange(3) == 1), {"unit": E4M3}, ValueError, ["32 of 96", "values of b"]),
    (A * np.inf, B, {"unit": E4M3}, ValueError, ["64 of 64"]),
    (A * 449, B, {"unit": E4M3}, ValueError, ["64 of 64"]),
    (A.astype(np.float64) + 1e-12, B, {"unit": "exact"}, ValueError, ["64 of 64", "fp32"]),
    (A[0], B, {"unit": E4M3}, ValueError, ["a has shape (32,)", "a[None, :]"]),
    (A, B[:, 0], {"unit": E4M3}, ValueError, ["b has shape (32,)", "b[:, None]"]),
    (A, B[1:], {"unit": E4M3}, ValueError, ["(2, 32)", "(31, 3)", "K"]),
    (np.ones((2, 4, 32)), np.ones((3, 32, 1)), {"unit": E4M3}, ValueError, ["broadcast"]),
    (A + 1j, B, {"unit": E4M3}, TypeError, ["complex"]),
    (A > 0, B, {"unit": E4M3}, TypeError, ["bool"]),
    (A, B, {"unit": E4M3, "out": "fp64"}, ValueError, ["out", "fp64", "fp16"]),
    (A, B, {"unit": E4M3, "out": "bf16"}, ValueError, ["out", "bf16"]),
    (A, B, {"unit": "hopper.wgmma.bf16", "out": "fp16"}, ValueError, ["no fp16 output"]),
    (A, B, {"unit": E4M3, "c": np.ones((3, 3))}, ValueError, ["c has shape (3, 3)", "(2, 3)"]),
    (A, B, {"unit": E4M3, "backend": "cuda"}, ValueError, ["backend", "cuda", "numba"]),
    (A, B, {"unit": "fp32.fma", "backend": "torch"}, fpemu.BackendError, ["torch", "fp32.fma"]),
    (A, B, {"unit": E4M3, "recipe": "cublas.slow"}, ValueError, ["recipe", "cublas.slow", "known"]),
    (A, B, {"unit": E4M3, "scale_a": 2.0}, ValueError, ["scale_a", "recipe"]),
    (A, B, {"unit": E4M3, "split_k": 2}, ValueError, ["split_k", "recipe"]),
    (A, B, {"unit": "blackwell.tcgen05.e4m3", "recipe": "cublaslt.fp8_slow"}, ValueError, ["hopper.wgmma"]),
    (A, B, {"unit": E4M3, "recipe": "deepgemm.1d1d"}, ValueError, ["scale_a", "missing"]),
    (A, B, {"unit": E4M3, "recipe": "deepgemm.1d1d", "scale_a": A, "scale_b": B}, ValueError, ["scale_a", "(2, 32)", "2, 1)"]),
    (A, B, {"unit": E4M3, "recipe": "scaled", "scale_a": np.ones(2)}, ValueError, ["scale_a", "(2,)"]),
    (A, B, {"unit": E4M3, "recipe": "scaled", "c": 1.0}, ValueError, ["c is given", "starts from zero"]),
    (A, B, {"unit": E4M3, "recipe": "scaled", "bias": np.ones(2)}, ValueError, ["bias", "(3,)"]),
    (A, B, {"unit": E4M3, "recipe": "scaled", "scale_result": 2.0}, ValueError, ["scale_result"]),
    (A, B, {"unit": E4M3, "recipe": "scaled", "split_k": 2}, ValueError, ["split_k", "1 tile"]),
    (A, B, {"unit": E4M3, "recipe": "scaled", "split_k": 0}, ValueError, ["split_k", "positive"]),
    (enc(A, "mxfp4"), enc(B, "mxfp4", 0), {"unit": E4M3}, ValueError, ["mxfp4", "block-scaled"]),
    (enc(A, "e5m2"), B, {"unit": E4M3}, ValueError, ["e5m2", "e4m3"]),
    (enc(A, "mxfp4"), enc(B, "mxfp4", 0), {"unit": NVFP4}, ValueError, ["mxfp4", "ue4m3", "16"]),
    (enc(A, "nvfp4", 0), enc(B, "nvfp4", 0), {"unit": NVFP4}, ValueError, ["axis 0", "axis=-1"]),
    (enc(A, "nvfp4"), enc(B, "nvfp4"), {"unit": NVFP4}, ValueError, ["axis 1", "axis=-2"]),
    (enc(A, "nvfp4"), enc(B, "nvfp4", 0), {"unit": NVFP4, "c": 1.0}, ValueError, ["c is given"]),
    (enc(A, "nvfp4"), enc(B, "nvfp4", 0), {"unit": NVFP4, "recipe": "scaled", "scale_a": 1.0}, ValueError, ["twice"]),
    (enc(A, "fp8_block_e4m3"), enc(B, "fp8_block_e4m3", 0), {"unit": E4M3}, ValueError, ["fp8_block_e4m3", "deepgemm"]),
    (enc(A, "fp8_block_e4m3"), B, {"unit": E4M3, "recipe": "scaled"}, ValueError, ["fp8_block_e4m3", "deepgemm"]),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b", "options", "error", "words"), BAD)
def test_bad_input(
    a: Any, b: Any, options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        matmul(a, b, **options)
    message = str(caught.value)
    assert message.startswith("matmul:"), message
    for word in words:
        assert word in message, message
    assert type(caught.value) is error


def test_torch_and_numpy_do_not_mix() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="a is a numpy array and b is a tensor on cpu"):
        matmul(A, torch.ones(32, 3), unit=E4M3)


@pytest.mark.parametrize(("a", "b", "unit", "word"), [
    ([[1.0]], [1.0], E4M3, "vectors"), ([1.0, 2.0], [1.0], E4M3, "K must"),
    ([0.3], [1.0], E4M3, "1 of 1"), ([1.0], [1.0], "exact", "reference"),
])  # fmt: skip
def test_explain_refuses(a: Any, b: Any, unit: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        explain(a, b, unit)


def test_unknown_recipe() -> None:
    with pytest.raises(ValueError, match=r"unknown recipe 'deepgemm'.*Did you mean 'deepgemm"):
        get_recipe("deepgemm")
