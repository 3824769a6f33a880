"""`quantization_config`: which layout a model declares, and the block that a library expects.

A Hugging Face model says in ``config.json`` how its weights are quantized; ModelOpt says it again
in ``hf_quant_config.json``. The readers below turn either into candidates among `LAYOUTS`; the
writers make the blocks that the libraries' own loaders open.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fpemu.checkpoints.layouts import LAYOUTS, Layout, granularity
from fpemu.errors import FileFormatError
from fpemu.formats import BlockFormat

CONFIG, MODELOPT_CONFIG = "config.json", "hf_quant_config.json"
#: Names of the block in ``config.json``; the second is older.
BLOCKS = ("quantization_config", "compression_config")
_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Declared:
    """What a model's configuration says.

    `layouts` is None where it says nothing; `block` are the sides of FP8 blocks, where given.
    """

    file: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[Layout, ...] | None = None
    block: tuple[int, int] | None = None

    @property
    def dtype(self) -> str:
        """Of the model's plain weights, bfloat16 where it is not said."""
        name = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        name = name.removeprefix("torch.")
        return name if name in _DTYPES else "bfloat16"


# Reading -----------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FileFormatError(
            f"checkpoints: {str(path)!r} is not JSON ({error}). Restore the file."
        ) from None
    if not isinstance(value, dict):
        raise FileFormatError(
            f"checkpoints: {str(path)!r} holds a {type(value).__name__}, not an object."
        )
    return value


def read_declared(folder: Path, metadata: Mapping[str, str]) -> Declared:
    """What the configuration beside a checkpoint (or in its file's metadata) declares."""
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    file = folder / CONFIG
    if "quantization_config" in metadata:
        try:
            block = json.loads(metadata["quantization_config"])
        except ValueError:
            raise FileFormatError(
                f"checkpoints: a file in {str(folder)!r} has a damaged quantization_config in its metadata."
            ) from None
    else:
        block = next((config[name] for name in BLOCKS if config.get(name)), None)
    if block is None and (folder / MODELOPT_CONFIG).is_file():
        file = folder / MODELOPT_CONFIG
        block = {"quant_method": "modelopt", **read_json(file).get("quantization", {})}
    if not isinstance(block, dict):
        return Declared(str(file), config)
    return declared(block, str(file), config)


def declared(block: dict[str, Any], file: str, config: dict[str, Any]) -> Declared:
    """The candidates of a ``quantization_config``.

    Raises
    ------
    FileFormatError
        When it declares what no layout of the table is.
    """
    library = str(block.get("quant_method", ""))
    words = _words(block)
    rows = [row for row in LAYOUTS.values() if row.library == library]
    named = [row for row in rows if words.intersection(row.declared)]
    if words and "mixed-precision" not in words and "MIXED_PRECISION" not in words:
        rows = named
    if not rows:
        said = dict.fromkeys([library, *sorted(words)])
        known = sorted({f"{r.library} {word}" for r in LAYOUTS.values() for word in r.declared})
        raise FileFormatError(
            f"checkpoints: {file!r} declares {' '.join(said)!r}, which is not read here;"
            f" known: {', '.join(known)}."
        )
    sides = block.get("weight_block_size") or _block_structure(block)
    try:
        sizes = None if sides is None else (int(sides[0]), int(sides[1]))
    except (TypeError, ValueError, IndexError):
        raise FileFormatError(
            f"checkpoints: {file!r} has block sizes {sides!r}, not two integers."
        ) from None
    return Declared(file, config, block, tuple(rows), sizes)


def _words(block: dict[str, Any]) -> set[str]:
    """The library's own words for how weights are stored."""
    method = block.get("quant_method")
    if method == "compressed-tensors":
        words = {block.get("format"), *(group.get("format") for group in _groups(block))}
    elif method == "modelopt":
        layers = block.get("quantized_layers") or {}
        words = {block.get("quant_algo"), *(row.get("quant_algo") for row in layers.values())}
    elif method == "transformer_engine":
        words = {block.get("layout")}
    else:
        words = {method}
    return {str(word) for word in words if word}


def _groups(block: dict[str, Any]) -> list[dict[str, Any]]:
    groups = block.get("config_groups") or {}
    return [group for group in groups.values() if isinstance(group, dict)]


def _block_structure(block: dict[str, Any]) -> Any:
    weights = [group.get("weights") or {} for group in _groups(block)]
    return next((w["block_structure"] for w in weights if w.get("block_structure")), None)


# Writing -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantized:
    """What a configuration must say of the weights that a layout holds.

    `modules` maps a module's name to the format of its weight; `plain` are the modules that stay
    plain; `static_inputs` says whether each has a stored scale for its activations.
    """

    layout: Layout
    modules: Mapping[str, BlockFormat]
    plain: Sequence[str]
    static_inputs: bool
    kv_cache: Any = None


