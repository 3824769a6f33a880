"""How does a tensor core's accumulation err?

Casts operands to the format that a unit multiplies, then compares the unit's product with the exact
product of the same cast operands (float64), so that only the adding is measured. It answers:

  (a) how the error grows with K, the length of the sums, for each unit
  (b) how far truncation toward zero moves the sums to one side: the bias, which averaging over
      outputs does not remove
  (c) what that does to the weight gradients of a layer, beside what the cast itself does

on operands that are normal, GELU outputs times normal weights, GELU outputs times each other (so
that sums grow with K), constant (a bad case, checkable by hand), and those of a layer of a small
GPT: Y = X W^T, and dW = dY^T X, where K counts tokens. Results: tables here, a record (JSON) in
results/, figures in figures/ (drawn again by figures/accumulation.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import harness, model  # before torch: sets how its threads wait

# isort: split

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fpemu
from fpemu.gemm import get_recipe, get_unit

NAME = "accumulation"

# The study ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One way to compute a product: a unit, perhaps with a GEMM recipe, and its operands' formats."""

    label: str
    unit: str
    a: str
    b: str
    recipe: str | None = None

    @property
    def evidence(self) -> str:
        """What the sum's arithmetic was compared with: the weakest of unit and recipe."""
        labels = [get_unit(self.unit).evidence]
        labels += [] if self.recipe is None else [get_recipe(self.recipe).evidence]
        return next((label for label in labels if label == "model"), labels[0])


#: The FP32 references take the operands of the FP8 units: the same products, added otherwise.
LINES = (
    Line("Hopper E4M3 fast", "hopper.wgmma.e4m3", "e4m3", "e4m3"),
    Line("Hopper E4M3 promoted", "hopper.wgmma.e4m3", "e4m3", "e4m3", "cublaslt.fp8_slow"),
    Line("Blackwell E4M3", "blackwell.tcgen05.e4m3", "e4m3", "e4m3"),
    Line("Hopper BF16", "hopper.wgmma.bf16", "bf16", "bf16"),
    Line("Ampere FP16", "ampere.hmma.fp16", "fp16", "fp16"),
    Line("Blackwell NVFP4", "blackwell.tcgen05.nvfp4", "nvfp4", "nvfp4"),
    Line("Blackwell MXFP4", "blackwell.tcgen05.mxfp4", "mxfp4", "mxfp4"),
    Line("FP32 sequential", "fp32.sequential", "e4m3", "e4m3"),
    Line("FP32 pairwise", "fp32.pairwise", "e4m3", "e4m3"),
)
FP8 = LINES[:3]


def with_e5m2(line: Line) -> Line:
    """The same with a (the gradient dY) in E5M2."""
    return replace(
        line,
        label=line.label.replace("E4M3", "E5M2·E4M3"),
        unit=line.unit.replace("e4m3", "e5m2xe4m3"),
        a="e5m2",
    )


WGRAD_LINES = (*(with_e5m2(line) for line in FP8), *LINES)

KINDS = {
    "normal": "a, b ~ N(0, 1)",
    "gelu": "a = gelu(N(0, 1)), b ~ N(0, 1)",
    "growing": "a and b = gelu(N(0, 1)): products average above zero, so sums grow with K",
    "constant": "a = 1, b = 1.875, one output: every product loses the same bits (MXFP4 rounds 1.875)",
    "layer": "fprop of the last feed-forward layer, X[tokens, in] W^T: K is in, X is squared ReLU",
    "wgrad": "weight gradient of that layer, dY^T X: K is tokens",
}

DEFINITIONS = {
    "rms": "sqrt(mean (y - exact)^2) / sqrt(mean exact^2), over outputs",
    "max": "max |y - exact| / sqrt(mean exact^2)",
    "bias": "sum (y - exact) sign(exact) / sum |exact|; negative: magnitudes shrink",
    "bias_se": "standard error of bias if outputs erred independently; null for one output",
    "exact": "product in float64 of the operands after the cast (products of E4M3, E5M2 and FP4"
    " operands and their sums are exact in it; a sum of BF16 or FP16 products errs below 1e-12)",
    "cast": "operands times a power of two that brings the largest magnitude into [128, 256), to"
    " nearest; NVFP4 and MXFP4: fpemu.encode, blocks along K, tensor scale left out",
    "error": "||y - exact|| / ||exact|| over one layer's dW",
    "one_minus_cosine": "1 - <y, exact> / (||y|| ||exact||)",
    "norm_change": "||y|| / ||exact|| - 1",
    "cast_error": "||exact - unrounded|| / ||unrounded||, unrounded: of the float32 operands",
    "total_error": "||y - unrounded|| / ||unrounded||",
    "evidence": "'hardware-verified' counts single steps replayed from recordings, which hold no"
    " chains of steps over K",
}


