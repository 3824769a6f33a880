"""The GEMM kernels' logic, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fpemu

pytest.importorskip("triton", reason="triton is not installed: nothing interprets its kernels")

ROOT = Path(__file__).resolve().parents[2]


def test_in_the_interpreter() -> None:
    """In a process of its own, for Triton decides at import whether a kernel is interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/gemm_bodies.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    assert int(re.match(r"\D*(\d+) passed", last)[1]) > 40 and "skipped" not in last, last  # type: ignore[index]


def test_without_a_gpu_it_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    ones = np.ones((1, 1))
    with pytest.raises(fpemu.BackendError, match=r"'triton' cannot compute.*no CUDA device"):
        fpemu.matmul(ones, ones, unit="hopper.wgmma.e4m3", backend="triton")
