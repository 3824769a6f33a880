"""Matrix products on a GPU, each beside the unit and recipe of `fpemu.matmul` that replays it.

`rows` gives those of an architecture. A row of a single instruction (``mma.sync``, ``tl.dot``,
``tl.dot_scaled``) must be replayed to the bit. A row of a library is a model of what the library
does between the instructions (order of K, promotion, splits, epilogue); where its bits differ, the
alternatives of the row are tried and the first one that gives them is named.

Sources: PTX ISA 9.0 (mma, wgmma, tcgen05); PyTorch's ScaledBlas.cpp (arguments of ``_scaled_mm``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fpemu import packing
from fpemu.casting import value_table
from fpemu.encoded import Encoded
from fpemu.formats import BlockFormat, Format, get_format
from fpemu.gemm import get_recipe, matmul
from fpemu.gemm.recipes import Recipe
from fpemu.ops import encode, quantize

if TYPE_CHECKING:
    import torch

#: What the operands look like; `operands` makes them.
FAMILIES = ("normal", "spread", "cancel", "tiny", "special")
#: Names of torch's types.
_TORCH = {
    "fp16": "float16", "bf16": "bfloat16", "tf32": "float32", "fp32": "float32",
    "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "e2m1": "float4_e2m1fn_x2",
    "e8m0": "float8_e8m0fnu",
}  # fmt: skip
_BLOCK = 128


class Operands(NamedTuple):
    """A product's operands on the host.

    Parameters
    ----------
    a, b : ndarray of codes, shapes (batch, M, K) and (batch, N, K)
        B is stored transposed, as every GPU path here wants it.
    c : ndarray of float32, shape (batch, M, N), or None
    scale_a, scale_b : ndarray or None
        Scale codes of block formats (batch, M or N, K / block), or float32 factors as the row's
        `scaling` has them: scalars, (M,) and (N,), or (M, K / 128) and (K / 128, N or N / 128).
    """

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray | None = None
    scale_a: np.ndarray | None = None
    scale_b: np.ndarray | None = None


@dataclass(frozen=True)
class Gemm:
    """One way to multiply on a GPU.

    Parameters
    ----------
    path : str
        ``mma.sync``, ``tl.dot``, ``tl.dot_scaled``, ``torch.mm``, ``_scaled_mm`` or ``scaled_mm``.
    name : str
        The PTX instruction, or the call in short.
    a, b : str
        Element formats, or block formats.
    unit : str
        Of `fpemu.gemm`.
    run : callable
        ``run(row, operands, device) -> Tensor`` of the output type.
    shapes : tuple of (int, int, int)
        M, N, K. An instruction has one and is run in batches.
    out : str
        ``fp32``, ``fp16``, ``bf16`` or ``e4m3``.
    recipe : str, Recipe or None
    scaling : str
        ``""``, ``tensor``, ``rows``, ``1x128``, ``128x128`` or ``block`` (scales in the format).
    single : bool
        Whether it is one instruction, or a chain of one: then its bits must be the unit's.
    alternatives : tuple of (str, dict)
        Other arguments of `replay`, tried in turn where bits differ.
    """

    path: str
    name: str
    a: str
    b: str
    unit: str
    run: Callable[[Gemm, Operands, Any], torch.Tensor]
    shapes: tuple[tuple[int, int, int], ...]
    out: str = "fp32"
    recipe: str | Recipe | None = None
    scaling: str = ""
    single: bool = False
    alternatives: tuple[tuple[str, dict[str, Any]], ...] = ()

    @property
    def has_c(self) -> bool:
        return self.single


def element(name: str) -> Format:
    row = get_format(name)
    return row.element if isinstance(row, BlockFormat) else row


def values(codes: np.ndarray, name: str) -> np.ndarray:
    """float32 values of codes."""
    fmt = element(name)
    if fmt.bits <= 16:
        return value_table(fmt)[codes]
    return (codes << np.uint32(32 - fmt.bits)).view(np.float32)


# Operands ----------------------------------------------------------------------------------------


def operands(
    row: Gemm, family: str, shape: tuple[int, int, int], batch: int, seed: int
) -> Operands:
    """Operands of a family: ``normal`` values; ``spread``, random codes; ``cancel``, the second half
    of K nearly undoes the first; ``tiny``, subnormal and smallest normal; ``special``, `spread` with
    zeros of both signs, the largest and smallest values, Inf and NaN."""
    m, n, k = shape
    rng = np.random.default_rng([seed, FAMILIES.index(family), m, n, k])
    a, b = element(row.a), element(row.b)
    left = random_codes(a, family, (batch, m, k), rng)
    right = random_codes(b, family, (batch, n, k), rng, side=1)
    if family == "cancel":
        half = k // 2
        left[..., half:], right[..., half:] = left[..., :half], right[..., :half]
        right[..., half:] ^= b.code_dtype.type(b.sign_bit)
        nudged = rng.random((batch, n, half)) < 0.2
        right[..., half:][nudged] &= b.code_dtype.type(b.sign_bit - 2 | b.sign_bit)  # lowest bit
    c = _accumulator(row, family, (batch, m, n), rng) if row.has_c else None
    return Operands(left, right, c, *_scales(row, family, shape, batch, rng))


def random_codes(
    fmt: Format, family: str, shape: tuple[int, ...], rng: np.random.Generator, side: int = 0
) -> np.ndarray:
    """Codes of a format: finite but in ``special``. `side` is 0 for A and 1 for B."""
    if family == "normal":
        return encode(rng.standard_normal(shape, np.float32), fmt).codes
    kind = fmt.code_dtype
    codes = rng.integers(0, 1 << fmt.bits, shape, dtype=kind)
    field = kind.type(((1 << fmt.exp_bits) - 1) << fmt.man_bits)
    finite = np.isfinite(fmt.values())
    if family == "tiny" or fmt.exp_bits == 8:
        exponents = _exponents(fmt, family, side, shape, rng).astype(kind)
        codes = codes & ~field | exponents << kind.type(fmt.man_bits)
    else:
        codes[~finite[codes]] = 0
    if family == "special":
        top = int(np.argmax(np.where(finite, fmt.values(), 0)))
        _sprinkle(codes, 0.02, (0, fmt.sign_bit, top, top | fmt.sign_bit, 1), rng)
        if fmt.inf_code is not None:
            _sprinkle(codes, 0.005, (fmt.inf_code, fmt.inf_code | fmt.sign_bit), rng)
        if fmt.nan_code is not None:
            _sprinkle(codes, 0.001, (fmt.nan_code,), rng)
    return codes


def _exponents(
    fmt: Format, family: str, side: int, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """Exponent fields that keep products in float32's range, or (`tiny`) at its lower end."""
    if family != "tiny":
        return rng.integers(87, 168, shape)
    lowest = rng.integers(0, 2, shape)
    if fmt.exp_bits < 8:
        return lowest
    # By turns: subnormal A by ordinary B, and products below 2**-133, where the clamps are.
    other = lowest if side == 0 else rng.integers(110, 171, shape)
    turn = (np.arange(shape[0]) % 2 == 0).reshape(-1, 1, 1)
    return np.where(turn, other, rng.integers(50, 60, shape))


