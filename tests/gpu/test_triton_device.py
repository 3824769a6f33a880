"""The quantizer kernels on a GPU: the tests that the interpreter runs, compiled."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip(
        "no CUDA device; test_triton_interpreted.py runs these tests without one",
        allow_module_level=True,
    )

from gpu.triton_bodies import *  # noqa: E402, F403
from gpu.triton_dialect_bodies import *  # noqa: E402, F403
