"""Other libraries, each behind one function: the fake quantization that it offers on a CPU.

A loader takes the input and returns what the library can do with it, by fpemu's format name. It
raises `ImportError` where the library is not installed. Each runs as its own users would call it,
scales computed included, into fresh memory (none takes an output).
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Runs = dict[str, Callable[[], Any]]
BLOCK = {"nvfp4": 16, "mxfp4": 32}


class Peer(NamedTuple):
    """A library and what it can run; `skipped` says why it runs nothing."""

    name: str
    version: str
    runs: Runs
    skipped: str = ""


def _torch_native(x: np.ndarray) -> Runs:
    import torch

    t = torch.from_numpy(x)
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    dtypes |= {"bf16": torch.bfloat16, "fp16": torch.float16}
    return {fmt: lambda d=d: t.to(d).to(torch.float32) for fmt, d in dtypes.items()}  # type: ignore[misc]


def _ml_dtypes(x: np.ndarray) -> Runs:
    import ml_dtypes

    dtypes: dict[str, Any] = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
    dtypes |= {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}

    def run(dtype: Any) -> np.ndarray:
        with np.errstate(over="ignore"):
            return x.astype(dtype).astype(np.float32)

    return {fmt: lambda d=d: run(d) for fmt, d in dtypes.items()}  # type: ignore[misc]


def _gfloat(x: np.ndarray) -> Runs:
    from gfloat import formats, round_ndarray

    return {"e4m3": lambda: round_ndarray(formats.format_info_ocp_e4m3, x)}


def _jax(x: np.ndarray) -> Runs:
    import jax
    import jax.numpy as jnp

    a = jax.device_put(x, jax.devices("cpu")[0])
    runs: Runs = {}
    for fmt, dtype in {"e4m3": jnp.float8_e4m3fn, "bf16": jnp.bfloat16}.items():
        cast = jax.jit(lambda v, d=dtype: v.astype(d).astype(jnp.float32))
        runs[fmt] = lambda f=cast: f(a).block_until_ready()  # type: ignore[misc]
    return runs


def _torchao(x: np.ndarray) -> Runs:
    import torch
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor

    t = torch.from_numpy(x)

    def nvfp4() -> Any:
        scale = nvfp4_tensor.per_tensor_amax_to_scale(t.abs().max())
        packed = nvfp4_tensor.NVFP4Tensor.to_nvfp4(t, 16, per_tensor_scale=scale)
        return packed.dequantize(torch.float32)

    def mxfp4() -> Any:
        packed = mx_tensor.MXTensor.to_mx(t, torch.float4_e2m1fn_x2, BLOCK["mxfp4"])
        return packed.dequantize(torch.float32)

    return {"nvfp4": nvfp4, "mxfp4": mxfp4}


def _compressed_tensors(x: np.ndarray) -> Runs:
    import torch
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    t = torch.from_numpy(x)

    def run(fmt: str) -> Any:
        args = preset_name_to_scheme(fmt.upper(), ["Linear"]).weights
        groups = t.unflatten(-1, (-1, BLOCK[fmt]))
        low, high = groups.amin(-1), groups.amax(-1)
        whole = generate_gparam(low.min(), high.max()) if fmt == "nvfp4" else None
        scale, zero = calculate_qparams(low, high, args, global_scale=whole)
        return fake_quantize(t, scale, zero, args, global_scale=whole)

    return {fmt: lambda f=fmt: run(f) for fmt in ("nvfp4", "mxfp4")}  # type: ignore[misc]


def _fouroversix(x: np.ndarray) -> Runs:
    import torch
    from fouroversix import QuantizationConfig, dequantize, quantize_to_fp4

    t = torch.from_numpy(x)

    def run(fmt: str) -> Any:
        config = QuantizationConfig(backend="pytorch", dtype=fmt, scale_rule="static_6")
        return dequantize(quantize_to_fp4(t, config), torch.float32)

    return {fmt: lambda f=fmt: run(f) for fmt in ("nvfp4", "mxfp4")}  # type: ignore[misc]


def _modelopt(x: np.ndarray) -> Runs:
    import torch
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    t = torch.from_numpy(x)

    def nvfp4() -> Any:
        packed, scale, double = NVFP4QTensor.quantize(t, 16)
        return packed.dequantize(
            torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16}
        )

    def mxfp4() -> Any:
        packed, scale = MXFP4QTensor.quantize(t, 32)
        return packed.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})

    return {"nvfp4": nvfp4, "mxfp4": mxfp4}


def _qwantize(x: np.ndarray) -> Runs:
    import torch
    from qwantize import mxfp4_naive

    blocks = torch.from_numpy(x).unflatten(-1, (-1, BLOCK["mxfp4"]))
    return {"mxfp4": lambda: mxfp4_naive(blocks, return_dequant=True)}


def _quark(x: np.ndarray) -> Runs:
    import torch
    from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx

    t = torch.from_numpy(x)
    return {"mxfp4": lambda: fake_quantize_mx(t, -1, 32, mx_element_dtype="fp4")}


# CPFloat is a header-only C library without a Python package: a few lines of C make it callable.
# Its E4M3 follows IEEE (Inf, largest value 480); its speed does not depend on that.
_CPFLOAT_C = """
#include "cpfloat_binary32.h"
void run(float *y, const float *x, size_t n, int precision, int emin, int emax) {
  optstruct *options = init_optstruct();
  options->precision = precision;
  options->emin = emin;
  options->emax = emax;
  options->subnormal = CPFLOAT_SUBN_USE;
  options->explim = CPFLOAT_EXPRANGE_TARG;
  options->round = CPFLOAT_RND_NE;
  options->saturation = CPFLOAT_SAT_NO;
  options->infinity = CPFLOAT_INF_USE;
  options->flip = CPFLOAT_SOFTERR_NO;
  options->p = 0;
  cpfloatf(y, x, n, options);
  free_optstruct(options);
}
"""


def _cpfloat(x: np.ndarray, source: str | None) -> Runs:
    if source is None:
        raise ImportError("no Python package; give its checkout with --cpfloat DIR")
    include = Path(source) / "src"
    if not (include / "cpfloat_binary32.h").exists():
        raise ImportError(f"no {include / 'cpfloat_binary32.h'}")
    folder = tempfile.TemporaryDirectory(prefix="cpfloat-")
    shim, library = Path(folder.name, "shim.c"), Path(folder.name, "shim.so")
    shim.write_text(_CPFLOAT_C)
    command = ["gcc", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", f"-I{include}"]
    try:
        subprocess.run(
            [*command, str(shim), "-o", str(library), "-lm"], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"").decode()[:200]
        raise ImportError(f"gcc could not build it: {error} {said}") from None
    run = ctypes.CDLL(str(library)).run
    out = np.empty_like(x)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (out, x)]

    def cast(precision: int, emin: int, emax: int) -> np.ndarray:
        run(*pointers, ctypes.c_size_t(x.size), precision, emin, emax)
        return out

    # `folder` lives as long as the function that needs what is in it.
    return {"e4m3": lambda keep=folder: cast(4, -6, 8)}  # type: ignore[misc]


LOADERS: dict[str, Callable[[np.ndarray], Runs]] = {
    "torch": _torch_native,
    "ml_dtypes": _ml_dtypes,
    "gfloat": _gfloat,
    "jax": _jax,
    "torchao": _torchao,
    "compressed-tensors": _compressed_tensors,
    "fouroversix": _fouroversix,
    "nvidia-modelopt": _modelopt,
    "amd-quark": _quark,
    "qwantize": _qwantize,
}


def load(x: np.ndarray, cpfloat: str | None = None) -> list[Peer]:
    """Every peer, ready to run on `x` (2-D float32); one that fails on a part of it is skipped."""
    loaders: dict[str, Callable[[np.ndarray], Runs]]
    loaders = {**LOADERS, "CPFloat": partial(_cpfloat, source=cpfloat)}
    peers = []
    for name, loader in loaders.items():
        try:
            number = version(name)
        except PackageNotFoundError:
            number = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for run in loader(x[:64]).values():
                    run()
                peers.append(Peer(name, number, loader(x)))
        except ModuleNotFoundError as error:
            peers.append(Peer(name, number, {}, f"not installed ({error.name})"))
        except Exception as error:  # another library's failure is reported, and ends nothing
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            peers.append(Peer(name, number, {}, reason[:160]))
    return peers
