"""What does a recipe cost: step time by phase, peak memory, and the bytes of the training state?

Time and memory are those of this machine's CPU, which emulates: they say what a run of the recipe
costs here, not what it gains on hardware. A GPT over bytes takes its steps in every recipe in
turns, beside the plain float32 step (benchmarks/bench_training.py measures). Phases are casting
operands, multiplying them, and the rest (attention, norms, AdamW).

Bytes are exact and machine-independent: what weights, gradients, masters and Adam's moments take as
stored, from `fpemu.Encoded.nbytes`, for that GPT (really encoded) and for the published sizes of
Llama 3 8B (from shapes alone, nothing is allocated). Weights are stored in as many quantized copies
as a recipe's forward and backward GEMMs read different ones; layers that a recipe keeps, embeddings,
head and norms are BF16. Hardware that multiplies in one layout only stores a transposed copy more.

Writes tables to the terminal, a record (JSON) to results/local or, with --full, results/full, and a
figure beside it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import harness, model  # before torch: sets how its threads wait

# isort: split

import numpy as np
import torch

import fpemu
from benchmarks import bench_training as bench
from fpemu.backends import element_format, scales_dtype, scales_shape
from fpemu.encoded import Encoded
from fpemu.formats import BlockFormat, Format
from fpemu.nn.convert import kept_layers
from fpemu.recipes import OPERANDS, RECIPES, Recipe, row_of

NAME = "speed"

# Bytes -------------------------------------------------------------------------------------------

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Llama:
    """Sizes of a decoder with grouped queries and a gated feed-forward; defaults: Llama 3 8B."""

    vocabulary: int = 128_256
    width: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14_336

    def shapes(self) -> Shapes:
        """Shape of every parameter by name."""
        d, kv = self.width, self.width // self.heads * self.kv_heads
        found: Shapes = {"embedding": (self.vocabulary, d)}
        for i in range(self.layers):
            matrices = {
                "q": (d, d), "k": (kv, d), "v": (kv, d), "o": (d, d),
                "gate": (self.hidden, d), "up": (self.hidden, d), "down": (d, self.hidden),
            }  # fmt: skip
            found |= {f"blocks.{i}.{name}": shape for name, shape in matrices.items()}
            found |= {f"blocks.{i}.norm1": (d,), f"blocks.{i}.norm2": (d,)}
        return found | {"norm": (d,), "head": (self.vocabulary, d)}


@dataclass(frozen=True)
class Layout:
    """How a training run stores its state.

    Parameters
    ----------
    recipe : str
        Whose GEMM operands are the stored weights.
    gradient, master : str or None
        Format of weight gradients, and of the weights that the optimizer updates. None: it updates
        the stored ones.
    """

    name: str
    recipe: str
    gradient: str = "fp32"
    master: str | None = "fp32"


MOMENTS = 2  # Adam's, float32
#: Masters, gradient sums and moments in float32 are NVFP4's recipe (arXiv 2509.25149) and the usual
#: mixed precision.
LAYOUTS = (
    Layout("fp32", "fp32", master=None),
    Layout("bf16, no master", "bf16_sr_weights", gradient="bf16", master=None),
    Layout("bf16", "bf16"),
    Layout("fp8 by tensor", "fp8_current"),
    Layout("fp8 by block", "fp8_block"),
    Layout("mxfp8", "mxfp8"),
    Layout("mxfp4", "mxfp4"),
    Layout("nvfp4", "nvfp4"),
)
ROLES = ("weights", "gradients", "masters", "moments")
#: Formats of the table of bytes per value.
FORMATS = (
    "fp32", "bf16", "fp8_tensor_e4m3", "fp8_block_e4m3", "fp8_block_e4m3/2d", "mxfp8_e4m3", "mxfp4",
    "nvfp4", "nvfp4/2d",
)  # fmt: skip


def empty_encoded(shape: tuple[int, ...], fmt: str | Format | BlockFormat, axis: int) -> Encoded:
    """An `Encoded` of a shape whose arrays are one number each, repeated without memory."""
    row = fpemu.get_format(fmt)

    def repeated(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype), shape)

    codes = repeated(element_format(row).code_dtype, shape)
    scales = scale = None
    if isinstance(row, BlockFormat):
        where = scales_shape(row, shape, axis % len(shape))
        scales = None if where is None else repeated(scales_dtype(row), where)
        scale = np.float32(1) if row.tensor_scaled else None
    return Encoded(codes, scales, scale, row, axis)


def formula(shape: tuple[int, ...], fmt: str | Format | BlockFormat, axis: int = -1) -> int:
    """Bytes of a tensor: codes, FP4 two a byte, block scales, and 4 for a tensor scale.

    >>> formula((4096, 4096), "nvfp4") == 4096 * 4096 // 2 + 4096 * 4096 // 16 + 4
    True
    """
    row = fpemu.get_format(fmt)
    bits = element_format(row).bits
    *lead, last = shape
    wide = 1 if bits <= 8 else 2 if bits <= 16 else 4
    size = math.prod(lead) * ((last + 1) // 2 if bits <= 4 else last * wide)
    if not isinstance(row, BlockFormat) or row.block is None:
        return size + 4 * isinstance(row, BlockFormat)
    block = [1] * len(shape)
    if row.is_2d:
        block[-2:] = row.block
    else:
        block[axis] = row.block[0]
    blocks = math.prod(-(-n // b) for n, b in zip(shape, block, strict=True))
    assert row.scale is not None
    return size + blocks * (1 if row.scale.bits <= 8 else 4) + 4 * row.tensor_scaled


def casts(recipe: Recipe) -> list[tuple[Format | BlockFormat, int]]:
    """The different casts of a weight that a recipe's GEMMs read, with the axis of their blocks."""
    found: dict[Any, tuple[Format | BlockFormat, int]] = {}
    for name in ("fprop.w", "dgrad.w"):
        row = row_of(recipe.operand(name)) or fpemu.get_format("fp32")
        directed = isinstance(row, BlockFormat) and row.block is not None and not row.is_2d
        axis = OPERANDS[name] if directed else -1
        found[row, axis] = (row, axis)
    return list(found.values())


