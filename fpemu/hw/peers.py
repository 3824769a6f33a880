"""Quantization kernels of other libraries beside the dialect that claims their bits.

TransformerEngine and FlashInfer run on a GPU alone; where they are not installed, or the GPU has not
what they need, a row says so. A difference is reported and is no failure: a library's next version
may compute something else.

Sources: TransformerEngine (tests/pytorch/nvfp4, test_float8_blockwise_scaling_exact.py) and
FlashInfer (docs, fp4_quantize) for how they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

import fpemu
from fpemu.hw import gemms

if TYPE_CHECKING:
    import torch

    from fpemu.hw.verify import Budget, Row, Session

#: Codes as stored, block scales (or the tensor's) as stored and perhaps padded.
Parts = tuple["torch.Tensor", "torch.Tensor"]


@dataclass(frozen=True)
class Peer:
    """A kernel and the dialect that it is compared with."""

    library: str
    package: str
    name: str
    format: str
    capability: tuple[int, int]
    run: Callable[[torch.Tensor], Parts]


def _te(maker: Callable[[Any, Any], Any], codes: str, scales: str) -> Callable[..., Parts]:
    """A TransformerEngine quantizer's two attributes of the result."""

    def run(x: torch.Tensor) -> Parts:
        import transformer_engine.pytorch as te  # type: ignore[import-not-found]
        import transformer_engine_torch as tex  # type: ignore[import-not-found]

        made = maker(te, tex)(x)
        return getattr(made, codes), getattr(made, scales)

    return run


def _te_block(dimensions: int, pow2: bool) -> Callable[..., Parts]:
    return _te(
        lambda te, tex: te.Float8BlockQuantizer(
            fp8_dtype=tex.DType.kFloat8E4M3, rowwise=True, columnwise=False, amax_epsilon=0.0,
            force_pow_2_scales=pow2, block_scaling_dim=dimensions,
        ),
        "_rowwise_data", "_rowwise_scale_inv",
    )  # fmt: skip


def _te_nvfp4(two: bool) -> Callable[..., Parts]:
    return _te(
        lambda te, tex: te.NVFP4Quantizer(
            fp4_dtype=tex.DType.kFloat4E2M1, rowwise=True, columnwise=False,
            with_amax_reduction=False, amax_reduction_group=None, with_rht=False,
            with_post_rht_amax=False, with_2d_quantization=two,
        ),
        "_rowwise_data", "_rowwise_scale_inv",
    )  # fmt: skip


def _flashinfer_fp4(x: torch.Tensor) -> Parts:
    import flashinfer  # type: ignore[import-not-found]
    import torch

    amax = x.abs().amax().float().reshape(1)
    tensor_scale = torch.full_like(amax, 448.0 * 6.0) / amax  # not scalar / tensor: two roundings
    return flashinfer.fp4_quantize(x, tensor_scale, 16, False, False)


_TE, _FI = ("TransformerEngine", "transformer_engine"), ("FlashInfer", "flashinfer")
PEERS = (
    Peer(*_TE, "Float8CurrentScalingQuantizer", "fp8_tensor_e4m3", (8, 9), _te(
        lambda te, tex: te.Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, "cuda"),
        "_data", "_scale_inv")),
    Peer(*_TE, "Float8BlockQuantizer 1D", "fp8_block_e4m3", (9, 0), _te_block(1, True)),
    Peer(*_TE, "Float8BlockQuantizer 1D fp32", "fp8_block_e4m3/fp32", (9, 0), _te_block(1, False)),
    Peer(*_TE, "Float8BlockQuantizer 2D", "fp8_block_e4m3/2d", (9, 0), _te_block(2, True)),
    Peer(*_TE, "Float8BlockQuantizer 2D fp32", "fp8_block_e4m3/2d/fp32", (9, 0),
         _te_block(2, False)),
    Peer(*_TE, "MXFP8Quantizer", "mxfp8_e4m3/te", (10, 0), _te(
        lambda te, tex: te.MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=False),
        "_rowwise_data", "_rowwise_scale_inv")),
    Peer(*_TE, "NVFP4Quantizer", "nvfp4", (10, 0), _te_nvfp4(False)),
    Peer(*_TE, "NVFP4Quantizer 2D", "nvfp4/2d", (10, 0), _te_nvfp4(True)),
    Peer(*_FI, "fp4_quantize", "nvfp4/flashinfer-ref", (10, 0), _flashinfer_fp4),
)  # fmt: skip


def rows(session: Session, budget: Budget, pattern: str, seed: int) -> Iterator[Row]:
    """One row a kernel."""
    from fpemu.hw.verify import Row, timed

    for peer in PEERS:
        if not fnmatchcase(peer.format, pattern):
            continue
        label = f"{peer.name} ~ {peer.format}"
        result = Row("quantize", peer.library, label, must=False)
        result.why = why_not(peer, session.gpu.capability)
        if result.why:
            yield result
            continue
        yield timed(session, result, partial(_compare, session, peer, budget, seed, result))


def why_not(peer: Peer, capability: tuple[int, int]) -> str:
    """Why a kernel cannot run, or nothing."""
    if find_spec(peer.package) is None:
        return "not installed"
    if capability < peer.capability:
        return "needs compute capability {}.{} or later".format(*peer.capability)
    return ""


def _compare(session: Session, peer: Peer, budget: Budget, seed: int, result: Row) -> None:
    import torch

    x = inputs(max(budget.values, 1 << 16), seed)
    for kind in (torch.bfloat16, torch.float32):
        if kind == torch.float32 and peer.package == "flashinfer":
            continue  # it takes 16 bits
        tensor = torch.from_numpy(x).to(kind)
        want = fpemu.encode(tensor, peer.format)
        codes, scales = peer.run(tensor.to(session.device))
        name = str(kind).removeprefix("torch.")
        packed = gemms.tensor_bits(want.pack())
        result.count(
            gemms.tensor_bits(codes.view(torch.uint8)),
            packed,
            partial("{} code byte {}".format, name),
        )
        stored = gemms.tensor_bits(want.tensor_scale if want.scales is None else want.scales)
        result.count(
            trimmed(gemms.tensor_bits(scales), stored.shape), stored,
            partial("{} scale {}".format, name),
        )  # fmt: skip
    try:
        result.recipe = f"{peer.library} {version(peer.package.replace('_', '-'))}"
    except PackageNotFoundError:
        result.recipe = peer.library


def inputs(count: int, seed: int) -> np.ndarray:
    """Finite rows with scales far apart, zeros and a block of them; sides divisible by 128."""
    rng = np.random.default_rng(seed)
    columns = 512
    rows_ = max(128, count // columns // 128 * 128)
    x = rng.standard_normal((rows_, columns)).astype(np.float32)
    x *= np.float32(2.0) ** rng.integers(-12, 12, (rows_, 1)).astype(np.float32)
    x[0, :256] = 0
    return x


def trimmed(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Stored scales without padding; 1x128 scales are stored transposed."""
    if not shape:
        return scales.reshape(-1)[:1].reshape(())
    scales = scales.reshape(-1, scales.shape[-1])
    if scales.shape[0] < shape[0] or scales.shape[1] < shape[1]:
        scales = scales.T
    return np.ascontiguousarray(scales[: shape[0], : shape[1]])


__all__ = ["PEERS", "Peer", "inputs", "rows", "trimmed", "why_not"]
