"""Layouts: how a library stores a quantized weight, one row each.

A row says which tensors make up a weight and what their bytes mean; the order in which the library
multiplies them back together is that of the row's format (`fpemu.dialects.DECODE`). The reader and the writer (`fpemu.checkpoints.coding`) know no
library; they know these rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fpemu.errors import unknown
from fpemu.formats import (
    E2M1,
    E4M3,
    E8M0,
    FP32,
    TABLE,
    BlockFormat,
    Format,
)

# Values of codes ---------------------------------------------------------------------------------


def _values(fmt: Format, **changed: float) -> np.ndarray:
    values = fmt.values().astype(np.float32)
    for code, value in changed.items():
        values[int(code[1:])] = value
    return values


#: float32 values of element and scale codes, as a library's table has them.
VALUES = {
    "e2m1": _values(E2M1),
    "e2m1 without -0": _values(E2M1, _8=0.0),
    "e4m3": _values(E4M3),
    "e8m0": _values(E8M0),
    "2^(b-127)": _values(E8M0, _255=np.inf),  # 255 is not NaN where the library only shifts
}

# Global scales -----------------------------------------------------------------------------------

#: What a stored number of the whole tensor means, as the factor that multiplies; and back.
#: 2688 = 6 * 448, the largest element times the largest block scale.
GLOBAL: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "multiplies": (lambda x: x, lambda x: x),
    "divides": (lambda x: np.float32(1) / x, lambda x: np.float32(1) / x),
    "amax": (lambda x: x / np.float32(2688), lambda x: x * np.float32(2688)),
}


def convert_number(number: Any, have: str, want: str) -> Any:
    """A float32 number (or array) of one kind as another kind, one rounding a step."""
    if have == want:
        return number
    with np.errstate(all="ignore"):
        return GLOBAL[want][1](GLOBAL[have][0](number))


# Rows --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How a library stores a quantized weight.

    Parameters
    ----------
    name : str
    library : str
        ``quant_method`` of a model's ``quantization_config``.
    declared : tuple of str
        What names this layout in that configuration (the library's own word for it).
    format : str
        The fpemu format that stored codes are read as, its decode order included. FP8 rows with
        several granularities name the one that plain weights get.
    codes, scales, number : str, str, str or None
        Ends of the names of the tensors that hold codes, block scales, and the number of the whole
        tensor. They stand where `plain` stands in the weight's name.
    plain : str
        End of a weight's name; for most libraries ``"weight"``.
    code_dtypes, scale_dtypes : tuple of str
        Dtypes of those tensors in the file's header; the first is written.
    number_kind : str
        What the number is, a name in `GLOBAL`.
    number_shape : tuple of int
        As it is written; read are () and (1,).
    input_number : str or None, input_kind : str
        The same for the static scale of activations, which is carried along.
    granularities : tuple of str
        ``"group"``: scales as the format says. For FP8: ``"tensor"``, ``"channel"``, ``"block"``.
    low_first : bool
        Whether the even index of two FP4 codes lies in the low nibble.
    grouped : bool
        Codes are stored as (..., blocks, bytes of a block).
    grid : str
        Scales lie ``"linear"``; ``"padded"`` with zeros to 128 rows and 4 columns; or
        ``"swizzled"``, padded and in the order that block-scaled GEMMs read.
    stack_axis : int
        Block axis of a three-dimensional weight (a stack of experts) when it is plain: -2 where the
        library stores the transpose of its plain weight.
    targets : tuple of (pattern, dimensions)
        Plain weights to quantize. The first pattern that fits any weight is the one used.
    fused : tuple of tuples of str
        Modules that servers run as one GEMM with one number: plain weights are quantized with the
        largest amax of the group. Last parts of modules' names.
    elements, scale_values : str
        Names in `VALUES`.
    rounded : str
        Dtype that q * factor is rounded to: ``"float32"``; ``"output"``, the factor too; or
        ``"scale"``, the dtype that scales are stored in.
    source : str
        Where the arithmetic was read.
    """

    name: str
    library: str
    declared: tuple[str, ...]
    format: str
    codes: str = "weight"
    scales: str = "weight_scale"
    number: str | None = None
    plain: str = "weight"
    code_dtypes: tuple[str, ...] = ("U8",)
    scale_dtypes: tuple[str, ...] = ("U8",)
    number_kind: str = "multiplies"
    number_shape: tuple[int, ...] = ()
    input_number: str | None = None
    input_kind: str = "multiplies"
    granularities: tuple[str, ...] = ("group",)
    low_first: bool = True
    grouped: bool = False
    grid: str = "linear"
    stack_axis: int = -1
    targets: tuple[tuple[str, int], ...] = (("*weight", 2),)
    fused: tuple[tuple[str, ...], ...] = ()
    elements: str = "e2m1"
    scale_values: str = "e4m3"
    rounded: str = "float32"
    source: str = field(default="user", compare=False)

    @property
    def element(self) -> Format:
        return read_format(self.format).element

    def stem(self, name: str) -> str | None:
        """What precedes `codes` in a tensor's name, or None where it does not end so."""
        return stem_of(name, self.codes)

    def plain_name(self, stem: str) -> str:
        return stem + self.plain

    def plain_stem(self, name: str) -> str | None:
        return stem_of(name, self.plain)

    @property
    def scaled_by_e8m0(self) -> bool:
        return self.scale_dtypes[0] in ("U8", "F8_E8M0") and self.scale_values != "e4m3"


