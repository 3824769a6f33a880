"""The GPU backend: operands split into panels by torch, one launch of a kernel per product.

Tensors stay on their device. Under Triton's interpreter (``TRITON_INTERPRET=1``) the kernels run on
the CPU, to test their logic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fpemu.formats import FP16, FP32, Format
from fpemu.gemm import triton_kernels as kernels
from fpemu.gemm.request import NO_EXPONENT, Operand, Request, Scales
from fpemu.gemm.units import Unit

Tensor = torch.Tensor
#: Of D per program: 16 outputs for each thread of 4 warps, which leaves room for three programs'
#: registers on an SM of compute capability 9.0. Any choice gives the same bits.
ROWS, COLS = 32, 64
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
TAKES_TENSORS = True  # where they are
_MAG, _INF = 0x7FFFFFFF, 0x7F800000


def interpreted() -> bool:
    """Whether the kernels were imported to be interpreted."""
    return not hasattr(kernels.gemm, "cache_key")


def supports(unit: Unit) -> str | None:
    """Why the kernels cannot compute a unit, or None."""
    if not interpreted() and not torch.cuda.is_available():
        return "there is no CUDA device, and TRITON_INTERPRET was not set"
    return refuses(unit)


def refuses(unit: Unit) -> str | None:
    """`supports` on a machine that has a GPU."""
    if unit.order in ("exact", "pairwise"):
        return "exact and pairwise sums hold more than the registers of a GPU"
    if unit.is_reference:
        return None
    if unit.L % 2 or unit.L % unit.group:
        return f"L={unit.L} is odd, or no multiple of its groups"
    if unit.group > 1:
        units = unit.group * unit.a.max * unit.b.max * 4 * 2.0 ** _low_bits(unit)
        total = units * 2.0 ** (unit.F - _low_bits(unit)) * unit.L / unit.group
        if units >= 2**24 or total >= 2**55 or unit.F < max(_low_bits(unit), 23):
            return f"groups of {unit.group} with F={unit.F} do not fit 24 bits, or 56 in all"
        return None
    if unit.a.man_bits + unit.b.man_bits > 22:
        return f"products of {unit.a.name} and {unit.b.name} do not fit 24 bits"
    if _sum_bound(unit, unit.L // 2) >= 2**31:
        return f"L={unit.L} with F={unit.F} does not fit 32-bit sums"
    return None


def _low_bits(unit: Unit) -> int:
    """Every scaled group of a unit is an integer times ``2**(exponents - low)``."""
    assert unit.scale is not None
    return sum(f.man_bits - f.emin for f in (unit.a, unit.b)) + 2 * unit.scale.man_bits


def _sum_bound(unit: Unit, products: int) -> float:
    """No sum of that many aligned products and c is larger."""
    largest = (2 - 2.0**-unit.a.man_bits) * (2 - 2.0**-unit.b.man_bits)
    return (largest * products + 2) * 2.0**unit.F


def constants(unit: Unit, out: str, special: bool = True, late: bool = False,
              factors: bool = False) -> dict[str, Any]:  # fmt: skip
    """What the row and the request compile into `triton_kernels.gemm`."""
    clamp = unit.clamp(out)
    grouped = unit.group > 1
    return {
        "L": unit.L, "F": unit.F, "CLAMP": NO_EXPONENT if clamp is None else clamp,
        "C_EMIN": (FP32 if out == "fp32" else FP16).emin,
        "KEEP": -1024 if unit.rho == "rz_e8m13" else -1, "HALF": out == "fp16",
        "WIDE": _wide(unit), "SPECIAL": special, "TWO_SUMS": not grouped and _sum_bound(unit, unit.L) >= 2**31,
        "LOW": _low_bits(unit) if grouped else 0, "GROUP": unit.group, "LATE": late,
        "FACTORS": factors, "ROWS": ROWS, "COLS": COLS, "UNROLL": 2,
    }  # fmt: skip


def _wide(unit: Unit) -> bool:
    """Whether products may leave float32's range: then significands and exponents go separately."""
    return unit.scale is not None or any(f.man_bits - f.emin > 30 for f in (unit.a, unit.b))