def _sprinkle(
    codes: np.ndarray, share: float, rare: tuple[int, ...], rng: np.random.Generator
) -> None:
    some = rng.random(codes.shape) < share
    codes[some] = rng.choice(np.array(rare, codes.dtype), int(some.sum()))


def _accumulator(
    row: Gemm, family: str, shape: tuple[int, ...], rng: np.random.Generator
) -> np.ndarray:
    """C: zero in two of four products, else over the range that the products reach."""
    a, b = element(row.a), element(row.b)
    low = max(-148, a.emin + b.emin - a.man_bits - b.man_bits)
    high = min(120, int(a.emax + b.emax))
    if family == "tiny":
        high = max(a.emin + b.emin + 8, low + 14)
    if family in ("normal", "cancel"):
        low, high = max(low, -30), min(high, 8)
    c = rng.standard_normal(shape, np.float32)
    c = np.ldexp(c, rng.integers(low, high + 1, shape).astype(np.int32)).astype(np.float32)
    if family == "special":
        some = rng.random(shape) < 0.01
        rare = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38], np.float32)
        c[some] = rng.choice(rare, int(some.sum()))
    c[::4] = c[3::4] = 0
    if row.out == "fp16":
        with np.errstate(over="ignore"):
            c = c.astype(np.float16).astype(np.float32)
    return c