def state_bytes(layout: Layout, shapes: Shapes, size: Any) -> dict[str, int]:
    """Bytes of each role by ``size(shape, format, axis)``."""
    recipe = RECIPES[layout.recipe]
    matrices = {n: s for n, s in shapes.items() if n.startswith("blocks.") and len(s) == 2}
    kept = kept_layers(matrices, recipe.keep)
    plain = "fp32" if layout.recipe == "fp32" else "bf16"
    total = dict.fromkeys(ROLES, 0)
    for name, shape in shapes.items():
        stored = casts(recipe) if name in matrices and name not in kept else [(plain, -1)]
        total["weights"] += sum(size(shape, fmt, axis) for fmt, axis in stored)
        total["gradients"] += size(shape, layout.gradient, -1)
        total["masters"] += size(shape, layout.master, -1) if layout.master else 0
        total["moments"] += MOMENTS * size(shape, "fp32", -1)
    return total


def from_shape(shape: tuple[int, ...], fmt: Any, axis: int) -> int:
    return empty_encoded(shape, fmt, axis).nbytes


def gpt_shapes(gpt: model.GPT) -> Shapes:
    """Shape of every parameter, linear layers called as in `Llama.shapes`."""
    return {name.removesuffix(".weight"): tuple(p.shape) for name, p in gpt.named_parameters()}


def bytes_rows(name: str, shapes: Shapes, size: Any) -> list[dict[str, Any]]:
    parameters = sum(math.prod(shape) for shape in shapes.values())
    rows = []
    for layout in LAYOUTS:
        found = state_bytes(layout, shapes, size)
        total = sum(found.values())
        exact = sum(state_bytes(layout, shapes, formula).values())
        rows.append(
            {
                "model": name,
                "layout": layout.name,
                "parameters": parameters,
                **found,
                "total": total,
                "formula": exact,
                "per_parameter": total / parameters,
            }
        )
    return rows


