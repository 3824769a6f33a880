"""Runs other libraries' quantizers on given blocks. Needs torch and the library, never fpemu.

    python peer_runner.py LIBRARY IN.npz OUT.npz

IN holds tensors of bits: ``16/<case>`` for NVFP4, ``32/<case>`` for MX; uint32 is float32, uint16 is
bfloat16; ``<case>.amax`` (uint32 of one float32) is a tensor amax that the library is to use in
place of the tensor's own. OUT gets, for every dialect of the library and every case that it takes,
``<dialect>|<case>|scales`` and ``|codes`` (bytes), ``|stored`` (the tensor's number, float32 bits),
``|float32`` and ``|bfloat16`` (the library's own dequantization, bits). A library that gives values
and no codes leaves the codes out. ``__about__`` is JSON: the library's version, and what it refused.

LIBRARY is a distribution of `constraints-peers.txt`, or ``NAME-git``: a checkout that `make peers`
put beside them, where the interesting version was never released.

Dialects are named as fpemu names them. Each function calls the library as its users do; nothing of
its arithmetic is repeated here.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
import types
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

Out = dict[str, Any]
Run = Callable[[torch.Tensor, "torch.Tensor | None"], "Out | None"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the even element in the low nibble."""
    p = packed.contiguous().view(torch.uint8)
    return torch.stack([p & 15, p >> 4], -1).reshape(*p.shape[:-1], -1)


def sextets(packed: torch.Tensor) -> torch.Tensor:
    """Four codes in three bytes, little-endian."""
    b = packed.reshape(*packed.shape[:-1], -1, 3).int()
    word = b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16
    codes = torch.stack([word >> shift & 63 for shift in (0, 6, 12, 18)], -1)
    return codes.reshape(*packed.shape[:-1], -1).to(torch.uint8)


def largest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().max()


def checkout(name: str) -> Path:
    """Where `make peers` puts a git checkout."""
    folder = Path(sys.prefix, "src", name)
    if not (folder / "COMMIT").exists():
        raise ModuleNotFoundError(f"no {folder}", name=name)
    return folder


# torchao -----------------------------------------------------------------------------------------


def torchao_git() -> dict[str, Run]:
    sys.path.insert(0, str(checkout("torchao")))
    return {
        name.replace("-0.18", ""): run for name, run in torchao().items() if "nvfp4" not in name
    }


def torchao() -> dict[str, Run]:
    from torchao.prototype.mx_formats import nvfp4_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    def nvfp4(x: torch.Tensor, amax: torch.Tensor | None, levels: int) -> Out:
        scale = None
        if levels == 2:
            scale = nvfp4_tensor.per_tensor_amax_to_scale(largest(x) if amax is None else amax)
        got = nvfp4_tensor.NVFP4Tensor.to_nvfp4(x, 16, per_tensor_scale=scale)
        values = {name: got.dequantize(dtype) for name, dtype in DTYPES.items()}
        return {"scales": got.scale, "codes": nibbles(got.qdata), "stored": scale, **values}

    def mx(x: torch.Tensor, amax: torch.Tensor | None, element: Any, mode: Any) -> Out:
        scale, data = to_mx(x, element, 32, mode)
        four = element is torch.float4_e2m1fn_x2
        values = {n: to_dtype(data, scale, element, 32, d) for n, d in DTYPES.items()}
        return {"scales": scale, "codes": nibbles(data) if four else data, **values}

    elements = {
        "mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp6_e2m3": DTYPE_FP6_E2M3, "mxfp6_e3m2": DTYPE_FP6_E3M2,
        "mxfp4": torch.float4_e2m1fn_x2,
    }  # fmt: skip
    runs: dict[str, Run] = {
        "nvfp4/torchao": partial(nvfp4, levels=2),
        "nvfp4/torchao-1level": partial(nvfp4, levels=1),
    }
    for mode in ("floor", "rceil", "ceil", "even"):
        how = ScaleCalculationMode(mode)
        for name, element in elements.items():
            runs[f"{name}/torchao-0.18-{mode}"] = partial(mx, element=element, mode=how)
    return runs


# ModelOpt ----------------------------------------------------------------------------------------