def _scales(
    row: Gemm, family: str, shape: tuple[int, int, int], batch: int, rng: np.random.Generator
) -> tuple[np.ndarray | None, np.ndarray | None]:
    m, n, k = shape

    def factors(*sizes: int) -> np.ndarray:
        x = rng.uniform(1, 2, sizes) * 2.0 ** rng.integers(-6, 7, sizes)
        return x.astype(np.float32)

    if row.scaling == "block":
        return (
            _scale_codes(row.a, family, (batch, m), k, rng),
            _scale_codes(row.b, family, (batch, n), k, rng),
        )
    if row.scaling == "tensor":
        return factors(1), factors(1)
    if row.scaling == "rows":
        return factors(m), factors(n)
    if row.scaling in ("1x128", "128x128"):
        columns = n if row.scaling == "1x128" else n // _BLOCK
        return factors(m, k // _BLOCK), factors(k // _BLOCK, columns)
    return None, None


def _scale_codes(
    name: str, family: str, lead: tuple[int, ...], k: int, rng: np.random.Generator
) -> np.ndarray:
    """Block scales: near one, or (`spread`, `special`) over much of their range."""
    fmt = get_format(name)
    assert isinstance(fmt, BlockFormat) and fmt.block is not None and fmt.scale is not None
    shape = (*lead, k // fmt.block[-1])
    if fmt.scale.name == "e8m0":
        near, wide = (123, 132), (90, 165)
    else:
        near, wide = (0x30, 0x40), (0x01, 0x7F)
    low, high = wide if family in ("spread", "special") else near
    codes = rng.integers(low, high, shape, dtype=np.uint8)
    if family == "special":
        assert fmt.scale.nan_code is not None
        codes[rng.random(shape) < 0.01] = fmt.scale.nan_code
    return codes


# The emulator's answer ---------------------------------------------------------------------------


def replay(
    row: Gemm, x: Operands, *, recipe: str | Recipe | None = None, split_k: int = 1,
    unit: str | None = None, order: str | None = None, backend: str | None = None,
) -> np.ndarray:  # fmt: skip
    """The bits that `fpemu.matmul` gives, as unsigned integers [batch, M, N].

    Parameters
    ----------
    recipe, unit : str, optional
        In place of the row's.
    order : {"a(b acc)", "b(a acc)", "(ab) acc"}, optional
        How row-wise scales are multiplied in.
    """
    plan = row.recipe if recipe is None else recipe
    options: dict[str, Any] = {"unit": unit or row.unit, "backend": backend, "progress": False}
    a: Any
    b: Any
    if row.scaling == "block":
        a = _encoded(row.a, x.a, x.scale_a)
        b = _encoded(row.b, x.b, x.scale_b, transpose=True)
    else:
        a, b = values(x.a, row.a), values(x.b, row.b).swapaxes(1, 2)
    if plan is None:
        d = matmul(a, b, c=x.c, out=row.out, **options)
    elif order is not None:
        acc = matmul(a, b, recipe=plan, split_k=split_k, **options)
        d = _rows(acc, x.scale_a, x.scale_b, order, row.out)  # type: ignore[arg-type]
    else:
        if row.scaling not in ("", "block"):
            options |= {"scale_a": x.scale_a, "scale_b": x.scale_b}
        d = matmul(a, b, recipe=plan, split_k=split_k, out=row.out, **options)
    return output_bits(d, row.out)


def _encoded(
    name: str, codes: np.ndarray, scales: np.ndarray | None, transpose: bool = False
) -> Encoded:
    fmt = get_format(name)
    axis = codes.ndim - 1
    if transpose:
        assert scales is not None
        codes, scales, axis = codes.swapaxes(1, 2), scales.swapaxes(1, 2), axis - 1
    return Encoded(codes, scales, None, fmt, axis, np.dtype(np.float32))


def _rows(
    acc: np.ndarray, scale_a: np.ndarray, scale_b: np.ndarray, order: str, out: str
) -> np.ndarray:
    a, b = scale_a.reshape(-1, 1), scale_b.reshape(1, -1)
    with np.errstate(all="ignore"):
        y = {
            "a(b acc)": lambda: a * (b * acc),
            "b(a acc)": lambda: b * (a * acc),
            "(ab) acc": lambda: (a * b) * acc,
        }[order]()
        y = y + np.float32(0)
    y = np.where(np.isnan(y), np.uint32(0x7FFFFFFF).view(np.float32), y)
    return y if out == "fp32" else quantize(y, out)


def output_bits(d: np.ndarray, out: str) -> np.ndarray:
    """The bits of a result in its own width: `fpemu.matmul` gives BF16 and FP8 as float32."""
    d = np.ascontiguousarray(d)
    if out == "bf16":
        return (d.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if out == "e4m3":
        return encode(d, out).codes
    return d.view(np.uint16 if d.dtype.itemsize == 2 else np.uint32)


def tensor_bits(d: torch.Tensor) -> np.ndarray:
    """The bits of a tensor, as unsigned integers on the host."""
    import torch

    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[d.element_size()]
    bits = d.contiguous().view(width).cpu().numpy()
    return bits.view(f"u{bits.dtype.itemsize}")


# The GPU's answer --------------------------------------------------------------------------------


def to_torch(codes: np.ndarray, name: str, device: Any) -> torch.Tensor:
    """Codes as a tensor of torch's type for the format; FP4 two per byte along the last axis."""
    import torch

    fmt = element(name)
    if fmt.bits == 4:
        codes = packing.pack(codes, fmt)
    elif fmt.name == "tf32":
        codes = codes << np.uint32(32 - fmt.bits)
    data = torch.from_numpy(np.ascontiguousarray(codes).view(f"i{codes.dtype.itemsize}"))
    return data.to(device).view(_type(fmt.name))


def _type(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, _TORCH[name], None)
    if found is None:
        raise NotImplementedError(f"torch.{_TORCH[name]} is not in this torch")
    return found


def _c(row: Gemm, x: Operands, device: Any) -> torch.Tensor:
    import torch

    return torch.from_numpy(x.c).to(device, _type(row.out))  # type: ignore[arg-type]


def run_mma_sync(row: Gemm, x: Operands, device: Any) -> torch.Tensor:
    from fpemu.hw import probes

    a, b = to_torch(x.a, row.a, device), to_torch(x.b, row.b, device)
    return probes.run_mma_sync(row.name, a, b, _c(row, x, device))


def run_dot(row: Gemm, x: Operands, device: Any) -> torch.Tensor:
    from fpemu.hw import probes

    a, b = to_torch(x.a, row.a, device), to_torch(x.b, row.b, device)
    return probes.run_dot(a, b, _c(row, x, device))


def run_dot_scaled(row: Gemm, x: Operands, device: Any) -> torch.Tensor:
    import torch

    from fpemu.hw import probes

    def raw(codes: np.ndarray, name: str) -> torch.Tensor:
        t = to_torch(codes, name, device)
        return t.view(torch.uint8) if element(name).name in ("e2m1", "e8m0") else t

    scale = get_format(row.a).scale.name  # type: ignore[union-attr]
    return probes.run_dot_scaled(
        raw(x.a, row.a), raw(x.scale_a, scale), raw(x.b, row.b), raw(x.scale_b, scale),  # type: ignore[arg-type]
        _c(row, x, device), (element(row.a).name, element(row.b).name),
    )  # fmt: skip


def run_mm(row: Gemm, x: Operands, device: Any) -> torch.Tensor:
    """``torch.mm`` with TF32 on and reductions in less than float32 off."""
    import torch

    a, b = to_torch(x.a[0], row.a, device), to_torch(x.b[0], row.b, device).t()
    flags = torch.backends.cuda.matmul
    wanted = {
        "allow_tf32": True,
        "allow_fp16_reduced_precision_reduction": False,
        "allow_bf16_reduced_precision_reduction": False,
    }
    before = {name: getattr(flags, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(flags, name, value)
        if _type(row.out) == a.dtype:
            return torch.mm(a, b)[None]
        return torch.mm(a, b, out_dtype=_type(row.out))[None]
    finally:
        for name, value in before.items():
            setattr(flags, name, value)


def run_scaled_mm(row: Gemm, x: Operands, device: Any, fast: bool) -> torch.Tensor:
    """``torch._scaled_mm``: by the tensor, by rows, or float32 blocks of 128."""
    import torch

    call = getattr(torch, "_scaled_mm", None)
    if call is None:
        raise NotImplementedError("torch._scaled_mm is not in this torch")
    a, b = to_torch(x.a[0], row.a, device), to_torch(x.b[0], row.b, device).t()
    scale_a, scale_b = _factors(row, x, device)
    return call(
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=_type(row.out), use_fast_accum=fast
    )[None]


def _factors(row: Gemm, x: Operands, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 scales in the strides that ``_scaled_mm`` asks for."""
    import torch

    a, b = (torch.from_numpy(s).to(device) for s in (x.scale_a, x.scale_b))  # type: ignore[arg-type]
    if row.scaling == "tensor":
        return a.reshape(()), b.reshape(())
    if row.scaling == "rows":
        return a.reshape(-1, 1), b.reshape(1, -1)
    a = a.t().contiguous().t()  # (M, K / 128), M contiguous
    if row.scaling == "128x128":
        b = b.t().contiguous().t()  # (K / 128, N / 128), K contiguous
    return a, b


def run_block_scaled(row: Gemm, x: Operands, device: Any) -> torch.Tensor:
    """``torch.nn.functional.scaled_mm`` with swizzled E8M0 or E4M3 block scales."""
    from torch.nn import functional

    call = getattr(functional, "scaled_mm", None)
    if call is None:
        raise NotImplementedError("torch.nn.functional.scaled_mm is not in this torch")
    a, b = to_torch(x.a[0], row.a, device), to_torch(x.b[0], row.b, device).t()
    fmt = get_format(row.a)
    assert isinstance(fmt, BlockFormat) and fmt.scale is not None and fmt.block is not None
    kind = getattr(functional.ScalingType, f"BlockWise1x{fmt.block[-1]}")
    swizzle = functional.SwizzleType.SWIZZLE_32_4_4
    scales = [
        to_torch(packing.swizzle(s[0]), fmt.scale.name, device)  # type: ignore[index]
        for s in (x.scale_a, x.scale_b)
    ]
    return call(
        a, b, scales[0], kind, scales[1], kind, swizzle, swizzle, output_dtype=_type(row.out)
    )[None]


# The rows ----------------------------------------------------------------------------------------


class Architecture(NamedTuple):
    """Units behind an architecture's instructions; None where it has none."""

    hmma: str
    fp8_mma: str | None
    dot: str | None


ARCHITECTURES = {
    (8, 0): Architecture("ampere.hmma", None, None),
    (8, 6): Architecture("ampere.hmma", None, None),
    (8, 9): Architecture("ada.hmma", "ada.qmma", None),
    (9, 0): Architecture("hopper.wgmma", "hopper.mma_sync", "hopper.wgmma"),
    (10, 0): Architecture("blackwell.hmma", "blackwell.mma_sync", "blackwell.tcgen05"),
    (10, 3): Architecture("blackwell.hmma", "blackwell.mma_sync", "blackwell.tcgen05"),
    (12, 0): Architecture("rtx_blackwell.hmma", "rtx_blackwell.qmma", None),
    (12, 1): Architecture("rtx_blackwell.hmma", "rtx_blackwell.qmma", None),
}
_PTX = {"fp16": "f16", "fp32": "f32"}
_FP8_PAIRS = tuple((a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2"))


def rows(capability: tuple[int, int]) -> list[Gemm]:
    """What a GPU of a compute capability can be asked to multiply; none for unknown ones."""
    arch = ARCHITECTURES.get(capability)
    if arch is None:
        return []
    return [*_mma_sync(arch), *_dots(arch), *_dots_scaled(arch), *_library(arch)]


def _pair(a: str, b: str) -> str:
    return a if a == b else f"{a}x{b}"


def _mma_sync(arch: Architecture) -> Iterator[Gemm]:
    """Every dense shape of K; the accumulator is float32 or, for FP16 and FP8, float16."""
    forms = [
        ("fp16", "fp16", 16, "fp32"), ("fp16", "fp16", 8, "fp32"), ("fp16", "fp16", 16, "fp16"),
        ("fp16", "fp16", 8, "fp16"), ("bf16", "bf16", 16, "fp32"), ("bf16", "bf16", 8, "fp32"),
        ("tf32", "tf32", 8, "fp32"), ("tf32", "tf32", 4, "fp32"),
    ]  # fmt: skip
    if arch.fp8_mma is not None:
        forms += [(a, b, 32, out) for a, b in _FP8_PAIRS for out in ("fp32", "fp16")]
        forms += [("e4m3", "e4m3", 16, "fp32")]
    for a, b, k, out in forms:
        types = ".".join(_PTX.get(name, name) for name in (out, a, b, out))
        prefix = arch.fp8_mma if a[0] == "e" else arch.hmma
        yield Gemm(
            "mma.sync", f"mma.sync.aligned.m16n8k{k}.row.col.{types}", a, b,
            f"{prefix}.{_pair(a, b)}", run_mma_sync, ((16, 8, k),), out, single=True,
        )  # fmt: skip


def _dots(arch: Architecture) -> Iterator[Gemm]:
    if arch.dot is None:
        return
    hopper = arch.dot.startswith("hopper")
    forms = [("fp16", "fp16", "fp32"), ("fp16", "fp16", "fp16"), ("bf16", "bf16", "fp32")]
    forms += [("tf32", "tf32", "fp32")]
    forms += [(a, b, out) for a, b in _FP8_PAIRS for out in ("fp32", "fp16")]
    for a, b, out in forms:
        k = 32 if a[0] == "e" else 16
        if hopper:
            step = 8 if a == "tf32" else k
            types = ".".join(_PTX.get(name, name) for name in (out, a, b))
            name, m = f"wgmma.mma_async.sync.aligned.m64n64k{step}.{types}", 64
        else:
            kind = "f8f6f4" if a[0] == "e" else "tf32" if a == "tf32" else "f16"
            name, m = f"tcgen05.mma kind::{kind} {a} {b} {out}", 128
        unit = f"{arch.dot}.{_pair(a, b)}"
        yield Gemm("tl.dot", name, a, b, unit, run_dot, ((m, 64, k),), out, single=True)


def _dots_scaled(arch: Architecture) -> Iterator[Gemm]:
    if arch.dot is None or arch.dot.startswith("hopper"):
        return
    mx = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4")
    for a in mx:
        for b in mx:
            fp4 = a == b == "mxfp4"
            kind = "mxf4" if fp4 else "mxf8f6f4"
            yield Gemm(
                "tl.dot_scaled", f"tcgen05.mma kind::{kind} {a} {b}", a, b,
                f"{arch.dot}.{_pair(a, b)}", run_dot_scaled, ((128, 64, 64 if fp4 else 32),),
                scaling="block", single=True,
            )  # fmt: skip
    yield Gemm(
        "tl.dot_scaled", "tcgen05.mma kind::mxf4nvf4 nvfp4 nvfp4", "nvfp4", "nvfp4", f"{arch.dot}.nvfp4", run_dot_scaled, ((128, 64, 64),), scaling="block",
        single=True,
    )  # fmt: skip


#: M, N and K of the libraries' products: few and many tiles, and a K that invites splits.
LIBRARY_SHAPES = ((128, 128, 512), (256, 512, 2048), (512, 256, 8192))
_SPLITS = tuple((f"split_k={s}", {"split_k": s}) for s in (2, 3, 4, 5, 6, 7, 8, 12, 16))


def _library(arch: Architecture) -> Iterator[Gemm]:
    yield from _mm(arch)
    fp8 = arch.dot or arch.fp8_mma
    if fp8 is None:
        return
    yield from _tensor_wise(arch, fp8)
    yield from _row_wise(arch, fp8)
    if arch.dot == "hopper.wgmma":
        yield from _block_wise()
    if arch.dot == "blackwell.tcgen05":
        yield from _swizzled(arch.dot)


def _mm(arch: Architecture) -> Iterator[Gemm]:
    prefix = arch.dot or arch.hmma
    for a, out in (("fp16", "fp16"), ("fp16", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("tf32", "fp32")):  # fmt: skip
        yield Gemm(
            "torch.mm", f"torch.mm {a} -> {out}", a, a, f"{prefix}.{a}", run_mm, LIBRARY_SHAPES,
            out, "scaled", alternatives=_SPLITS,
        )  # fmt: skip


def _promotes(unit: str, fast: bool) -> str:
    """The recipe of cuBLASLt's tensor-wise FP8 product."""
    if unit.startswith("hopper"):
        return "cublaslt.fp8_fast" if fast else "cublaslt.fp8_slow"
    return "cublaslt.ada_fp8" if unit.startswith("ada") else "scaled"


def _tensor_wise(arch: Architecture, prefix: str) -> Iterator[Gemm]:
    forms = [("e4m3", "e4m3", out) for out in ("fp32", "bf16", "fp16", "e4m3")]
    forms += [("e4m3", "e5m2", "bf16"), ("e5m2", "e4m3", "bf16")]
    for fast in (True, False):
        for a, b, out in forms:
            other: tuple[tuple[str, dict[str, Any]], ...] = ()
            if arch.dot == "hopper.wgmma":
                other = ((f"promotion {'every 128' if fast else 'left out'}",
                          {"recipe": _promotes(prefix, not fast)}),)  # fmt: skip
            speed = "fast" if fast else "slow"
            yield Gemm(
                "_scaled_mm", f"_scaled_mm tensor {speed} {_pair(a, b)} -> {out}", a, b,
                f"{prefix}.{_pair(a, b)}", partial(run_scaled_mm, fast=fast), LIBRARY_SHAPES, out,
                _promotes(prefix, fast), "tensor", alternatives=_SPLITS + other,
            )  # fmt: skip


def _row_wise(arch: Architecture, prefix: str) -> Iterator[Gemm]:
    rows_recipe = get_recipe("cutlass.fp8_rows")
    promoted = replace(rows_recipe, name="cutlass.fp8_rows, promoted every 128", period=_BLOCK)
    hopper = arch.dot == "hopper.wgmma"
    for fast in (True, False):
        bare = {"recipe": _promotes(prefix, fast)}
        other = [(f"epilogue {order}", {**bare, "order": order})
                 for order in ("b(a acc)", "(ab) acc")]  # fmt: skip
        if hopper:
            opposite = {"recipe": _promotes(prefix, not fast)}
            how = "promoted" if fast else "not promoted"
            other += [(f"epilogue {order}, {how}", {**opposite, "order": order})
                      for order in ("a(b acc)", "b(a acc)", "(ab) acc")]  # fmt: skip
        yield Gemm(
            "_scaled_mm", f"_scaled_mm rows {'fast' if fast else 'slow'} e4m3 -> bf16", "e4m3",
            "e4m3", f"{prefix}.e4m3", partial(run_scaled_mm, fast=fast), LIBRARY_SHAPES, "bf16",
            promoted if hopper and not fast else rows_recipe, "rows",
            alternatives=tuple(other),
        )  # fmt: skip


def _block_wise() -> Iterator[Gemm]:
    for scaling, recipe in (("1x128", "deepgemm.1d1d"), ("128x128", "deepgemm.1d2d")):
        for out in ("fp32", "bf16"):
            yield Gemm(
                "_scaled_mm", f"_scaled_mm 1x128 by {scaling} e4m3 -> {out}", "e4m3", "e4m3",
                "hopper.wgmma.e4m3", partial(run_scaled_mm, fast=False), LIBRARY_SHAPES, out,
                recipe, scaling,
            )  # fmt: skip


def _swizzled(prefix: str) -> Iterator[Gemm]:
    for name in ("mxfp8_e4m3", "mxfp4", "nvfp4"):
        for out in ("fp32", "bf16"):
            if name == "mxfp4" and out == "fp32":
                continue  # the call has no such output
            yield Gemm(
                "scaled_mm", f"F.scaled_mm {name} -> {out}", name, name, f"{prefix}.{name}",
                run_block_scaled, LIBRARY_SHAPES, out, "scaled", "block",
            )  # fmt: skip
