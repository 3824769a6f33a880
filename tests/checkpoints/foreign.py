"""Tiny checkpoints as the libraries store them, typed out: no name or number comes from fpemu.

Each function returns the stored tensors of one weight (and of what stands beside it), its values by
the library's own products in float32, and the ``quantization_config`` that goes with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
E4M3[[0x7F, 0xFF]] = np.nan


class Foreign(NamedTuple):
    """Stored tensors, the weight's name and values, and the configuration's block."""

    tensors: dict[str, torch.Tensor]
    name: str
    values: np.ndarray
    block: dict[str, Any]


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def fp4(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Random packed bytes of (..., K) codes, and the codes' values: even index, low nibble."""
    packed = rng().integers(0, 256, (*shape[:-1], shape[-1] // 2), dtype=np.uint8)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(shape)
    return packed, codes


def fp8(shape: tuple[int, ...]) -> np.ndarray:
    codes = rng().integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 1
    return codes


def e4m3_scales(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(8).integers(0, 127, shape, dtype=np.uint8)


def e8m0_scales(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(9).integers(0, 255, shape, dtype=np.uint8)


def power(byte: np.ndarray) -> np.ndarray:
    return np.ldexp(np.float32(1), byte.astype(np.int32) - 127).astype(np.float32)


def t(array: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if dtype is None else tensor.view(dtype)


def along(scales: np.ndarray, size: int) -> np.ndarray:
    return np.repeat(scales, size, axis=-1)


FP8_DTYPE = torch.float8_e4m3fn
#: fl(1/NUMBER) does not give NUMBER back by another reciprocal.
NUMBER = np.float32(0.00195)
assert np.float32(1) / (np.float32(1) / NUMBER) != NUMBER


def modelopt_nvfp4() -> Foreign:
    packed, codes = fp4((8, 48))
    scales = e4m3_scales((8, 3))
    table = np.where(np.arange(16) == 8, np.float32(0), E2M1)  # ModelOpt's table has +0 twice
    tensors = {
        "m.a.weight": t(packed),
        "m.a.weight_scale": t(scales, FP8_DTYPE),
        "m.a.weight_scale_2": torch.tensor(NUMBER),
        "m.a.input_scale": torch.tensor(np.float32(0.0003)),
    }
    values = table[codes] * along(E4M3[scales] * NUMBER, 16)
    return Foreign(
        tensors, "m.a.weight", values, {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    )


def modelopt_fp8() -> Foreign:
    codes = fp8((8, 40))
    tensors = {
        "m.a.weight": t(codes, FP8_DTYPE),
        "m.a.weight_scale": torch.tensor(NUMBER),
        "m.a.input_scale": torch.tensor(np.float32(0.02)),
    }
    block = {"quant_method": "modelopt", "quant_algo": "FP8"}
    return Foreign(tensors, "m.a.weight", E4M3[codes] * NUMBER, block)


def modelopt_fp8_by_channel() -> Foreign:
    codes = fp8((8, 40))
    scales = np.random.default_rng(1).random(8, np.float32)
    tensors = {"m.a.weight": t(codes, FP8_DTYPE), "m.a.weight_scale": t(scales)}
    block = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    return Foreign(tensors, "m.a.weight", E4M3[codes] * scales[:, None], block)


def ct_block(layout: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def ct_nvfp4() -> Foreign:
    packed, codes = fp4((8, 48))
    scales = e4m3_scales((8, 3))
    number = np.float32([987.6543])
    tensors = {
        "m.a.weight_packed": t(packed),
        "m.a.weight_scale": t(scales, FP8_DTYPE),
        "m.a.weight_global_scale": t(number),
        "m.a.input_global_scale": t(np.float32([77.7])),
    }
    values = E2M1[codes] * along(E4M3[scales] / number, 16)
    return Foreign(tensors, "m.a.weight", values, ct_block("nvfp4-pack-quantized"))


def ct_mxfp4() -> Foreign:
    packed, codes = fp4((8, 64))
    scales = e8m0_scales((8, 2))
    tensors = {"m.a.weight_packed": t(packed), "m.a.weight_scale": t(scales)}
    with np.errstate(over="ignore"):
        values = E2M1[codes] * along(power(scales), 32)
    return Foreign(tensors, "m.a.weight", values, ct_block("mxfp4-pack-quantized"))


def ct_fp8(scales: np.ndarray, spread: np.ndarray, **weights: Any) -> Foreign:
    codes = fp8((200, 144))
    tensors = {"m.a.weight": t(codes, FP8_DTYPE), "m.a.weight_scale": t(scales)}
    block = ct_block("float-quantized", **weights)
    return Foreign(tensors, "m.a.weight", E4M3[codes] * spread, block)


def ct_fp8_tensor() -> Foreign:
    scales = np.float32([0.0123])
    return ct_fp8(scales, scales, strategy="tensor")


def ct_fp8_channel() -> Foreign:
    scales = np.random.default_rng(2).random((200, 1), np.float32)
    return ct_fp8(scales, scales, strategy="channel")


def ct_fp8_block() -> Foreign:
    scales = np.random.default_rng(3).random((2, 2), np.float32)
    spread = scales.repeat(128, 0).repeat(128, 1)[:200, :144]
    return ct_fp8(scales, spread, strategy="block", block_structure=[128, 128])


def ct_fp8_bf16_scales() -> Foreign:
    """LLM-Compressor stores scales in the model's dtype; the product is then rounded to it."""
    codes = fp8((16, 40))
    scales = torch.from_numpy(np.random.default_rng(4).random((16, 1), np.float32)).bfloat16()
    tensors = {"m.a.weight": t(codes, FP8_DTYPE), "m.a.weight_scale": scales}
    values = (torch.from_numpy(E4M3[codes]) * scales.float()).bfloat16().float().numpy()
    return Foreign(tensors, "m.a.weight", values, ct_block("float-quantized", strategy="channel"))


def gpt_oss() -> Foreign:
    packed, codes = fp4((3, 10, 64))
    scales = e8m0_scales((3, 10, 2))
    tensors = {
        "m.experts.up_proj_blocks": t(packed.reshape(3, 10, 2, 16)),
        "m.experts.up_proj_scales": t(scales),
        "m.experts.up_proj_bias": torch.zeros(3, 10, dtype=torch.bfloat16),
    }
    with np.errstate(over="ignore"):
        values = E2M1[codes] * along(power(scales), 32)
    # The plain weight of transformers is the transpose: [experts, in, out].
    return Foreign(
        tensors, "m.experts.up_proj", values.transpose(0, 2, 1), {"quant_method": "mxfp4"}
    )


def gpt_oss_original() -> Foreign:
    packed, codes = fp4((3, 10, 64))
    scales = e8m0_scales((3, 10, 2))
    tensors = {
        "block.0.mlp.mlp1_weight.blocks": t(packed.reshape(3, 10, 2, 16)),
        "block.0.mlp.mlp1_weight.scales": t(scales),
    }
    with np.errstate(over="ignore"):
        values = E2M1[codes] * along(power(scales), 32)
    return Foreign(tensors, "block.0.mlp.mlp1_weight", values, {"quant_method": "mxfp4"})


def deepseek(scales: torch.Tensor, factor: np.ndarray, block: tuple[int, int]) -> Foreign:
    codes = fp8((200, 144))
    tensors = {"m.a.weight": t(codes, FP8_DTYPE), "m.a.weight_scale_inv": scales}
    spread = factor.repeat(block[0], 0).repeat(block[1], 1)[:200, :144]
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    return Foreign(tensors, "m.a.weight", E4M3[codes] * spread, config)


def deepseek_fp8() -> Foreign:
    scales = np.random.default_rng(5).random((2, 2), np.float32)
    return deepseek(t(scales), scales, (128, 128))


def deepseek_fp8_other_block() -> Foreign:
    scales = np.random.default_rng(6).random((4, 5), np.float32)
    return deepseek(t(scales), scales, (64, 32))


def deepseek_ue8m0() -> Foreign:
    scales = np.uint8([[120, 127], [1, 130]])
    return deepseek(t(scales, torch.float8_e8m0fnu), power(scales), (128, 128))


def swizzled(scales: np.ndarray) -> np.ndarray:
    """The 128x4 order, scale by scale, from its definition."""
    tall, wide = scales.shape
    out = np.zeros((-(-tall // 128) * 128, -(-wide // 4) * 4), np.uint8)
    flat = out.reshape(-1)
    for m in range(tall):
        for k in range(wide):
            tile = m // 128 * (out.shape[1] // 4) + k // 4
            flat[tile * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4] = scales[m, k]
    return out


def padded(scales: np.ndarray) -> np.ndarray:
    tall, wide = scales.shape
    return np.pad(scales, ((0, -tall % 128), (0, -wide % 4)))


def te_nvfp4(store: Callable[[np.ndarray], np.ndarray] = padded, word: str = "") -> Foreign:
    packed, codes = fp4((130, 96))
    scales = e4m3_scales((130, 6))
    amax = np.float32([3.21])
    tensors = {
        "m.a.weight.rowwise_data": t(packed),
        "m.a.weight.rowwise_scale_inv": t(store(scales)),
        "m.a.weight.amax_rowwise": t(amax),
    }
    factor = (E4M3[scales] * amax) * (np.float32(1) / np.float32(2688))
    block = {"quant_method": "transformer_engine", "layout": f"te-nvfp4{word}"}
    return Foreign(tensors, "m.a.weight", E2M1[codes] * along(factor, 16), block)


def te_mxfp8(store: Callable[[np.ndarray], np.ndarray] = padded, word: str = "") -> Foreign:
    codes = fp8((130, 96))
    scales = np.random.default_rng(10).integers(20, 230, (130, 3), dtype=np.uint8)
    tensors = {
        "m.a.weight.rowwise_data": t(codes),
        "m.a.weight.rowwise_scale_inv": t(store(scales)),
    }
    block = {"quant_method": "transformer_engine", "layout": f"te-mxfp8{word}"}
    return Foreign(tensors, "m.a.weight", E4M3[codes] * along(power(scales), 32), block)


#: case -> layout, its maker
CASES: dict[str, tuple[str, Callable[[], Foreign]]] = {
    "modelopt-nvfp4": ("modelopt-nvfp4", modelopt_nvfp4),
    "modelopt-fp8": ("modelopt-fp8", modelopt_fp8),
    "modelopt-fp8-channel": ("modelopt-fp8", modelopt_fp8_by_channel),
    "ct-nvfp4": ("nvfp4-pack-quantized", ct_nvfp4),
    "ct-mxfp4": ("mxfp4-pack-quantized", ct_mxfp4),
    "ct-fp8-tensor": ("float-quantized", ct_fp8_tensor),
    "ct-fp8-channel": ("float-quantized", ct_fp8_channel),
    "ct-fp8-block": ("float-quantized", ct_fp8_block),
    "ct-fp8-bf16-scales": ("float-quantized", ct_fp8_bf16_scales),
    "gpt-oss": ("gpt-oss", gpt_oss),
    "gpt-oss-original": ("gpt-oss-original", gpt_oss_original),
    "deepseek-fp8": ("deepseek-fp8", deepseek_fp8),
    "deepseek-fp8-64x32": ("deepseek-fp8", deepseek_fp8_other_block),
    "deepseek-ue8m0": ("deepseek-fp8-ue8m0", deepseek_ue8m0),
    "te-nvfp4": ("te-nvfp4", te_nvfp4),
    "te-nvfp4-swizzled": ("te-nvfp4-swizzled", lambda: te_nvfp4(swizzled, "-swizzled")),
    "te-mxfp8": ("te-mxfp8", te_mxfp8),
    "te-mxfp8-swizzled": ("te-mxfp8-swizzled", lambda: te_mxfp8(swizzled, "-swizzled")),
}


def write(folder: Path, tensors: dict[str, torch.Tensor], block: Any = None) -> Path:
    """A folder with one safetensors file, and config.json where there is a block."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "tiny", "dtype": "bfloat16"}
    if block is not None:
        config["quantization_config"] = block
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def raw(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What must not change: dtype, shape, bytes."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
    return str(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes()
