"""torch: registered op, compile, fake tensors, gradients, generators, denormal mode, threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from helpers import FAST, all16, assert_same_bits, block_data

import fpemu

torch = pytest.importorskip("torch", reason="torch is not installed")

FORMATS = ("e4m3", "fp16", "mxfp4", "nvfp4", "fp8_tensor_e4m3", "fp8_block_e4m3/2d")
X = torch.from_numpy(block_data(24, 48, 1, special=False)).clamp(-1e30, 1e30)


@pytest.mark.parametrize("fmt", FORMATS)
def test_gradient_is_one_inside_and_zero_beyond(fmt: str) -> None:
    from helpers import request

    from fpemu.backends import oracle

    x = X.clone().requires_grad_()
    y = fpemu.quantize(x, fmt)
    assert y.requires_grad and y.dtype == x.dtype
    assert_same_bits(y, fpemu.quantize(X, fmt))
    upstream = torch.full_like(x, 3.0)
    y.backward(upstream)
    inside = oracle.within(request(X.numpy(), fmt))
    assert_same_bits(x.grad, np.where(inside, np.float32(3), np.float32(0)))
    x.grad = None
    fpemu.quantize(x, fmt, ste="full").backward(upstream)
    assert_same_bits(x.grad, upstream)


def test_the_end_of_the_range_is_inside() -> None:
    """BC-183: at +-max the gradient passes; beyond, up to where rounding still gives max, it is 0."""
    x = torch.tensor([0.3, 448.0, -448.0, 447.0, 449.0, 1000.0, 0.0], requires_grad=True)
    fpemu.quantize(x, "e4m3").sum().backward()
    assert x.grad.tolist() == [1, 1, 1, 1, 0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradient_dtypes(dtype: Any) -> None:
    x = X.to(dtype, copy=True).requires_grad_()
    fpemu.quantize(x, "e5m2", dtype=torch.float32).sum().backward()
    assert x.grad.dtype == dtype


@pytest.mark.parametrize("fmt", FORMATS)
def test_stochastic_gradients(fmt: str) -> None:
    x = X.clone().requires_grad_()
    y = fpemu.quantize(x, fmt, rounding="sr", seed=3)
    assert_same_bits(y, fpemu.quantize(X, fmt, rounding="sr", seed=3))
    y.sum().backward()
    assert set(x.grad.unique().tolist()) <= {0.0, 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["e4m3", "mxfp4", "nvfp4"])
def test_compile_in_one_graph(fmt: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: fpemu.quantize(x * 1.0, fmt).clone(), fullgraph=True, backend="eager"
    )
    assert_same_bits(compiled(X), fpemu.quantize(X, fmt))
    x = X.clone().requires_grad_()
    traced = torch.compile(lambda x: fpemu.quantize(x, fmt), fullgraph=True, backend="aot_eager")
    traced(x).sum().backward()
    eager = X.clone().requires_grad_()
    fpemu.quantize(eager, fmt).sum().backward()
    assert_same_bits(x.grad, eager.grad)


@pytest.mark.slow
def test_compile_with_a_seed() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: fpemu.quantize(x, "e4m3", rounding="sr", seed=5),
        fullgraph=True,
        backend="aot_eager",
    )
    assert_same_bits(compiled(X), fpemu.quantize(X, "e4m3", rounding="sr", seed=5))


def test_fake_tensors_have_the_right_shape() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 40, dtype=torch.bfloat16)
        y = fpemu.quantize(x, "nvfp4")
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert fpemu.quantize(x, "e4m3", dtype=torch.float32).dtype == torch.float32


def test_the_op_is_registered_soundly() -> None:
    """torch's own check of schema, fake kernel and autograd registration."""
    fpemu.quantize(X.clone().requires_grad_(), "e4m3")  # registers
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("fpemu::")]
    assert names