def format_rows(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Bytes of one matrix in each format."""
    return [
        {
            "format": fmt, "nbytes": from_shape(shape, fmt, -1), "formula": formula(shape, fmt),
            "bits_per_value": 8 * formula(shape, fmt) / math.prod(shape),
        }
        for fmt in FORMATS
    ]  # fmt: skip


def encoded_size(gpt: model.GPT) -> Any:
    """``size`` that encodes the GPT's own weights; a shape's first weight stands for all of them."""
    weights = {tuple(p.shape): p.detach().numpy() for p in gpt.parameters()}

    def size(shape: tuple[int, ...], fmt: Any, axis: int) -> int:
        return fpemu.encode(weights[shape], fmt, axis=axis).nbytes

    return size


# Time --------------------------------------------------------------------------------------------

ROUNDS = {"quick": 2, "default": 9, "full": 31}


def study(size: str) -> dict[str, Any]:
    gpt = model.GPT(bench.SHAPE, torch.Generator().manual_seed(0))
    llama = Llama()
    metrics: dict[str, Any] = {
        "states": [
            *bytes_rows("GPT", gpt_shapes(gpt), encoded_size(gpt)),
            *bytes_rows("Llama 3 8B", llama.shapes(), from_shape),
        ],
        "formats": format_rows((llama.width, llama.width)),
    }
    steps = bench.measure(list(RECIPES), ROUNDS[size], None)
    if size != "quick" and sys.platform == "linux":
        for row in steps:
            row["peak_mb"] = bench.peak_memory(row["recipe"], None)
    return {"steps": steps, **metrics}


# Tables ------------------------------------------------------------------------------------------


def show(metrics: dict[str, Any], out: Any) -> None:
    body = [
        [
            row["recipe"].replace("torch", "torch float32"), f"{1e3 * row['seconds']:.0f}",
            f"{row['ratio']:.2f}", f"{row['tokens_per_s']:.0f}",
            *(f"{1e3 * row[phase]:.0f}" if row["recipe"] != "torch" else "-" for phase in ("quantize", "gemm", "rest")),
            f"{row['peak_mb']:.0f}" if "peak_mb" in row else "-",
        ]
        for row in metrics["steps"]
    ]  # fmt: skip
    columns = ["recipe", "ms", "x float32", "tokens/s", "quantize", "GEMM", "rest", "peak MB"]
    out.print(harness.table("A training step here, emulated; phases in ms", columns, body))
    body = [
        [row["format"], f"{row['nbytes']:,}", f"{row['formula']:,}", f"{row['bits_per_value']:.4f}"]
        for row in metrics["formats"]
    ]
    columns = ["4096 x 4096 in", "nbytes", "formula", "bits a value"]
    out.print(harness.table("Bytes of a matrix", columns, body))
    for name in dict.fromkeys(row["model"] for row in metrics["states"]):
        rows = [row for row in metrics["states"] if row["model"] == name]
        unit, label = (1e9, "GB") if rows[0]["total"] > 1e9 else (1e6, "MB")
        body = [
            [row["layout"], *(f"{row[role] / unit:.2f}" for role in (*ROLES, "total")),
             f"{row['per_parameter']:.3f}"]
            for row in rows
        ]  # fmt: skip
        title = f"{name}, {rows[0]['parameters']:,} parameters: training state, {label}"
        out.print(harness.table(title, ["", *ROLES, "total", "bytes each"], body))


# The script --------------------------------------------------------------------------------------

EXAMPLES = """
python experiments/speed.py --quick
python experiments/speed.py                   # with peak memory, a process per recipe
python experiments/speed.py --full --threads 2
python figures/speed.py                       # draw the figure again
"""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = harness.arguments(__doc__ or "", EXAMPLES, full="the budget of the paper: more rounds")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of torch and fpemu")
    args = harness.parse(parser, argv)
    if args.device != "cpu":
        parser.error(
            "--device cuda: the step is timed on the CPU; benchmarks/bench_gpu.py has GPUs"
        )
    if args.threads < 1:
        parser.error(f"--threads {args.threads}: at least one thread is needed")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, record, draw. Returns the exit status."""
    args = parse(argv)
    path = harness.home(args) / f"{NAME}.json"
    torch.set_num_threads(args.threads)
    fpemu.set_num_threads(args.threads)
    point = {
        "budget": args.budget, "rounds": ROUNDS[args.budget], "threads": args.threads,
        "model": asdict(bench.SHAPE), "batch": bench.BATCH, "llama": asdict(Llama()),
        "layouts": [asdict(layout) for layout in LAYOUTS],
    }  # fmt: skip
    with harness.recording(path, NAME, point, args.argv) as metrics:
        metrics |= study(args.budget)
    out = harness.console()
    show(harness.plain(metrics, 12), out)
    from figures import speed as drawing

    drawn = drawing.draw(path, harness.drawings(args))
    out.print("\n".join(f"  {harness.shown(p)}" for p in [path, *drawn]), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