@dataclass(frozen=True)
class Budget:
    """How much to do."""

    shape: model.Shape
    training: model.Training
    size: int  # rows and columns of the products in (a) and (b)
    longest: int  # K; also the tokens of the captured batch


DEFAULT = Budget(
    model.Shape(width=256, layers=2), model.Training(steps=60, batch=16, warmup=10), 256, 16384
)
QUICK = Budget(
    model.Shape(width=128, layers=2), model.Training(steps=30, warmup=5), size=64, longest=4096
)
SHORTEST = 32


def lengths(longest: int) -> list[int]:
    """Powers of two from 32."""
    return [1 << k for k in range(5, longest.bit_length()) if 1 << k <= longest]


# Operands ----------------------------------------------------------------------------------------


class Operand(NamedTuple):
    """What `fpemu.matmul` takes, the same values as float64, and what x was multiplied by."""

    given: Any
    values: np.ndarray
    factor: float


def cast(x: np.ndarray, fmt: str, axis: int) -> Operand:
    """Operand in `fmt`, as `DEFINITIONS` says; `axis` (-1 for a, -2 for b) is that of K.

    A power of two moves exponents only, so it changes no relative error. (NVFP4's tensor scale is
    left out as it is multiplied in after the sum.)
    """
    if isinstance(fpemu.get_format(fmt), fpemu.BlockFormat):
        encoded = fpemu.encode(x, fmt, axis=axis)
        left_out = 1.0 if encoded.tensor_scale is None else float(encoded.tensor_scale)
        encoded = replace(encoded, global_scale=None)
        return Operand(encoded, encoded.decode(np.float64), 1 / left_out)
    factor = full_range_factor(x)
    values = fpemu.quantize(x * np.float32(factor), fmt)
    return Operand(values, values.astype(np.float64), factor)


def full_range_factor(x: np.ndarray) -> float:
    """The power of two that brings the largest magnitude of float32 `x` into [128, 256)."""
    top = np.abs(x).max(initial=0)
    exponent = (int(np.float32(top).view(np.uint32)) >> 23) - 127
    return 2.0 ** (7 - exponent) if top > 0 else 1.0