# Operands ------------------------------------------------------------------------------------------


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def _tensor(array: Any, device: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array.to(device)
    return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(device)


def _panels(x: Tensor, tile: int, width: int, fill: float = 0) -> Tensor:
    """[matrices, n, K], padded or cut to `width`, as [matrices, panel, width, tile]."""
    matrices, n, depth = x.shape
    out = x.new_full((matrices, _up(n, tile), width), fill)
    out[:, :n, : min(depth, width)] = x[:, :, :width]
    return out.unflatten(1, (-(-n // tile), tile)).transpose(2, 3).contiguous()


def _bad(x: Tensor, fmt: Format) -> int:
    """How many values are none of a format: bits below its grid, or beyond its largest."""
    mag = x.view(torch.int32) & _MAG
    field = mag >> 23
    sig = (mag & 0x7FFFFF) | ((field != 0).to(torch.int32) << 23)
    drop = (23 - fmt.man_bits + (fmt.emin + 127 - field.clamp(min=1)).clamp(min=0)).clamp(max=24)
    bad = (sig & ((torch.ones_like(sig) << drop) - 1)) != 0
    bad |= mag > int(np.float32(fmt.max).view(np.uint32))
    bad = torch.where(mag == _INF, not fmt.has_inf, bad)
    bad = torch.where(mag > _INF, not fmt.has_nan, bad)
    return int(bad.sum())


def _in_order(unit: Unit, x: Tensor) -> Tensor:
    """K permuted so that a unit's blocks are contiguous: alternating pairs, 16 elements each."""
    if unit.order != "pairs":
        return x
    padded = torch.nn.functional.pad(x, (0, -x.shape[2] % 32))
    return padded.unflatten(2, (-1, 8, 2, 2)).transpose(3, 4).flatten(2)


def _split(x: Tensor, emin: int, wide: bool) -> tuple[Tensor, Tensor]:
    """Significands in (-2, 2) (or the values themselves) and exponents, `NO_EXPONENT` for zeros."""
    bits = x.view(torch.int32)
    mag = bits & _MAG
    field = mag >> 23
    exponent = field.clamp(min=1) - 127
    e = exponent.clamp(min=emin)
    special = field == 255
    exp = torch.where(special, 0, torch.where(mag == 0, NO_EXPONENT, e)).to(torch.int32)
    if not wide:
        return x, exp
    integer = (mag & 0x7FFFFF) | ((field != 0).to(torch.int32) << 23)
    power = ((exponent - e + 127 - 23).clamp(min=1) << 23).view(torch.float32)
    sig = torch.copysign(integer.to(torch.float32) * power, x)
    return torch.where(special, x, sig), exp


class _Side:
    """One operand as the kernels read it: panels of significands and exponents."""

    def __init__(self, request: Request, is_a: bool, device: Any) -> None:
        unit = request.unit
        operand: Operand = request.a if is_a else request.b
        fmt = unit.a if is_a else unit.b
        self.is_a, self.tile = is_a, ROWS if is_a else COLS
        x = self.along_k(operand.values, device).contiguous()
        self.index = _tensor(operand.index, device)
        self.panels = -(-x.shape[1] // self.tile)
        self.bad, self.special = 0, False
        if unit.is_reference:
            self.sig = self.exp = self.scale = _panels(x, self.tile, x.shape[2])
            return
        self.bad = _bad(x, fmt)
        self.special = (fmt.has_nan or fmt.has_inf) and not bool(torch.isfinite(x).all())
        width, scales = request.blocks * unit.L, operand.scales
        if unit.group > 1:
            assert scales is not None
            sig, exp = self.spread(scales, scales.size // unit.group, device)
            groups = width // unit.group
            self.sig = _panels(x, self.tile, width)
            self.scale = _panels(sig, self.tile, groups)
            self.exp = _panels(exp, self.tile, groups, NO_EXPONENT)
            return
        sig, exp = _split(_in_order(unit, x), unit.emin(fmt), _wide(unit))
        if scales is not None:
            scale_sig, scale_exp = self.spread(scales, scales.size, device)
            sig, exp = sig * scale_sig[..., : x.shape[2]], exp + scale_exp[..., : x.shape[2]]
            self.special |= not bool(torch.isfinite(scale_sig).all())
        self.sig = self.scale = _panels(sig, self.tile, width)
        self.exp = _panels(exp, self.tile, width, NO_EXPONENT)

    def along_k(self, array: Any, device: Any) -> Tensor:
        """[matrices, rows or columns, K] for both operands."""
        x = _tensor(array, device)
        return x if self.is_a else x.transpose(1, 2)

    def spread(self, scales: Scales, times: int, device: Any) -> list[Tensor]:
        """Significands and exponents of the scales, each `times` times."""
        return [self.along_k(s, device).repeat_interleave(times, 2) for s in scales[:2]]

    def factors(self, array: Any) -> Tensor:
        """[matrix, panel, period, tile]; something to point at where there are none."""
        if array is None:
            return self.sig
        x = self.along_k(array, self.sig.device)
        return _panels(x, self.tile, x.shape[2])


def _tiles(c: Tensor) -> Tensor:
    """[matrices, M, N] as [matrices, panel of rows, panel of columns, ROWS, COLS]."""
    matrices, rows, cols = c.shape
    out = c.new_zeros((matrices, _up(rows, ROWS), _up(cols, COLS)))
    out[:, :rows, :cols] = c
    return out.unflatten(2, (-1, COLS)).unflatten(1, (-1, ROWS)).transpose(2, 3).contiguous()


def _whole(d: Tensor, rows: int, cols: int) -> Tensor:
    return d.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :rows, :cols].contiguous()


# Products ------------------------------------------------------------------------------------------


def run(request: Request, device: Any = None) -> Any:
    """D, float32 [matrices, M, N], where `request.c` is: on the host or on the device."""
    host = not isinstance(request.c, Tensor)
    if device is None or device.type != "cuda":
        device = torch.device("cpu" if interpreted() else "cuda")
    left, right = _Side(request, True, device), _Side(request, False, device)
    request.bad = left.bad, right.bad
    c = _tensor(request.c, device)
    if not any(request.bad) and request.depth and c.numel():
        c = _product(request, left, right, c)
    return c.cpu().numpy() if host else c


def _product(request: Request, left: _Side, right: _Side, c: Tensor) -> Tensor:
    unit, d = request.unit, _tiles(c)
    grid = (d.numel() // (ROWS * COLS),)
    shape = left.panels, right.panels
    with torch.cuda.device_of(d):
        if unit.is_reference:
            kernels.reference[grid](
                left.sig, right.sig, d, left.index, right.index, *shape, request.depth,
                FUSED=unit.order == "fma", ROWS=ROWS, COLS=COLS, **OPTIONS,
            )  # fmt: skip
        else:
            factors = request.factor_a is not None
            special = left.special or right.special
            kernels.gemm[grid](
                left.sig, left.scale, left.exp, right.sig, right.scale, right.exp, d,
                left.factors(request.factor_a), right.factors(request.factor_b),
                left.index, right.index, *shape, request.blocks, request.late or request.blocks,
                **constants(unit, request.out, special, request.late > 0, factors), **OPTIONS,
            )  # fmt: skip
    return _whole(d, c.shape[1], c.shape[2])