def modelopt() -> dict[str, Run]:
    from modelopt.torch.quantization.qtensor.mxfp4_tensor import MXFP4QTensor
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    def nvfp4(x: torch.Tensor, amax: torch.Tensor | None) -> Out:
        stored = NVFP4QTensor.get_weights_scaling_factor_2(x if amax is None else amax.view(1))
        got, scale, stored = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=stored)
        how = {"scale": scale, "double_scale": stored, "block_sizes": {-1: 16}}
        values = {name: got.dequantize(dtype, **how) for name, dtype in DTYPES.items()}
        return {"scales": scale, "codes": nibbles(got._quantized_data), "stored": stored, **values}

    def mxfp4(x: torch.Tensor, amax: torch.Tensor | None) -> Out:
        got, scale = MXFP4QTensor.quantize(x.clone(), 32)
        how = {"scale": scale, "block_sizes": {-1: 32}}
        values = {name: got.dequantize(dtype, **how) for name, dtype in DTYPES.items()}
        return {"scales": scale, "codes": nibbles(got._quantized_data), **values}

    def mxfp8(x: torch.Tensor, amax: torch.Tensor | None) -> Out:
        got, scale = MXFP8QTensor.quantize(x.clone())
        values = {name: got.dequantize(dtype, scale=scale) for name, dtype in DTYPES.items()}
        return {"scales": scale, "codes": got._quantized_data, **values}

    return {"nvfp4/modelopt": nvfp4, "mxfp4/modelopt": mxfp4, "mxfp8_e4m3/modelopt": mxfp8}


# compressed-tensors ------------------------------------------------------------------------------


