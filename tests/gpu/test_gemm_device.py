"""The GEMM kernels on a GPU: the tests that the interpreter runs, compiled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip(
        "no CUDA device; test_gemm_interpreted.py runs these tests without one",
        allow_module_level=True,
    )

from gpu.gemm_bodies import *  # noqa: E402, F403
from helpers import assert_same_bits  # noqa: E402

from fpemu.gemm import matmul  # noqa: E402


def test_more_than_2_to_the_31_elements() -> None:
    """The last rows of a product whose panels and result need 64-bit indices."""
    if torch.cuda.mem_get_info()[0] < 110 * 2**30:
        pytest.skip("needs 110 GiB of free GPU memory")
    rows, unit = 2**26 + 33, "hopper.wgmma.e4m3"
    random = torch.Generator("cuda").manual_seed(0)
    tail, b = (torch.randn(s, device="cuda", generator=random) for s in ((65, 32), (32, 3)))
    a = torch.zeros((rows, 32), device="cuda", dtype=torch.float8_e4m3fn)
    a[-65:], b = tail.to(a.dtype), b.to(a.dtype)
    got = matmul(a, b, unit=unit)[-65:]
    assert_same_bits(
        got.cpu().numpy(), matmul(a[-65:], b, unit=unit, backend="torch").cpu().numpy()
    )
