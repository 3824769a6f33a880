"""Which GPU is here, and with which software. Torch is loaded when that is asked, not before."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """The GPU that torch uses, and the versions that its results may depend on.

    Parameters
    ----------
    name : str
        For example ``"NVIDIA H200"``.
    capability : (int, int)
        Compute capability: (9, 0) is sm_90.
    driver, cuda, cublas, torch, triton : str or None
        Versions of the driver, of the CUDA that torch was built with, of the packages; None where
        it cannot be found out.
    """

    name: str
    capability: tuple[int, int]
    driver: str | None = None
    cuda: str | None = None
    cublas: str | None = None
    torch: str | None = None
    triton: str | None = None

    @property
    def sm(self) -> str:
        """The architecture as PTX writes it: ``sm_90``, or ``sm_100a`` with what it has alone.

        Examples
        --------
        >>> Gpu("NVIDIA B200", (10, 0)).sm
        'sm_100a'
        """
        major, minor = self.capability
        return f"sm_{major}{minor}{'a' if major >= 10 else ''}"

    def __str__(self) -> str:
        return f"{self.name} ({self.sm})"


def gpu() -> Gpu | None:
    """The current CUDA device, or None: `why_none` says why.

    Examples
    --------
    >>> found = gpu()
    >>> found is None or len(found.capability) == 2
    True
    """
    if why_none() is not None:
        return None
    import torch

    return Gpu(
        torch.cuda.get_device_name(),
        torch.cuda.get_device_capability(),
        _driver(),
        torch.version.cuda,
        _package("nvidia-cublas-cu12", "nvidia-cublas-cu13", "nvidia-cublas"),
        torch.__version__,
        _package("triton", "pytorch-triton"),
    )


def why_none() -> str | None:
    """Why there is no GPU to run on, as a sentence, or None where there is one."""
    if find_spec("torch") is None:
        return "PyTorch is not installed. Install a build of it with CUDA."
    import torch

    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} was built without CUDA. Install a build of it with CUDA."
        )
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no CUDA device."
    return None


@lru_cache(maxsize=1)
def _driver() -> str | None:
    """The driver's version, from its command or from the kernel module."""
    command = shutil.which("nvidia-smi")
    if command is not None:
        query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None


def _package(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