def compressed_tensors() -> dict[str, Run]:
    """Quantized with the zero point that `calculate_qparams` gives, as activations are."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.mxfp6.helpers import pack_fp6_to_uint8
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import helpers

    def run(x: torch.Tensor, amax: torch.Tensor | None, preset: str, layout: str) -> Out:
        scheme = preset_name_to_scheme(preset, ["Linear"])
        args, compressor = scheme.weights, BaseCompressor.get_value_from_registry(layout)
        groups = x.unflatten(-1, (-1, args.group_size))
        low, high = groups.amin(-1), groups.amax(-1)
        whole = None
        if preset == "NVFP4":
            ends = (low.min(), high.max())
            if amax is not None:
                ends = (-amax.to(x.dtype), amax.to(x.dtype))
            whole = helpers.generate_gparam(*ends)
        scale, zero = helpers.calculate_qparams(low, high, args, global_scale=whole)
        how = {"scale": scale, "zero_point": zero, "args": args, "global_scale": whole}
        state = {"weight_scale": compressor._compress_scale(scale, args)}
        if args.num_bits == 8:
            state["weight"] = codes = quantize(x.clone(), dtype=torch.float8_e4m3fn, **how)
        elif args.num_bits == 6:
            state["weight_packed"] = pack_fp6_to_uint8(quantize(x.clone(), **how))
            codes = sextets(state["weight_packed"])
        else:
            state["weight_packed"] = pack_fp4_to_uint8(quantize(x.clone(), **how))
            codes = nibbles(state["weight_packed"])
        if whole is not None:
            state["weight_global_scale"] = whole
        # What a checkpoint's reader gets: bfloat16 alone.
        values = compressor.decompress(state, scheme)["weight"]
        scales = state["weight_scale"]
        return {"scales": scales, "codes": codes, "stored": whole, "bfloat16": values}

    layouts = {
        "nvfp4": ("NVFP4", "nvfp4-pack-quantized"), "mxfp4": ("MXFP4", "mxfp4-pack-quantized"),
        "mxfp6_e2m3": ("MXFP6A16", "mxfp6-pack-quantized"), "mxfp8_e4m3": ("MXFP8", "mxfp8-quantized"),
    }  # fmt: skip
    return {
        f"{name}/compressed-tensors": partial(run, preset=preset, layout=layout)
        for name, (preset, layout) in layouts.items()
    }


# Quark -------------------------------------------------------------------------------------------


def quark() -> dict[str, Run]:
    from quark.torch.kernel.hw_emulation import hw_emulation_interface as emulation
    from quark.torch.kernel.mx.triton import (
        DequantScaleRoundingMode,
        downcast_to_mxfp_torch,
        upcast_from_mxfp_torch,
    )
    from quark.torch.quantization.observer.observer import ObserverBase
    from quark.torch.quantization.utils import even_round

    def pack(x: torch.Tensor, amax: torch.Tensor | None, mode: str) -> Out:
        how = DequantScaleRoundingMode[mode]
        data, scale = downcast_to_mxfp_torch(
            x, torch.uint8, axis=-1, DEQUANT_SCALE_ROUNDING_MODE=how
        )
        values = {n: upcast_from_mxfp_torch(data, scale, d, axis=-1) for n, d in DTYPES.items()}
        return {"scales": scale, "codes": nibbles(data), **values}

    def even(x: torch.Tensor, amax: torch.Tensor | None, element: str) -> Out:
        blocks = x.unflatten(-1, (-1, 32))
        scale = even_round(blocks.abs().amax(-1), element)
        faked = emulation.fake_quantize_mx(x.clone(), -1, 32, mx_element_dtype=element)
        # The scale is a power of two in float32; NaN where the amax is. Its byte is its exponent.
        return {"scales": exponent_byte(scale), str(x.dtype).removeprefix("torch."): faked}

    def nvfp4(x: torch.Tensor, amax: torch.Tensor | None) -> Out | None:
        """The observer's scale divides by the tensor's number again, which undoes to the byte."""
        local = x.unflatten(-1, (-1, 16)).abs().amax(-1)
        whole = local.max() if amax is None else amax
        if not whole >= local.max():
            return None  # the observer takes the largest of what it sees
        this = types.SimpleNamespace(
            qspec=types.SimpleNamespace(dtype=_fp4()), scale_torch_dtype=torch.float32
        )
        seen = torch.cat([local.flatten(), whole.view(1).to(local.dtype)])
        scale = ObserverBase.get_scale(this, seen, torch.finfo(torch.float32).eps, "e4m3")
        scale = scale[:-1].view(local.shape)
        faked = emulation.fake_quantize_fp4_fp6_per_group_with_scale(
            x.clone(), scale, -1, 16, "fp4"
        )
        return {"scale32": scale, str(x.dtype).removeprefix("torch."): faked}

    runs: dict[str, Run] = {"nvfp4/quark": nvfp4}
    for name, mode in {"up": "ROUND_UP", "down": "ROUND_DOWN", "even": "EVEN"}.items():
        runs[f"mxfp4/quark-pack-{name}"] = partial(pack, mode=mode)
    elements = {
        "mxfp4": "fp4", "mxfp6_e2m3": "fp6_e2m3", "mxfp6_e3m2": "fp6_e3m2",
        "mxfp8_e4m3": "fp8_e4m3", "mxfp8_e5m2": "fp8_e5m2", "mxint8": "int8",
    }  # fmt: skip
    for name, element in elements.items():
        runs[f"{name}/quark-even"] = partial(even, element=element)
    return runs


def _fp4() -> Any:
    from quark.torch.quantization.config.type import Dtype

    return Dtype.fp4


def exponent_byte(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 of float32 powers of two from 2^-127 on; NaN gives 255."""
    bits = scale.float().contiguous().view(torch.int32)
    byte = (bits >> 23 & 255).to(torch.uint8)
    return torch.where(torch.isnan(scale), torch.full_like(byte, 255), byte)


# fouroversix -------------------------------------------------------------------------------------


def fouroversix_git() -> dict[str, Run]:
    sys.path.insert(0, str(checkout("fouroversix") / "src"))
    return fouroversix()


def fouroversix() -> dict[str, Run]:
    from fouroversix import DataType, QuantizedTensor, RoundStyle, ScaleRule
    from fouroversix.quantize.pytorch import reference
    from fouroversix.quantize.pytorch.backend import PyTorchQuantizeBackend

    # 1.0.5 calls it quantize_to_fp4, later commits quantize.
    quantize = getattr(reference, "quantize", None) or reference.quantize_to_fp4
    newer = "round_style" in inspect.signature(QuantizedTensor.__init__).parameters
    extra = {"round_style": RoundStyle.nearest} if newer else {}

    def run(x: torch.Tensor, amax: torch.Tensor | None, fmt: str, rule: str) -> Out:
        data_type, scale_rule = DataType[fmt], ScaleRule[rule]
        data, scale, whole = quantize(
            x, amax, fp4_format=data_type, scale_rule=scale_rule, use_blackwell_scale_layout=False
        )
        scale = scale.view(x.shape[0], -1)
        got = QuantizedTensor(
            data, scale, whole, data_type, tuple(x.shape), scale_rule,
            scale_factors_are_in_blackwell_layout=False, **extra,
        )  # fmt: skip
        middle = torch.float16 if fmt == "nvfp4" else torch.float32
        values = {
            name: PyTorchQuantizeBackend.dequantize(got, dtype, intermediate_dtype=middle)
            for name, dtype in DTYPES.items()
        }
        stored = whole if fmt == "nvfp4" else None
        return {"scales": scale, "codes": nibbles(data), "stored": stored, **values}

    names = {"static6": "static_6", "static4": "static_4", "mse": "mse", "mae": "mae"}
    names["absmax"] = "abs_max"
    runs: dict[str, Run] = {
        f"nvfp4/fouroversix-{ours}": partial(run, fmt="nvfp4", rule=theirs)
        for ours, theirs in names.items()
    }
    for ours in ("static6", "static4"):
        runs[f"mxfp4/fouroversix-{ours}"] = partial(run, fmt="mxfp4", rule=names[ours])
    return runs