def test_torch_manual_seed_governs() -> None:
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(fpemu.quantize(X, "e4m3", rounding="sr"))
    assert_same_bits(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    torch.manual_seed(1)
    first, second = (fpemu.quantize(X, "e4m3", rounding="sr") for _ in range(2))
    assert not torch.equal(first, second)


def test_numpy_seed_governs_arrays() -> None:
    state = np.random.get_state()
    try:
        draws = []
        for seed in (1, 1, 2):
            np.random.seed(seed)
            draws.append(fpemu.encode(X.numpy(), "e4m3", rounding="sr").codes)
    finally:
        np.random.set_state(state)
    assert_same_bits(draws[0], draws[1])
    assert not np.array_equal(draws[0], draws[2])


@pytest.mark.parametrize("backend", FAST)
def test_denormal_mode_changes_nothing(backend: str) -> None:
    x = torch.from_numpy(
        np.concatenate([block_data(40, 32, 2), block_data(40, 32, 3) * np.float32(1e-38)])
    )
    formats = ("fp32", "bf16", "e8m0", "mxfp4", "nvfp4", "fp8_block_e4m3/fp32")
    want = {f: fpemu.encode(x, f, backend=backend) for f in formats}
    values = {f: want[f].decode() for f in formats}
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no denormal mode")
    try:
        for f in formats:
            got = fpemu.encode(x, f, backend=backend)
            again, back = fpemu.quantize(x, f, backend=backend), got.decode()
            torch.set_flush_denormal(False)
            assert_same_bits(got.codes, want[f].codes, x, f)
            if got.scales is not None:
                assert_same_bits(got.scales, want[f].scales, note=f)
            assert_same_bits(again, values[f], x, f)
            assert_same_bits(back, values[f], x, f)
            torch.set_flush_denormal(True)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("backend", FAST)
def test_many_threads_at_once(backend: str) -> None:
    """A data loader, autograd's thread and the main thread may all call."""
    x = block_data(400, 256, 4)
    given = x if backend == "numba" else torch.from_numpy(x)
    want = {f: fpemu.encode(given, f, backend=backend) for f in ("e4m3", "nvfp4", "mxfp4")}
    wrong: list[str] = []

    def work(fmt: str) -> None:
        for _ in range(5):
            got = fpemu.encode(given, fmt, backend=backend)
            if not np.array_equal(np.asarray(got.codes), np.asarray(want[fmt].codes)):
                wrong.append(fmt)

    threads = [threading.Thread(target=work, args=(f,)) for f in ("e4m3", "nvfp4", "mxfp4") * 2]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_thread_count_changes_nothing() -> None:
    x = block_data(3000, 128, 5)
    before = fpemu.get_num_threads()
    try:
        results = []
        for n in (1, 2, 3):
            fpemu.set_num_threads(n)
            results.append([fpemu.encode(x, f).codes for f in ("e4m3", "nvfp4", "fp8_tensor_e4m3")])
            results[-1].append(fpemu.encode(x, "e2m1", rounding="sr", seed=1).codes)
    finally:
        fpemu.set_num_threads(before)
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_same_bits(got, want)


def test_torch_bfloat16_and_numpy_agree_on_everything() -> None:
    bits = torch.from_numpy(all16(np.int16).copy())
    x = bits.view(torch.bfloat16)
    for fmt in ("e4m3", "e2m1", "fp16", "e8m0"):
        for backend in FAST:
            got = fpemu.encode(x, fmt, backend=backend).codes
            wide = fpemu.encode(x.float(), fmt, backend=backend).codes  # exact
            assert_same_bits(got, wide, x, f"{fmt} {backend}")


def test_meta_and_views_keep_their_container() -> None:
    for fmt in FORMATS:
        y = fpemu.quantize(X, fmt)
        assert isinstance(y, torch.Tensor) and (y.shape, y.dtype, y.device) == (
            X.shape,
            X.dtype,
            X.device,
        )
    scalar = fpemu.quantize(torch.tensor(1.07), "e4m3")
    assert scalar.shape == () and scalar.item() == 1.125
    assert fpemu.quantize(torch.arange(5), "e2m1").dtype == torch.float32
    out = torch.empty_like(X)
    assert fpemu.quantize(X, "nvfp4", out=out) is out
    assert_same_bits(out, fpemu.quantize(X, "nvfp4"))
    encoded = fpemu.encode(X, "nvfp4")
    assert encoded.dtype == torch.float32 and isinstance(encoded.scales, torch.Tensor)
