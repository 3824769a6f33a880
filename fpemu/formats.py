"""Number formats as rows of a table.

A `Format` is one element format: where its exponent and mantissa bits lie and which codes mean
infinity and NaN. Everything else (``max``, ``emin``, ``values()``) follows from the row. A
`BlockFormat` is an element format, a block shape and a scale rule. Both tables stand at the end of
this file; a user's own format is one more row.

Sources: IEEE 754-2019 (binary16, binary32); OCP 8-bit Floating Point Specification (OFP8) 1.0;
OCP Microscaling Formats (MX) 1.0; NVIDIA PTX ISA (tf32, ue8m0, e2m1, e2m3, e3m2); the ml_dtypes
README (fnuz, b11, e3m4 and IEEE-style e4m3); NVIDIA "Pretraining LLMs with NVFP4" (NVFP4).
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

import numpy as np

from fpemu.errors import unknown

Special = Literal["ieee", "fn", "fnuz", "finite"]


def _remember_hash(row: Format | BlockFormat) -> None:
    """Rows key the caches of every call, and a dataclass would hash all its fields each time."""
    compared = tuple(getattr(row, f.name) for f in fields(row) if f.compare)
    object.__setattr__(row, "_hash", hash(compared))


@dataclass(frozen=True)
class Format:
    """An element format of at most 32 bits whose values all lie on float32's grid.

    Codes are ordered sign, exponent, mantissa from the top bit down; `special` says which of them
    are not numbers:

    ============ ==========================================================================
    ``ieee``     exponent all ones: mantissa 0 is infinity, anything else NaN
    ``fn``       only exponent and mantissa all ones is NaN; no infinity (OFP8 E4M3, E8M0)
    ``fnuz``     the code of minus zero is NaN; no infinity, no minus zero
    ``finite``   every code is a number (E2M1, E2M3, E3M2, integers)
    ============ ==========================================================================

    Parameters
    ----------
    name : str
    exp_bits : int
        0 for a two's complement integer of ``man_bits + 1`` bits.
    man_bits : int
        Stored mantissa bits.
    bias : int, optional
        Exponent bias; ``2**(exp_bits-1) - 1`` unless given. An integer has the value
        ``code * 2**(1 - bias - man_bits)``.
    special : {"ieee", "fn", "fnuz", "finite"}
    signed : bool
    has_zero : bool
        False for E8M0, whose code 0 is ``2**-bias``, a power of two like the others.
    overflow : {"sat", "nonsat"}
        What `fpemu.quantize` does past `max` unless told otherwise.
    source : str
        Where the row comes from.

    Raises
    ------
    ValueError
        When the row is not a subset of float32.

    Examples
    --------
    >>> from fpemu.formats import Format
    >>> Format("e3m2fn", exp_bits=3, man_bits=2, special="fn").max
    24.0
    """

    name: str
    exp_bits: int
    man_bits: int
    bias: int | None = None
    special: Special = "finite"
    signed: bool = True
    has_zero: bool = True
    overflow: Literal["sat", "nonsat"] = "sat"
    source: str = "user"

    def __post_init__(self) -> None:
        if self.bias is None:
            object.__setattr__(self, "bias", (1 << self.exp_bits - 1) - 1 if self.exp_bits else 0)
        where = f"Format: {self.name!r}"
        if self.special not in ("ieee", "fn", "fnuz", "finite"):
            raise unknown("Format", "special", self.special, ("ieee", "fn", "fnuz", "finite"))
        if self.overflow not in ("sat", "nonsat"):
            raise unknown("Format", "overflow", self.overflow, ("sat", "nonsat"))
        if not (0 <= self.exp_bits <= 8 and 0 <= self.man_bits <= 23):
            raise ValueError(
                f"{where} has exp_bits={self.exp_bits}, man_bits={self.man_bits}; allowed are 0 to"
                " 8 and 0 to 23. Values must lie on float32's grid: use fewer bits."
            )
        if self.is_integer and (self.special != "finite" or not self.signed or not self.man_bits):
            raise ValueError(
                f"{where} is an integer (exp_bits=0), got special={self.special!r}, signed="
                f"{self.signed}, man_bits={self.man_bits}; an integer is signed, finite and has"
                " man_bits >= 1. Give exp_bits >= 1 for a float."
            )
        if self.special == "fnuz" and not self.signed:
            raise ValueError(f"{where} is fnuz and unsigned; fnuz needs a sign bit. Use 'fn'.")
        if not self.has_zero and self.man_bits:
            raise ValueError(
                f"{where} has has_zero=False and man_bits={self.man_bits}; only powers of two"
                " (man_bits=0, as E8M0) go without a zero. Leave has_zero out."
            )
        if self.special == "ieee" and not self.man_bits:
            raise ValueError(
                f"{where} is ieee with man_bits=0, which leaves no code for NaN beside infinity;"
                " at least 1 is needed. Use special='fn'."
            )
        if self.has_zero and not self.is_integer and self.emin < -126:
            raise ValueError(
                f"{where} with bias={self.bias} has normal values below 2**-126, float32's smallest"
                " normal; allowed are biases up to 127. Choose another bias."
            )
        if self.max_mag < 1 or self.emin - self.man_bits < -149 or self.max >= 2.0**128:
            raise ValueError(
                f"{where} with bias={self.bias} has values outside float32"
                f" (smallest step 2**{self.emin - self.man_bits}, max {self.max:g}); allowed are"
                " steps from 2**-149 and values below 2**128. Choose another bias."
            )
        _remember_hash(self)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    # What the row is made of -----------------------------------------------------------------

    @property
    def is_integer(self) -> bool:
        return self.exp_bits == 0

    @property
    def bits(self) -> int:
        """Width of a code in bits."""
        return self.signed + self.exp_bits + self.man_bits

    @property
    def code_dtype(self) -> np.dtype:
        """The unsigned integer that holds one code: uint8, uint16 or uint32."""
        return np.dtype(np.uint8 if self.bits <= 8 else np.uint16 if self.bits <= 16 else np.uint32)

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number (of the smallest value where there is no zero)."""
        assert self.bias is not None
        # An integer's values all lie "below the first normal", on one uniform grid.
        return (1 if self.has_zero else 0) - self.bias  # type: ignore[operator]

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value: ``floor(log2(max))``."""
        n = Fraction(self.max)
        return n.numerator.bit_length() - n.denominator.bit_length()

    @cached_property
    def max_mag(self) -> int:
        """Magnitude (code without sign) of the largest finite value."""
        if self.is_integer:
            return (1 << self.man_bits) - 1
        top = (1 << self.exp_bits + self.man_bits) - 1
        if self.special == "ieee":
            return top - (1 << self.man_bits)
        return top - (self.special == "fn")

    @property
    def sign_bit(self) -> int:
        """The sign bit as a code (0 for unsigned formats)."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def has_inf(self) -> bool:
        return self.special == "ieee"

    @property
    def has_nan(self) -> bool:
        return self.special != "finite"

    @property
    def has_negative_zero(self) -> bool:
        return self.signed and not self.is_integer and self.special != "fnuz"

    @property
    def inf_code(self) -> int | None:
        """Code of +infinity, or None."""
        return ((1 << self.exp_bits) - 1) << self.man_bits if self.has_inf else None

    @property
    def nan_code(self) -> int | None:
        """Canonical NaN code (positive, mantissa all ones, as PTX writes it), or None."""
        if self.special == "fnuz":
            return self.sign_bit
        return (1 << self.exp_bits + self.man_bits) - 1 if self.has_nan else None

    # Values ----------------------------------------------------------------------------------

    def value_of_mag(self, mag: int) -> Fraction:
        """Exact value of a finite magnitude (a code without its sign)."""
        if not self.has_zero:
            return Fraction(2) ** (mag + self.emin)
        m = self.man_bits
        exp, man = mag >> m, mag & (1 << m) - 1
        if exp == 0 or self.is_integer:
            return mag * Fraction(2) ** (self.emin - m)
        return ((1 << m) + man) * Fraction(2) ** (self.emin + exp - 1 - m)

    @property
    def max(self) -> float:
        """Largest finite value."""
        return float(self.value_of_mag(self.max_mag))

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value (for an integer: the step)."""
        if self.is_integer:
            return self.min_subnormal
        return 2.0**self.emin

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value."""
        return 2.0 ** (self.emin - self.man_bits) if self.has_zero else 2.0**self.emin

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value of the same precision: ``2**-man_bits``."""
        return self.min_subnormal if self.is_integer else 2.0**-self.man_bits

    def values(self) -> np.ndarray:
        """All ``2**bits`` values in code order.

        Returns
        -------
        numpy.ndarray of float64, shape (2**bits,)
            NaN, infinities and minus zero included.

        Raises
        ------
        ValueError
            For formats of more than 24 bits (fp32), whose table would not be useful.
        """
        if self.bits > 24:
            raise ValueError(
                f"values: {self.name!r} has 2**{self.bits} values; at most 2**24 are listed."
                " Decode the codes you need with fpemu.decode."
            )
        code = np.arange(1 << self.bits, dtype=np.int64)
        if self.is_integer:
            signed = np.where(code & self.sign_bit, code - (1 << self.bits), code)
            return signed.astype(np.float64) * self.min_subnormal
        mag = code & (1 << self.exp_bits + self.man_bits) - 1
        if self.has_zero:
            exp, man = mag >> self.man_bits, mag & (1 << self.man_bits) - 1
            normal = exp > 0
            sig = man + np.where(normal, 1 << self.man_bits, 0)
            value = np.ldexp(sig.astype(np.float64), self.emin - self.man_bits + exp - normal)
        else:
            value = np.ldexp(1.0, mag + self.emin)
        value = np.where(mag > self.max_mag, np.nan, value)
        if self.inf_code is not None:
            value = np.where(mag == self.inf_code, np.inf, value)
        if self.signed:
            value = np.where(code & self.sign_bit, -value, value)
        if self.special == "fnuz":
            value[self.sign_bit] = np.nan
        return value


@dataclass(frozen=True)
class BlockFormat:
    """An element format whose values share scales.

    Parameters
    ----------
    name : str
    element : Format
    block : tuple of int, or None
        ``(B,)``: B elements along `axis`; ``(R, C)``: R x C tiles of the last two axes; None: one
        scale for the whole tensor.
    scale : Format or None
        Format of the stored block scales (E8M0, E4M3, FP32); None where `block` is None.
    rule : str
        Name of the scale rule in `fpemu.scaling`.
    tensor_scaled : bool
        True where a float32 scale of the whole tensor multiplies as well (NVFP4, FP8 by tensor).
    rounding : str
        What ``rounding="rne"``, the default, does to elements: a library's own tie rule.
    decode : str
        Order of the products that give a value, a name in `fpemu.dialects.DECODE`.
    source : str

    Examples
    --------
    >>> from fpemu import formats
    >>> row = formats.BlockFormat("mxfp4_16", formats.E2M1, (16,), formats.E8M0, "mx_floor")
    >>> import fpemu, numpy as np
    >>> fpemu.quantize(np.float32([1.0, 2.6, 7.0]), row)
    array([1., 3., 6.], dtype=float32)
    """

    name: str
    element: Format
    block: tuple[int, ...] | None
    scale: Format | None
    rule: str
    tensor_scaled: bool = False
    rounding: str = "rne"
    decode: str = "exact"
    source: str = field(default="user", compare=False)

    def __post_init__(self) -> None:
        if self.block is not None and not (
            len(self.block) in (1, 2) and all(isinstance(b, int) and b >= 1 for b in self.block)
        ):
            raise ValueError(
                f"BlockFormat: {self.name!r} has block={self.block!r}; allowed: (B,), (R, C) of"
                " positive integers, or None for the whole tensor. For example (32,)."
            )
        if (self.block is None) != (self.scale is None):
            raise ValueError(
                f"BlockFormat: {self.name!r} has block={self.block!r} and scale={self.scale!r};"
                " block scales need a format, and a tensor scale is always float32. Give both, or"
                " neither."
            )
        if self.block is None and not self.tensor_scaled:
            raise ValueError(
                f"BlockFormat: {self.name!r} has no block and tensor_scaled=False, so no scale at"
                " all; use the element format itself, or set tensor_scaled=True."
            )
        if self.element.bits > 16 or not self.element.has_zero:
            raise ValueError(
                f"BlockFormat: {self.name!r} has element {self.element.name!r}; an element has at"
                " most 16 bits and a zero. For example formats.E2M1."
            )
        _remember_hash(self)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    @property
    def is_2d(self) -> bool:
        return self.block is not None and len(self.block) == 2

    @property
    def max(self) -> float:
        """Largest finite value of the *element* format."""
        return self.element.max


# The element formats ---------------------------------------------------------------------------

_OFP8 = "OCP OFP8 1.0"
_MX = "OCP MX 1.0"
_MLD = "ml_dtypes"

FP16 = Format("fp16", 5, 10, special="ieee", overflow="nonsat", source="IEEE 754 binary16")
BF16 = Format("bf16", 8, 7, special="ieee", overflow="nonsat", source="NVIDIA PTX ISA bf16")
TF32 = Format("tf32", 8, 10, special="ieee", overflow="nonsat", source="NVIDIA PTX ISA tf32")
FP32 = Format("fp32", 8, 23, special="ieee", overflow="nonsat", source="IEEE 754 binary32")
E4M3 = Format("e4m3", 4, 3, special="fn", source=_OFP8)
E5M2 = Format("e5m2", 5, 2, special="ieee", source=_OFP8)
E3M2 = Format("e3m2", 3, 2, source=_MX)
E2M3 = Format("e2m3", 2, 3, source=_MX)
E2M1 = Format("e2m1", 2, 1, source=_MX)
E8M0 = Format("e8m0", 8, 0, bias=127, special="fn", signed=False, has_zero=False, source=_MX)
UE4M3 = Format("ue4m3", 4, 3, special="fn", signed=False, source="NVIDIA PTX ISA ue4m3")
# bias -6 puts the step at 2**(1 + 6 - 7) = 1, so int8 holds the integers -127..127.
INT8 = Format("int8", 0, 7, bias=-6, source="two's complement, symmetric: -128 is never produced")
E4M3FNUZ = Format("e4m3fnuz", 4, 3, bias=8, special="fnuz", source=_MLD)
E5M2FNUZ = Format("e5m2fnuz", 5, 2, bias=16, special="fnuz", source=_MLD)
E4M3B11FNUZ = Format("e4m3b11fnuz", 4, 3, bias=11, special="fnuz", source=_MLD)
E3M4 = Format("e3m4", 3, 4, special="ieee", source=_MLD)
E4M3_IEEE = Format("e4m3_ieee", 4, 3, special="ieee", source=_MLD)

# MXINT8's element has the implicit scale 2**-6 (OCP MX 1.0, 5.3.4): bias 0 gives 2**(1 - 0 - 7).
_MXINT8_ELEMENT = Format("int8*2^-6", 0, 7, bias=0, source=_MX)

_ELEMENTS = (
    FP16, BF16, TF32, FP32, E4M3, E5M2, E3M2, E2M3, E2M1, E8M0, UE4M3, INT8,
    E4M3FNUZ, E5M2FNUZ, E4M3B11FNUZ, E3M4, E4M3_IEEE,
)  # fmt: skip

# The block formats -----------------------------------------------------------------------------

_NVFP4_SOURCE = "TransformerEngine 2.20 NVFP4 kernels (operation order), E2M1 by PTX cvt"
_TE_FP8 = "TransformerEngine 2.20 compute_scale_from_amax"


_MX_ELEMENTS = {
    "mxfp8_e4m3": E4M3, "mxfp8_e5m2": E5M2, "mxfp6_e3m2": E3M2, "mxfp6_e2m3": E2M3,
    "mxfp4": E2M1, "mxint8": _MXINT8_ELEMENT,
}  # fmt: skip


def _mx_rows() -> list[BlockFormat]:
    rules = {"": "floor", "/rceil": "rceil", "/even": "even", "/ceil": "ceil"}
    return [
        BlockFormat(name + suffix, element, (32,), E8M0, f"mx_{rule}", source=f"{_MX}, {rule}")
        for name, element in _MX_ELEMENTS.items()
        for suffix, rule in rules.items()
    ]


_BLOCKS = (
    *_mx_rows(),
    BlockFormat("nvfp4", E2M1, (16,), E4M3, "nvfp4", tensor_scaled=True, source=_NVFP4_SOURCE),
    BlockFormat(
        "nvfp4/2d", E2M1, (16, 16), E4M3, "nvfp4", tensor_scaled=True, source=_NVFP4_SOURCE
    ),
    BlockFormat("nvfp4/1level", E2M1, (16,), E4M3, "nvfp4_1level", source=_NVFP4_SOURCE),
    BlockFormat("fp8_tensor_e4m3", E4M3, None, None, "fp8", tensor_scaled=True, source=_TE_FP8),
    BlockFormat("fp8_tensor_e5m2", E5M2, None, None, "fp8", tensor_scaled=True, source=_TE_FP8),
    BlockFormat("int8_tensor", INT8, None, None, "int8", tensor_scaled=True, source="fl(127/amax)"),
    BlockFormat("fp8_block_e4m3", E4M3, (128,), FP32, "fp8_pow2", source=_TE_FP8),
    BlockFormat("fp8_block_e4m3/fp32", E4M3, (128,), FP32, "fp8", source=_TE_FP8),
    BlockFormat("fp8_block_e4m3/2d", E4M3, (128, 128), FP32, "fp8_pow2", source=_TE_FP8),
    BlockFormat("fp8_block_e4m3/2d/fp32", E4M3, (128, 128), FP32, "fp8", source=_TE_FP8),
)

# The dialects ------------------------------------------------------------------------------------
# What a library computes for a format, to the bit: `fpemu.dialects` has the rules. A rule's name is
# ``nvfp4/<dialect>`` or ``mx/<dialect>``; a row adds the library's tie rule and decode order.

_TE = "TransformerEngine 2.20.0.dev0 (d0067d0)"
_AO_018, _AO = "torchao 0.18.0", "torchao (36027d8)"
_MODELOPT, _CT = "nvidia-modelopt 0.47.0", "compressed-tensors 0.20.1"
_QUARK, _46 = "amd-quark 0.13", "fouroversix (dadfad6)"
_MICROXCALING, _TRITON = "microxcaling (7bc4195)", "triton_kernels (018a674)"

#: dialect of NVFP4 -> decode order, source
_NVFP4_DIALECTS = {
    "te-ref": ("te", f"{_TE} reference_nvfp4.py"),
    "te-unfused": ("te", f"{_TE} unfused CUDA kernels"),
    "te-fast": ("te", f"{_TE} tuned kernel with use_fast_math"),
    "te-4over6-mae-256": ("te-256", f"{_TE} reference_nvfp4.py"),
    "te-4over6-mae-448": ("te", f"{_TE} reference_nvfp4.py"),
    "te-4over6-mse-256": ("te-256", f"{_TE} reference_nvfp4.py"),
    "te-4over6-mse-448": ("te", f"{_TE} reference_nvfp4.py"),
    "te-4over6-mae-256-fast": ("te-256", f"{_TE} reference_nvfp4.py, fast error"),
    "torchao": ("scale-first", f"{_AO_018} nvfp4_tensor.py"),
    "torchao-cuda": ("scale-first", f"{_AO_018} nvfp4_tensor.py, eager on CUDA"),
    "torchao-1level": ("exact", f"{_AO_018} nvfp4_tensor.py"),
    "torchao-1level-cuda": ("exact", f"{_AO_018} nvfp4_tensor.py, eager on CUDA"),
    "modelopt": ("scale-first+0", f"{_MODELOPT} qtensor/nvfp4_tensor.py"),
    "modelopt-cuda": ("scale-first+0", f"{_MODELOPT} qtensor/nvfp4_tensor.py, eager on CUDA"),
    "compressed-tensors": ("divided", f"{_CT}"),
    "vllm-ref": ("divided", "vLLM (055e47c) nvfp4_emulation_utils.py"),
    "flashinfer-ref": ("divided", "FlashInfer (fb28d72) tests/test_helpers/utils_fp4.py"),
    "fouroversix-static6": ("fouroversix", f"{_46} quantize/pytorch/reference.py"),
    "fouroversix-static4": ("fouroversix-1792", f"{_46} quantize/pytorch/reference.py"),
    "fouroversix-mse": ("fouroversix-256", f"{_46} quantize/pytorch/reference.py"),
    "fouroversix-mae": ("fouroversix-256", f"{_46} quantize/pytorch/reference.py"),
    "fouroversix-absmax": ("fouroversix-256", f"{_46} quantize/pytorch/reference.py"),
    "quark": ("divided-or-eps", f"{_QUARK} NVFP4 observer"),
}  # fmt: skip

#: dialect of every MX format -> what ties do, source
_MX_DIALECTS = {
    "torchao-floor": ("rne", _AO), "torchao-rceil": ("rne", _AO),
    "torchao-ceil": ("rne", _AO), "torchao-even": ("rne", _AO),
    "torchao-0.18-floor": ("rne", _AO_018), "torchao-0.18-rceil": ("rne", _AO_018),
    "torchao-0.18-ceil": ("rne", _AO_018), "torchao-0.18-even": ("rne", _AO_018),
    "quark-even": ("rne", f"{_QUARK} even_round"),
    "compressed-tensors": ("rne", f"{_CT} mxfp4_utils.py"),
    "microxcaling-nearest": ("rna", _MICROXCALING), "microxcaling-even": ("rne", _MICROXCALING),
    "microxcaling-floor": ("rtz", _MICROXCALING),
    "triton-kernels-up": ("rne", _TRITON), "triton-kernels-down": ("rne", _TRITON),
}  # fmt: skip

#: dialect of one MX format -> what ties do, decode order, source
_OTHER_MX_DIALECTS = {
    "mxfp8_e4m3/te": ("rne", "exact", f"{_TE} quantize_mxfp8.cuh"),
    "mxfp8_e5m2/te": ("rne", "exact", f"{_TE} quantize_mxfp8.cuh"),
    "mxfp4/modelopt": ("rnz", "exact", f"{_MODELOPT} qtensor/mxfp4_tensor.py"),
    "mxfp8_e4m3/modelopt": ("rne", "exact", f"{_MODELOPT} qtensor/mxfp8_tensor.py"),
    "mxfp4/quark-pack-up": ("rna", "shifted", f"{_QUARK} downcast_to_mxfp"),
    "mxfp4/quark-pack-down": ("rna", "shifted", f"{_QUARK} downcast_to_mxfp"),
    "mxfp4/quark-pack-even": ("rna", "shifted", f"{_QUARK} downcast_to_mxfp"),
    "mxfp4/fouroversix-static6": ("rne", "exact", f"{_46} quantize/pytorch/reference.py"),
    "mxfp4/fouroversix-static4": ("rne", "exact", f"{_46} quantize/pytorch/reference.py"),
    "mxfp4/qutlass-absmax": ("rne", "third", "QuTLASS (e74319e) abs_max"),
}


def _dialect_rows() -> list[BlockFormat]:
    nvfp4 = [
        BlockFormat(
            f"nvfp4/{name}", E2M1, (16,), E4M3, f"nvfp4/{name}",
            tensor_scaled="1level" not in name, decode=decode, source=source,
        )
        for name, (decode, source) in _NVFP4_DIALECTS.items()
    ]  # fmt: skip
    mx = [
        BlockFormat(
            f"{name}/{dialect}", element, (32,), E8M0, f"mx/{dialect}",
            rounding=rounding, source=source,
        )
        for name, element in _MX_ELEMENTS.items()
        for dialect, (rounding, source) in _MX_DIALECTS.items()
    ]  # fmt: skip
    others = [
        BlockFormat(
            name, _MX_ELEMENTS[name.split("/")[0]], (32,), E8M0, f"mx/{name.split('/')[1]}",
            rounding=rounding, decode=decode, source=source,
        )
        for name, (rounding, decode, source) in _OTHER_MX_DIALECTS.items()
    ]  # fmt: skip
    return [*nvfp4, *mx, *others]


_ROWS: tuple[Format | BlockFormat, ...] = (*_ELEMENTS, *_BLOCKS, *_dialect_rows())
TABLE: dict[str, Format | BlockFormat] = {row.name: row for row in _ROWS}


# Upper-case constants for every row: formats.NVFP4_2D, formats.MXFP8_E4M3_RCEIL, ...
def _constant(name: str) -> str:
    return name.upper().translate(str.maketrans("/-.", "___"))


globals().update({_constant(name): row for name, row in TABLE.items()})


def get_format(name: str | Format | BlockFormat, where: str = "get_format") -> Format | BlockFormat:
    """The row called `name`; a `Format` or `BlockFormat` is returned as it is.

    Raises
    ------
    ValueError
        For a name that is not in the table, with the nearest known name.
    TypeError
        For anything that is neither a name nor a row.

    Examples
    --------
    >>> import fpemu
    >>> fpemu.get_format("e4m3").max
    448.0
    """
    if isinstance(name, str):
        try:
            return TABLE[name]
        except KeyError:
            raise unknown(where, "format", name, TABLE) from None
    if isinstance(name, (Format, BlockFormat)):
        return name
    raise TypeError(
        f"{where}: fmt must be a format name, a Format or a BlockFormat, got"
        f" {type(name).__name__}; for example fmt='nvfp4'. fpemu.list_formats() has the names."
    )


def list_formats(pattern: str = "*") -> list[str]:
    """Names of the formats that match a shell-style pattern, in table order.

    Examples
    --------
    >>> import fpemu
    >>> fpemu.list_formats("nvfp4*")[:3]
    ['nvfp4', 'nvfp4/2d', 'nvfp4/1level']
    """
    return [name for name in TABLE if fnmatch.fnmatchcase(name, pattern)]


__all__ = ["BlockFormat", "Format", "TABLE", "get_format", "list_formats", "replace"]