# TransformerEngine -------------------------------------------------------------------------------


def transformer_engine() -> dict[str, Run]:
    """Its Python reference, loaded from the wheel's files: the package itself needs CUDA."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("no transformer_engine", name="transformer_engine")
    base = "transformer_engine.pytorch"
    folder = Path(spec.submodule_search_locations[0], "pytorch", "custom_recipes")
    for name in ("", ".pytorch", ".pytorch.custom_recipes", ".pytorch.tensor"):
        full = f"transformer_engine{name}"
        sys.modules[full] = types.ModuleType(full)
        sys.modules[full].__path__ = []  # type: ignore[attr-defined]

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    middle = sys.modules[f"{base}.quantized_tensor"] = types.ModuleType("quantized_tensor")
    middle.Quantizer, middle.QuantizedTensorStorage = Quantizer, object  # type: ignore[attr-defined]
    tensors = sys.modules[f"{base}.tensor.utils"] = types.ModuleType("utils")
    tensors.is_custom = bool  # type: ignore[attr-defined]
    recipes = sys.modules[f"{base}.custom_recipes"]
    for name in ("gemm", "reference_utils", "reference_nvfp4"):
        full = f"{base}.custom_recipes.{name}"
        found = importlib.util.spec_from_file_location(full, folder / f"{name}.py")
        assert found is not None and found.loader is not None
        module = sys.modules[full] = importlib.util.module_from_spec(found)
        setattr(recipes, name, module)
        found.loader.exec_module(module)
    reference = sys.modules[f"{base}.custom_recipes.reference_nvfp4"]

    def run(x: torch.Tensor, amax: torch.Tensor | None, **options: Any) -> Out:
        """Scales of 16x16 tiles are repeated on 16 rows there: one of them is the tile's."""
        quantizer = reference.NVFP4QuantizerRef(dtype=None, columnwise=False, **options)
        if amax is None:
            data, scale, _, _, whole, _ = quantizer._quantize(x)
        else:
            whole = amax.view(1)
            data, scale = quantizer._quantize_blockwise_reference(
                x, whole, quantizer.quant_tile_shape[1], quantizer.quant_tile_shape[0],
                pow_2_scales=False, nvfp4_use_4over6=quantizer.nvfp4_use_4over6,
                nvfp4_e4m3_max=quantizer.nvfp4_e4m3_max,
                nvfp4_4over6_err_mode=quantizer.nvfp4_4over6_err_mode,
                nvfp4_4over6_err_use_fast_math=quantizer.nvfp4_4over6_err_use_fast_math, eps=0.0,
            )  # fmt: skip
        rows = quantizer.quant_tile_shape[0]
        return {"scales": scale[::rows], "codes": nibbles(data), "stored": whole}

    def as_kernel(x: torch.Tensor, amax: torch.Tensor | None, **options: Any) -> Out | None:
        """Where the reference agrees with the hardware cast: no -0 (it writes 0), no NaN."""
        negative_zero = (x == 0) & torch.signbit(x)
        return None if negative_zero.any() or x.isnan().any() else run(x, amax, **options)

    runs: dict[str, Run] = {"nvfp4/te-ref": run, "nvfp4": as_kernel}
    runs["nvfp4/2d"] = partial(as_kernel, quant_tile_shape=(16, 16))
    for error in ("mae", "mse"):
        for top in (256, 448):
            options = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": top}
            options["nvfp4_4over6_err_mode"] = error.upper()
            runs[f"nvfp4/te-4over6-{error}-{top}"] = partial(run, **options)
    fast = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_use_fast_math": True}
    runs["nvfp4/te-4over6-mae-256-fast"] = partial(run, **fast)
    return runs