def _compressed_tensors(q: Quantized) -> dict[str, Any]:
    by_kind: dict[str, list[str]] = {}
    for module, fmt in q.modules.items():
        by_kind.setdefault(granularity(fmt), []).append(module)
    groups = {}
    for i, (kind, modules) in enumerate(by_kind.items()):
        fmt = q.modules[modules[0]]
        weights: dict[str, Any] = {
            "num_bits": fmt.element.bits, "type": "float", "symmetric": True, "dynamic": False,
            "strategy": {"group": "tensor_group" if fmt.tensor_scaled else "group"}.get(kind, kind),
            "group_size": None,
        }  # fmt: skip
        if kind == "group":
            assert fmt.block is not None
            weights["group_size"] = fmt.block[-1]
            weights["scale_dtype"] = f"torch.{'float8_e4m3fn' if fmt.tensor_scaled else 'uint8'}"
        if kind == "block":
            weights["block_structure"] = list(fmt.block or ())
        inputs = None
        if q.static_inputs and kind == "group":  # of NVFP4's two scales the block's is dynamic
            inputs = dict(weights, dynamic="local")
        elif q.static_inputs:
            inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if len(by_kind) == 1 else modules,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": q.layout.name,
        }
    return {
        "config_groups": groups,
        "quant_method": "compressed-tensors",
        "format": q.layout.name,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": q.kv_cache,
        "ignore": list(q.plain),
    }


def _algorithm(q: Quantized) -> str:
    """ModelOpt's word for it; it has no word for FP8 weights alone."""
    if q.layout.element.bits == 4:
        return "NVFP4" if q.static_inputs else "W4A16_NVFP4"
    kinds = {granularity(fmt) for fmt in q.modules.values()}
    return "FP8_PER_CHANNEL_PER_TOKEN" if kinds == {"channel"} else "FP8"


def _modelopt(q: Quantized) -> dict[str, Any]:
    algorithm = _algorithm(q)
    weights: dict[str, Any] = {"dynamic": False, "num_bits": q.layout.element.bits, "type": "float"}
    if q.layout.element.bits == 4:
        weights["group_size"] = 16
    group = {"weights": weights, "targets": ["Linear"]}
    if algorithm != "W4A16_NVFP4":
        group["input_activations"] = dict(weights)
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        weights["strategy"] = "channel"
    block = {
        "config_groups": {"group_0": group},
        "ignore": list(q.plain),
        "quant_algo": algorithm,
        "producer": _producer(),
        "quant_method": "modelopt",
    }
    return {**block, "kv_cache_scheme": q.kv_cache} if q.kv_cache else block


def _producer() -> dict[str, str]:
    """Loaders look for the name modelopt, whose layout this is; the version says who wrote it."""
    from fpemu import __version__

    return {"name": "modelopt", "version": f"fpemu {__version__}"}


def modelopt_file(block: dict[str, Any]) -> dict[str, Any]:
    """``hf_quant_config.json`` for a block of `_modelopt`."""
    quantization: dict[str, Any] = {
        "quant_algo": block["quant_algo"],
        "kv_cache_quant_algo": "FP8" if block.get("kv_cache_scheme") else None,
        "exclude_modules": block["ignore"],
    }
    size = block["config_groups"]["group_0"]["weights"].get("group_size")
    if size:
        quantization["group_size"] = size
    return {"producer": block["producer"], "quantization": quantization}


def _mxfp4(q: Quantized) -> dict[str, Any]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(q.plain)}


def _fp8(q: Quantized) -> dict[str, Any]:
    fmt = next(iter(q.modules.values()))
    block = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": list(fmt.block or ()), "modules_to_not_convert": list(q.plain),
    }  # fmt: skip
    return {**block, "scale_fmt": "ue8m0"} if q.layout.scaled_by_e8m0 else block


def _transformer_engine(q: Quantized) -> dict[str, Any]:
    """No loader reads this block: TransformerEngine keeps tensors, and no file format, of its own."""
    return {
        "quant_method": "transformer_engine",
        "layout": q.layout.name,
        "with_gemm_swizzled_scales": q.layout.grid == "swizzled",
    }


WRITERS: dict[str, Callable[[Quantized], dict[str, Any]]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "transformer_engine": _transformer_engine,
}


def kv_cache_scheme(declared: Declared) -> Any:
    """The FP8 scheme of a key-value cache, which both libraries write alike, or None."""
    scheme = declared.quantization.get("kv_cache_scheme")
    return scheme if isinstance(scheme, dict) and scheme.get("num_bits") == 8 else None