def stem_of(name: str, end: str) -> str | None:
    """`name` without `end`, a whole word of a dotted name unless `end` brings its own joint."""
    if not name.endswith(end):
        return None
    stem = name[: len(name) - len(end)]
    joined = end[:1] in (".", "_", "")
    return stem if (stem if joined else not stem or stem.endswith(".")) else None


def read_format(name: str) -> BlockFormat:
    """The row for a name, also for those that only checkpoints use."""
    row = LOCAL.get(name) or TABLE.get(name)
    assert isinstance(row, BlockFormat)
    return row


_MODELOPT = "nvidia-modelopt 0.47.0"
_CT = "compressed-tensors 0.20.1"
_HF = "transformers 5"
_TE = "TransformerEngine 2.20"

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))

_ROWS = (
    Layout(
        "modelopt-nvfp4", "modelopt", ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_SVD"),
        "nvfp4/modelopt",
        scale_dtypes=("F8_E4M3",), number="weight_scale_2", input_number="input_scale", fused=_FUSED,
        elements="e2m1 without -0",
        source=f"{_MODELOPT} NVFP4QTensor.dequantize",
    ),
    Layout(
        "modelopt-fp8", "modelopt", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"), "fp8_tensor_e4m3",
        code_dtypes=("F8_E4M3",), scale_dtypes=("F32",), input_number="input_scale",
        granularities=("tensor", "channel"), fused=_FUSED, elements="e4m3", rounded="output",
        source=f"{_MODELOPT} FP8QTensor.dequantize, export/quant_utils.py",
    ),
    Layout(
        "deepseek-fp8", "fp8", ("fp8",), "fp8_block_e4m3/2d/fp32",
        scales="weight_scale_inv", code_dtypes=("F8_E4M3",), scale_dtypes=("F32", "BF16"),
        granularities=("block",), elements="e4m3",
        source=f"{_HF} integrations/finegrained_fp8.py Fp8Dequantize",
    ),
    Layout(
        "deepseek-fp8-ue8m0", "fp8", ("fp8",), "fp8_block_e4m3/2d/e8m0",
        scales="weight_scale_inv", code_dtypes=("F8_E4M3",), scale_dtypes=("F8_E8M0", "U8"),
        granularities=("block",), elements="e4m3", scale_values="e8m0",
        source=f"{_HF} integrations/finegrained_fp8.py Fp8Dequantize",
    ),
    Layout(
        "nvfp4-pack-quantized", "compressed-tensors", ("nvfp4-pack-quantized",),
        "nvfp4/compressed-tensors",
        codes="weight_packed", scale_dtypes=("F8_E4M3",),
        number="weight_global_scale", number_kind="divides", number_shape=(1,), fused=_FUSED,
        input_number="input_global_scale", input_kind="divides",
        source=f"{_CT} NVFP4PackedCompressor.decompress",
    ),
    Layout(
        "mxfp4-pack-quantized", "compressed-tensors", ("mxfp4-pack-quantized",),
        "mxfp4/compressed-tensors",
        codes="weight_packed", scale_values="2^(b-127)",
        source=f"{_CT} MXFP4PackedCompressor.decompress",
    ),
    Layout(
        "float-quantized", "compressed-tensors", ("float-quantized", "naive-quantized"),
        "fp8_tensor_e4m3",
        code_dtypes=("F8_E4M3",), scale_dtypes=("F32", "BF16", "F16"), number_shape=(1,),
        input_number="input_scale", granularities=("tensor", "channel", "block"), fused=_FUSED,
        elements="e4m3", rounded="scale",
        source=f"{_CT} FloatQuantizationCompressor.decompress",
    ),
    Layout(
        "gpt-oss", "mxfp4", ("mxfp4",), "mxfp4",
        codes="_blocks", scales="_scales", plain="", grouped=True, stack_axis=-2,
        targets=(("*experts*", 3), ("*weight", 2)), scale_values="2^(b-127)",
        source=f"{_HF} integrations/mxfp4.py _convert_moe_packed_tensors",
    ),
    Layout(
        "gpt-oss-original", "mxfp4", ("mxfp4",), "mxfp4",
        codes=".blocks", scales=".scales", plain="", grouped=True,
        targets=(("*mlp*_weight", 3), ("*weight", 2)), scale_values="2^(b-127)",
        source="gpt-oss torch/weights.py",
    ),
    Layout(
        "te-nvfp4", "transformer_engine", ("te-nvfp4",), "nvfp4/te-unfused",
        codes=".rowwise_data", scales=".rowwise_scale_inv", number=".amax_rowwise", plain="",
        scale_dtypes=("U8", "F8_E4M3"), number_kind="amax", number_shape=(1,), grid="padded",
        source=f"{_TE} NVFP4TensorStorage, dequantize_nvfp4.cuh",
    ),
    Layout(
        "te-mxfp8", "transformer_engine", ("te-mxfp8",), "mxfp8_e4m3/te",
        codes=".rowwise_data", scales=".rowwise_scale_inv", plain="",
        code_dtypes=("U8", "F8_E4M3"), scale_dtypes=("U8", "F8_E8M0"), grid="padded",
        elements="e4m3", scale_values="e8m0", source=f"{_TE} MXFP8TensorStorage",
    ),
)  # fmt: skip