# microxcaling ------------------------------------------------------------------------------------


def microxcaling() -> dict[str, Run]:
    sys.path.insert(0, str(checkout("microxcaling")))
    from mx.formats import _get_format_params
    from mx.mx_ops import _quantize_mx, _shared_exponents

    def run(x: torch.Tensor, amax: torch.Tensor | None, element: str, rounding: str) -> Out:
        values = _quantize_mx(x, 8, element, axes=[-1], block_size=32, round=rounding)
        shared = _shared_exponents(x.unflatten(-1, (-1, 32)), axes=[-1]).squeeze(-1).float()
        # The scale is never stored: it lives as an exponent, NaN above 127.
        byte = (shared - _get_format_params(element)[2]).clamp(min=-127) + 127
        byte = torch.where(byte <= 254, byte, torch.full_like(byte, 255)).to(torch.uint8)
        return {"scales": byte, str(x.dtype).removeprefix("torch."): values}

    elements = {
        "mxfp8_e4m3": "fp8_e4m3", "mxfp8_e5m2": "fp8_e5m2", "mxfp6_e3m2": "fp6_e3m2",
        "mxfp6_e2m3": "fp6_e2m3", "mxfp4": "fp4_e2m1", "mxint8": "int8",
    }  # fmt: skip
    return {
        f"{name}/microxcaling-{rounding}": partial(run, element=element, rounding=rounding)
        for name, element in elements.items()
        for rounding in ("nearest", "even", "floor")
    }


# Running -----------------------------------------------------------------------------------------

#: library -> what it can run
LIBRARIES: dict[str, Callable[[], dict[str, Run]]] = {
    "torchao": torchao,
    "nvidia-modelopt": modelopt,
    "compressed-tensors": compressed_tensors,
    "amd-quark": quark,
    "fouroversix": fouroversix,
    "transformer-engine": transformer_engine,
    "torchao-git": torchao_git,
    "fouroversix-git": fouroversix_git,
    "microxcaling-git": microxcaling,
}


def version_of(library: str) -> str:
    if library.endswith("-git"):
        folder = checkout(library.removesuffix("-git"))
        return "git " + (folder / "COMMIT").read_text().strip()[:7]
    return version(library)


def tensor_of(bits: np.ndarray) -> torch.Tensor:
    if bits.dtype == np.uint16:
        return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(bits.view(np.float32).copy())


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Its bits: 1, 2 or 4 bytes an element."""
    size = tensor.element_size()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    return tensor.detach().contiguous().view(whole).numpy().view(f"u{size}")


def run(library: str, cases: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    about: dict[str, Any] = {
        "version": version_of(library),
        "torch": version("torch"),
        "refused": {},
    }
    found: dict[str, np.ndarray] = {}
    for dialect, function in LIBRARIES[library]().items():
        block = "16" if dialect.startswith("nvfp4") else "32"
        for case, bits in cases.items():
            if case.endswith(".amax") or not case.startswith(f"{block}/"):
                continue
            given = cases.get(f"{case}.amax")
            amax = None if given is None else tensor_of(given).view(())
            try:
                out = function(tensor_of(bits), amax)
            except Exception as error:  # the caller decides what a refusal means
                about["refused"][f"{dialect}|{case}"] = f"{type(error).__name__}: {error}"[:300]
                continue
            for part, value in (out or {}).items():
                if value is not None:
                    found[f"{dialect}|{case}|{part}"] = bits_of(value)
    found["__about__"] = np.array(json.dumps(about))
    return found


def main(library: str, source: str, target: str) -> int:
    torch.set_num_threads(1)
    with np.load(source) as file:
        cases = {name: file[name] for name in file}
    found = run(library, cases)
    draft = Path(target + ".part.npz")
    np.savez(draft, **found)
    draft.replace(target)
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in LIBRARIES:
        raise SystemExit(f"usage: peer_runner.py {{{','.join(LIBRARIES)}}} IN.npz OUT.npz")
    raise SystemExit(main(*sys.argv[1:]))
