"""Makes and opens checkpoints with the libraries themselves. Needs them, never fpemu.

    python checkpoint_peer.py make OUT
    python checkpoint_peer.py open IN OUT

`make` writes to OUT tiny plain models, checkpoints quantized by ModelOpt and compressed-tensors, and
``<checkpoint>.values.safetensors``: the library's own dequantized weights. `open` does the last for
every checkpoint in IN, each by the way its name starts with. A tensor of the result is called
``<dtype>|<weight>``.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Tensors = dict[str, torch.Tensor]


# Making ------------------------------------------------------------------------------------------


def plain_llama(out: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out / "llama")


def plain_gpt_oss(out: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, vocab_size=64, num_local_experts=3,
        num_experts_per_tok=1, layer_types=["full_attention"],
    )  # fmt: skip
    model = GptOssForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(out / "gpt-oss-plain")


def by_modelopt(out: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import LlamaForCausalLM

    for name, config in (("nvfp4", mtq.NVFP4_DEFAULT_CFG), ("fp8", mtq.FP8_DEFAULT_CFG)):
        model = LlamaForCausalLM.from_pretrained(out / "llama", dtype=torch.bfloat16)
        mtq.quantize(model, config, lambda m: m(torch.arange(32)[None]))
        export_hf_checkpoint(model, export_dir=out / f"modelopt-{name}")


def by_compressed_tensors(out: Path) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
    from transformers import LlamaForCausalLM

    for preset in ("NVFP4A16", "MXFP4A16", "FP8_DYNAMIC", "FP8_BLOCK"):
        model = LlamaForCausalLM.from_pretrained(out / "llama", dtype=torch.bfloat16)
        scheme = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[preset])
        config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
        apply_quantization_config(model, config)
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is not None:
                calibrate(module)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(out / f"ct-{preset}")
        compressor.update_config(out / f"ct-{preset}")


def calibrate(module: torch.nn.Module) -> None:
    """Scales of a weight by the library's own formulas, from its extremes."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args, w = module.quantization_scheme.weights, module.weight.data
    if args.strategy == "block":
        tall, wide = args.block_structure
        blocks = w.reshape(w.shape[0] // tall, tall, w.shape[1] // wide, wide)
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif args.strategy == "channel":
        low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    else:
        groups = w.unflatten(-1, (-1, args.group_size))
        low, high = groups.amin(-1), groups.amax(-1)
    scale = None
    if args.strategy == "tensor_group":
        scale = generate_gparam(w.min(), w.max())
        module.weight_global_scale.data = scale.reshape(1)
    module.weight_scale.data = calculate_qparams(low, high, args, global_scale=scale)[0]


def modelopt_as_ct(out: Path) -> None:
    """ModelOpt's checkpoint through compressed-tensors' own converter."""
    from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import (
        ModelOptNvfp4Converter,
    )

    tensors = load_file(out / "modelopt-nvfp4" / "model.safetensors")
    converter = ModelOptNvfp4Converter(ignore=["lm_head", "re:.*embed.*"], targets=["re:.*proj"])
    save_file(converter.process(tensors), out / "modelopt-as-ct.safetensors")


# Opening -----------------------------------------------------------------------------------------


def modelopt(folder: Path) -> Tensors:
    """Each weight through the library's tensor class; the block is what its export makes."""
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    beside = json.loads((folder / "hf_quant_config.json").read_text())
    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert convert_hf_quant_config_format(beside) == block, (beside, block)
    found, values = load_file(folder / "model.safetensors"), {}
    for name, data in found.items():
        scale = found.get(f"{name}_scale")
        if scale is None or not name.endswith("weight"):
            continue
        for word, dtype in DTYPES.items():
            if data.dtype == torch.uint8:
                shape = torch.Size((*data.shape[:-1], 2 * data.shape[-1]))
                values[f"{word}|{name}"] = NVFP4QTensor(shape, dtype, data).dequantize(
                    dtype, scale=scale, double_scale=found[f"{name}_scale_2"], block_sizes={-1: 16}
                )
            else:
                stored = FP8QTensor(data.shape, dtype, data)
                values[f"{word}|{name}"] = stored.dequantize(dtype, scale=scale)
    return values


def compressed_tensors(folder: Path) -> Tensors:
    from transformers import CompressedTensorsConfig, LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        folder, quantization_config=CompressedTensorsConfig(dequantize=True), dtype=torch.bfloat16
    )
    lazily = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert lazily(torch.arange(8)[None]).logits.shape == (1, 8, 64)
    return {f"bfloat16|{name}": value for name, value in model.state_dict().items()}


def gpt_oss(folder: Path) -> Tensors:
    from transformers import GptOssForCausalLM, Mxfp4Config
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = GptOssForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    values = {f"bfloat16|{name}": value for name, value in model.state_dict().items()}
    found = load_file(folder / "model.safetensors")
    for name, blocks in found.items():
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            scales = found[f"{stem}_scales"]
            values[f"float32|{stem}"] = convert_moe_packed_tensors(
                blocks, scales, dtype=torch.float32
            )
    return values


def deepseek(folder: Path) -> Tensors:
    """Loading the model needs accelerate; these are the functions that it would call."""
    from compressed_tensors.entrypoints.convert.converters import FP8BlockDequantizer
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    block = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = FineGrainedFP8Config(**block)
    dequantize = Fp8Dequantize(None)._dequantize_one
    found, values = load_file(folder / "model.safetensors"), {}
    for name, data in found.items():
        scale = found.get(f"{name}_scale_inv")
        if scale is None:
            continue
        for word, dtype in DTYPES.items():
            value = dequantize(data, scale, dtype)
            values[f"{word}|{name}"] = value
            sides = list(config.weight_block_size)
            other = FP8BlockDequantizer(targets=["Linear"], weight_block_size=sides, dtype=dtype)
            if scale.dtype == torch.float32:
                again = other._create_dequantized_weight(data, scale)
                assert torch.equal(again, value)
    return values


OPENERS = {
    "modelopt-": modelopt, "ct-": compressed_tensors, "gpt-oss-mx": gpt_oss, "deepseek-": deepseek,
}  # fmt: skip


def open_all(folder: Path, out: Path) -> None:
    for path in sorted(folder.iterdir()):
        opener = next((f for start, f in OPENERS.items() if path.name.startswith(start)), None)
        if opener is not None and path.is_dir():
            values = {name: value.contiguous() for name, value in opener(path).items()}
            save_file(values, out / f"{path.name}.values.safetensors")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(5)
    if sys.argv[1] == "make":
        out = Path(sys.argv[2])
        plain_llama(out)
        plain_gpt_oss(out)
        by_modelopt(out)
        by_compressed_tensors(out)
        modelopt_as_ct(out)
        open_all(out, out)
        names = ("nvidia-modelopt", "compressed-tensors", "transformers", "torch")
        (out / "versions.json").write_text(json.dumps({name: version(name) for name in names}))
    else:
        open_all(Path(sys.argv[2]), Path(sys.argv[3]))


if __name__ == "__main__":
    main()