def shortened(operand: Operand, k: int, axis: int) -> Operand:
    """The operand's first `k` of K, a multiple of every block size."""

    def cut(x: np.ndarray, n: int) -> np.ndarray:
        return x[:, :n] if axis == -1 else x[:n]

    given, values, factor = operand
    if isinstance(given, fpemu.Encoded):
        block = given.codes.shape[axis] // given.scales.shape[axis]
        given = replace(given, codes=cut(given.codes, k), scales=cut(given.scales, k // block))
    else:
        given = cut(given, k)
    return Operand(given, cut(values, k), factor)


def gelu(x: np.ndarray) -> np.ndarray:
    return F.gelu(torch.from_numpy(x)).numpy()


def made_up(kind: str, size: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Operands a[size, k] and b[k, size] of a kind that needs no model."""
    if kind == "constant":
        return np.full((1, k), 1, np.float32), np.full((k, 1), 1.875, np.float32)
    rng = np.random.default_rng([seed, list(KINDS).index(kind)])
    a = rng.standard_normal((size, k), np.float32)
    b = rng.standard_normal((k, size), np.float32)
    return (a if kind == "normal" else gelu(a)), (gelu(b) if kind == "growing" else b)


class Layer(NamedTuple):
    """A linear layer's tensors over one batch: Y[tokens, out] = X[tokens, in] W[out, in]^T."""

    name: str
    x: np.ndarray
    w: np.ndarray
    dy: np.ndarray


def capture(
    gpt: model.GPT, names: Sequence[str], text: model.Corpus, tokens: int, seed: int, device: str
) -> list[Layer]:
    """Layers' tensors over a batch of `tokens`, in passes of 16 windows.

    The loss is the mean over the whole batch, and so the gradients are those of one large step.
    """
    context = gpt.shape.context
    order = torch.Generator().manual_seed(seed + (2 << 32))
    starts = torch.randint(len(text.train) - context, (tokens // context,), generator=order)
    kept: dict[tuple[str, str], list[Tensor]] = {}

    def keep(name: str, what: str, x: Tensor) -> None:
        kept.setdefault((name, what), []).append(x.detach().flatten(0, -2).cpu())

    handles = []
    for name in names:
        linear = gpt.linears()[name]

        def forward(_: nn.Module, inputs: tuple[Tensor, ...], __: Any, name: str = name) -> None:
            keep(name, "x", inputs[0])

        def backward(_: nn.Module, __: Any, outputs: tuple[Tensor, ...], name: str = name) -> None:
            keep(name, "dy", outputs[0])

        handles += [
            linear.register_forward_hook(forward),
            linear.register_full_backward_hook(backward),
        ]
    for part in starts.split(16):
        inputs, targets = (t.to(device) for t in model.windows(text.train, part, context))
        loss = model.next_byte_loss(gpt, inputs, targets) * (len(part) / len(starts))
        loss.backward()
    for handle in handles:
        handle.remove()
    gpt.zero_grad(set_to_none=True)
    return [
        Layer(
            name,
            torch.cat(kept[name, "x"]).numpy(),
            gpt.linears()[name].weight.detach().cpu().numpy(),
            torch.cat(kept[name, "dy"]).numpy(),
        )
        for name in names
    ]


def spread(x: np.ndarray, count: int) -> np.ndarray:
    """At most `count` columns of `x`, evenly over all of them."""
    return x[:, np.arange(count) * x.shape[1] // count] if x.shape[1] > count else x


def from_layer(kind: str, layer: Layer, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Operands a[M, K] and b[K, N] of one of the layer's GEMMs, M and N at most `size`."""
    if kind == "layer":
        a, b = spread(layer.x.T, size).T, spread(layer.w.T, size)
    else:
        a, b = spread(layer.dy, size).T, spread(layer.x, size)
    return np.ascontiguousarray(a), np.ascontiguousarray(b)


# Measures ----------------------------------------------------------------------------------------


def ratio(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None


def errors(y: np.ndarray, exact: np.ndarray) -> dict[str, float | None]:
    """``rms``, ``max``, ``bias`` and ``bias_se`` of `DEFINITIONS`."""
    off = y.astype(np.float64) - exact
    size = float(np.sqrt(np.mean(exact**2)))
    outward = off * np.sign(exact)  # positive: away from zero
    mean = float(np.abs(exact).mean())
    deviation = float(outward.std(ddof=1)) if off.size > 1 else None
    return {
        "rms": ratio(np.sqrt(np.mean(off**2)), size),
        "max": ratio(np.abs(off).max(), size),
        "bias": ratio(outward.mean(), mean),
        "bias_se": None if deviation is None else ratio(deviation / off.size**0.5, mean),
    }


def norm(x: np.ndarray) -> float:
    return float(np.sqrt(np.sum(x**2)))


def agreement(y: np.ndarray, exact: np.ndarray, unrounded: np.ndarray) -> dict[str, float | None]:
    """A computed weight gradient against the exact one: the last measures of `DEFINITIONS`."""
    y = y.astype(np.float64)
    both = norm(y) > 0 and norm(exact) > 0
    # Of unit vectors u and v, 1 - <u, v> is |u - v|^2 / 2, which does not cancel.
    apart = norm(y / norm(y) - exact / norm(exact)) ** 2 / 2 if both else None
    return {
        "error": ratio(norm(y - exact), norm(exact)),
        "one_minus_cosine": apart,
        "norm_change": ratio(norm(y) - norm(exact), norm(exact)),
        "bias": errors(y, exact)["bias"],
        "cast_error": ratio(norm(exact - unrounded), norm(unrounded)),
        "total_error": ratio(norm(y - unrounded), norm(unrounded)),
    }


def product(line: Line, a: Operand, b: Operand) -> np.ndarray:
    return fpemu.matmul(a.given, b.given, unit=line.unit, recipe=line.recipe, progress=False)


def sweep(
    kind: str, a: np.ndarray, b: np.ndarray, advance: Callable[..., None]
) -> Iterator[dict[str, Any]]:
    """Rows of (a) and (b): every line at every K that the operands have."""
    ks = lengths(a.shape[1])
    exacts: dict[tuple[str, str, int], np.ndarray] = {}
    casts: dict[tuple[str, str], tuple[Operand, Operand]] = {}
    for line in LINES:
        pair = (line.a, line.b)
        if pair not in casts:
            casts[pair] = cast(a, line.a, -1), cast(b, line.b, -2)
        for k in ks:
            left, right = (shortened(x, k, i) for x, i in zip(casts[pair], (-1, -2), strict=True))
            at = (*pair, k)
            if at not in exacts:
                exacts[at] = left.values @ right.values
            y = product(line, left, right)
            yield {"kind": kind, "line": line.label, "k": k, **errors(y, exacts[at])}
            advance(1, f"{kind}: {line.label}")


def weight_gradients(
    layers: list[Layer], lines: Sequence[Line], advance: Callable[..., None]
) -> Iterator[dict[str, Any]]:
    """Rows of (c): dW of every layer by every line."""
    for layer in layers:
        a, b = np.ascontiguousarray(layer.dy.T), layer.x
        unrounded = a.astype(np.float64) @ b.astype(np.float64)
        casts: dict[tuple[str, str], tuple[Operand, Operand, np.ndarray]] = {}
        for line in lines:
            pair = (line.a, line.b)
            if pair not in casts:
                left, right = cast(a, line.a, -1), cast(b, line.b, -2)
                casts[pair] = left, right, left.values @ right.values
            left, right, exact = casts[pair]
            meant = unrounded * (left.factor * right.factor)
            row = agreement(product(line, left, right), exact, meant)
            yield {"layer": layer.name, "k": b.shape[0], "line": line.label, **row}
            advance(1, f"dW of {layer.name}: {line.label}")


# Running -----------------------------------------------------------------------------------------


def study(budget: Budget, seed: int, device: str) -> dict[str, Any]:
    """Train, capture, measure."""
    ks = lengths(budget.longest)
    width, last = budget.shape.width, budget.shape.layers - 1
    per_kind = {kind: len(ks) for kind in KINDS} | {"layer": len(lengths(min(4 * width, ks[-1])))}
    names = [f"{last}.{part}" for part in ("qkv", "proj", "up", "down")]
    cells = len(LINES) * sum(per_kind.values()) + len(WGRAD_LINES) * len(names)
    text = model.corpus()
    rows: list[dict[str, Any]] = []
    with harness.progress(NAME, budget.training.steps + cells) as advance:
        gpt, losses = model.train(
            budget.shape, budget.training, text, seed, device,
            after_step=lambda _, loss: advance(1, f"training, loss {loss:.2f}"),
        )  # fmt: skip
        layers = capture(gpt, names, text, budget.longest, seed, device)
        for kind in KINDS:
            if kind in ("layer", "wgrad"):
                a, b = from_layer(kind, layers[-1], budget.size)
            else:
                a, b = made_up(kind, budget.size, budget.longest, seed)
            rows += sweep(kind, a, b, advance)
        gradients = list(weight_gradients(layers, WGRAD_LINES, advance))
    return {
        "text": {
            "name": text.name,
            "bytes": len(text.train) + len(text.held_out),
            "sha256": text.sha256,
        },
        "train_loss": losses,
        "layer": names[-1],
        "shapes": {
            layer.name: {"out": layer.w.shape[0], "in": layer.w.shape[1]} for layer in layers
        },
        "lines": [described(line) for line in WGRAD_LINES],
        "kinds": KINDS,
        "errors": rows,
        "weight_gradients": gradients,
        "definitions": DEFINITIONS,
    }


def described(line: Line) -> dict[str, Any]:
    """A line for the record, with the full labels of its evidence."""
    return {
        **asdict(line),
        "evidence": line.evidence,
        "unit_evidence": get_unit(line.unit).evidence,
        "recipe_evidence": None if line.recipe is None else get_recipe(line.recipe).evidence,
    }


# Tables ------------------------------------------------------------------------------------------

#: Evidence labels short enough for a column.
SHORT = {"hardware-verified": "HW", "spec-verified": "spec", "model": "model"}
#: Columns of kinds with long names.
HEADINGS = {"growing": "grow", "constant": "const"}


def short_evidence(label: str) -> str:
    return SHORT[label.split(":")[0]]


def scientific(value: float | None, signed: bool = False) -> str:
    """Three significant digits in at most eight characters; ``0`` only where it is exact."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    text = f"{value:+.2f}" if signed else f"{value:.3g}"
    if abs(value) < 0.01:
        text = f"{value:+.0e}" if signed else f"{value:.1e}"
        mantissa, exponent = text.split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text


def show(metrics: dict[str, Any], out: Any) -> None:
    evidence = {line["label"]: short_evidence(line["evidence"]) for line in metrics["lines"]}
    rows = metrics["errors"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    longest = {kind: max(row["k"] for row in rows if row["kind"] == kind) for kind in kinds}
    cell = {(row["line"], row["kind"]): row for row in rows if row["k"] == longest[row["kind"]]}
    labels = list(dict.fromkeys(row["line"] for row in rows))
    top = max(longest.values())
    where = f"K = {top}" + "".join(f" ({kind}: {k})" for kind, k in longest.items() if k != top)
    columns = ["unit", "basis", *(HEADINGS.get(kind, kind) for kind in kinds)]
    for key, title in (("rms", "Error, RMS"), ("bias", "Bias, - shrinks")):
        body = [
            [
                label,
                evidence[label],
                *(
                    scientific(percents(cell[label, kind][key]), signed=key == "bias")
                    for kind in kinds
                ),
            ]
            for label in labels
        ]
        out.print(harness.table(f"{title}, % of the exact products, {where}", columns, body))
    out.print(
        "basis, the evidence: HW, single steps replay outputs recorded on hardware (which\n"
        "hold no chains over K); model, not compared with recordings; spec, IEEE 754.\n",
        style="dim",
    )
    show_weight_gradients(metrics["weight_gradients"], evidence, out)
    out.print(verdict(metrics))


def percents(value: float | None) -> float | None:
    return None if value is None else 100 * value


def worst(rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    return max(rows, key=lambda row: abs(row[key] or 0))


def show_weight_gradients(rows: list[dict[str, Any]], evidence: dict[str, str], out: Any) -> None:
    body = []
    for label in dict.fromkeys(row["line"] for row in rows):
        row = worst([row for row in rows if row["line"] == label], "error")
        body.append(
            [
                label,
                evidence[label],
                scientific(percents(row["error"])),
                scientific(percents(row["cast_error"])),
                scientific(percents(row["total_error"])),
                scientific(row["one_minus_cosine"]),
                scientific(percents(row["norm_change"]), signed=True),
            ]
        )
    columns = ["unit", "basis", "adding", "cast", "both", "1-cos", "norm"]
    title = f"Weight gradients over {rows[0]['k']} tokens, %, the layer worst in adding"
    out.print(harness.table(title, columns, body))
    out.print(
        "adding: error against the exact product of the cast operands. cast: of that\n"
        "product against the exact one of the float32 operands. both: of the result\n"
        "against the latter. 1-cos (no %) and norm, ||dW|| / ||exact|| - 1: of adding.\n",
        style="dim",
    )


def verdict(metrics: dict[str, Any]) -> str:
    """What the constant case says about the FP8 units, and the weight gradients about the worst."""
    rows = [row for row in metrics["errors"] if row["kind"] == "constant"]
    k = max(row["k"] for row in rows)
    bias = {row["line"]: row["bias"] for row in rows if row["k"] == k}
    parts = [f"{line.label} {scientific(-100 * bias[line.label])} %" for line in FP8]
    row = worst(metrics["weight_gradients"], "error")
    return (
        f"Constant operands, K = {k}: sums too small by {', '.join(parts)}.\n"
        f"Weight gradients: {row['line']} errs most in adding, {scientific(100 * row['error'])} %"
        f" ({row['layer']})."
    )


# Command line ------------------------------------------------------------------------------------

EXAMPLES = """
python experiments/accumulation.py            # two to four minutes on two cores
python experiments/accumulation.py --quick    # under a minute
python figures/accumulation.py                # draw the figures again
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, record, draw. Returns the exit status."""
    args: argparse.Namespace = harness.parse(harness.arguments(__doc__ or "", EXAMPLES), argv)
    budget = QUICK if args.quick else DEFAULT
    point = {
        "quick": args.quick,
        "seed": args.seed,
        "model": asdict(budget.shape),
        "training": asdict(budget.training),
        "size": budget.size,
        "lengths": lengths(budget.longest),
    }
    path = harness.record_path(args, NAME)
    with harness.recording(path, NAME, point, args.argv, args.device) as metrics:
        metrics |= study(budget, args.seed, args.device)
    out = harness.console()
    show(harness.plain(metrics), out)
    from figures import accumulation as drawing

    figures = drawing.draw(path, harness.figures_dir(args))
    out.print(
        f"record  {harness.shown(path)}\nfigures {harness.shown(figures[0].parent)}/{NAME}_*.pdf, .png"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