#: Formats without a name of their own outside checkpoints. A channel's block is a whole row, so
#: its row is completed for each weight (`sized`).
LOCAL = {
    "fp8_channel_e4m3": BlockFormat("fp8_channel_e4m3", E4M3, (1,), FP32, "fp8"),
    "fp8_block_e4m3/2d/e8m0": BlockFormat(
        "fp8_block_e4m3/2d/e8m0", E4M3, (128, 128), E8M0, "mx_rceil"
    ),
}

LAYOUTS: dict[str, Layout] = {row.name: row for row in _ROWS}
for _name in ("te-nvfp4", "te-mxfp8"):
    _row = replace(
        LAYOUTS[_name],
        name=f"{_name}-swizzled",
        declared=(f"{_name}-swizzled",),
        grid="swizzled",
    )
    LAYOUTS[_row.name] = _row


def get_layout(name: str | Layout, where: str) -> Layout:
    """The row called `name`; a `Layout` is returned as it is.

    Raises
    ------
    ValueError
        For a name that is not in the table, with the nearest known name.
    """
    if isinstance(name, Layout):
        return name
    try:
        return LAYOUTS[name]
    except KeyError:
        raise unknown(where, "layout", name, LAYOUTS) from None


# Formats of a weight -----------------------------------------------------------------------------


def granularity(fmt: BlockFormat) -> str:
    """``"tensor"``, ``"channel"``, ``"block"`` for FP8; ``"group"`` for what has its own format."""
    if fmt.block is None:
        return "tensor"
    if fmt.name == "fp8_channel_e4m3":
        return "channel"
    return "block" if fmt.is_2d else "group"


def sized(fmt: BlockFormat, columns: int) -> BlockFormat:
    """The row for a weight: a channel's block is as long as a row."""
    return replace(fmt, block=(max(columns, 1),)) if granularity(fmt) == "channel" else fmt


def same_codes(a: Format | BlockFormat | None, b: BlockFormat) -> bool:
    """Whether codes and scales of `a` are codes and scales of `b`, whatever computed them."""
    if not isinstance(a, BlockFormat) or granularity(a) != granularity(b):
        return False
    blocks = a.block == b.block or granularity(a) == "channel"
    scale = (a.scale and a.scale.name, a.tensor_scaled) == (
        b.scale and b.scale.name,
        b.tensor_scaled,
    )
    return a.element == b.element and blocks and scale


def holds(layout: Layout, fmt: BlockFormat) -> bool:
    """Whether a layout has room for a format's codes and scales."""
    own = read_format(layout.format)
    kind = granularity(fmt)
    if kind not in layout.granularities or fmt.element != own.element:
        return False
    if kind == "group":
        return same_codes(fmt, own)
    return kind == "tensor" or (fmt.scale == E8M0) == layout.scaled_by_e8m0


def layout_for(fmt: BlockFormat, where: str) -> Layout:
    """The layout that a format is written in unless told otherwise."""
    fitting = [row for row in LAYOUTS.values() if holds(row, fmt)]
    if not fitting:
        raise ValueError(
            f"{where}: no layout holds {fmt.name!r}; layouts hold"
            f" {', '.join(sorted({row.format for row in LAYOUTS.values()}))} and formats with the"
            " same codes. Choose one of them."
        )
    own = (row for row in fitting if row.format == fmt.name and "/" in fmt.name)  # a dialect's
    return next(own, fitting[0])
