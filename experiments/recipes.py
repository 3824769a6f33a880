"""Do low-precision recipes change what a small GPT learns? Four hypotheses, three verdicts.

Trains the byte-level GPT of experiments/model.py in several recipes of fpemu.recipes, with paired
seeds: a seed fixes initial weights, data order and held-out text, and only the recipe differs. The
linear layers of the blocks are quantized; embeddings, head, norms and attention stay float32. What
is compared is the held-out loss at the end, by the difference within each seed:

  underflow   unscaled E4M3/E5M2 gradients flush most of what they hold and FP16 some; loss or
              tensor scaling recovers training
  placement   stochastic rounding of every operand is worse than of gradients alone (NVFP4)
  mxfp8       MXFP8 equals BF16 within the margin
  fp4         NVFP4's and MXFP4's gaps to BF16 are positive

Each claim about losses gets an interval for the mean difference (Student's t; all intervals
together hold with 95 %). A claim is *supported* where its interval lies on the claimed side, or
within the margin; *contradicted* where it lies on the other side; else *not resolved*. A hypothesis
is supported if all its claims are, contradicted if any is. The margin, the claims and the number of
seeds are in this file, fixed before a run. A run that diverges counts with a loss of ln 256.

Writes a table to the terminal, a record (JSON) to results/ and a figure to figures/.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Run from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments import harness, model  # before torch: sets how its threads wait

# isort: split

import torch
from scipy import stats as distributions
from torch import nn

import fpemu
from fpemu.recipes import RECIPES, Operand, Recipe, linear_recipe

NAME = "recipes"
MARGIN = 0.01  # nats per byte: what counts as equal
CONFIDENCE = 0.95  # of all intervals together (Bonferroni)
LOSS_SCALE = 2.0**14
DIVERGED = math.log(256)  # the loss of knowing nothing

#: name -> recipe, loss scale
ARMS: dict[str, tuple[Recipe, float]] = {
    "bf16": (RECIPES["bf16"], 1.0),
    "fp8 unscaled": (linear_recipe("unscaled", "e4m3", "e4m3", "e5m2"), 1.0),
    "fp8 loss scale": (linear_recipe("unscaled", "e4m3", "e4m3", "e5m2"), LOSS_SCALE),
    "fp8 by tensor": (RECIPES["fp8_current"], 1.0),
    "mxfp8": (RECIPES["mxfp8"], 1.0),
    "mxfp4": (RECIPES["mxfp4"], 1.0),
    "nvfp4": (linear_recipe("nvfp4 nearest", "nvfp4", "nvfp4", "nvfp4"), 1.0),
    "nvfp4 sr dy": (
        linear_recipe("nvfp4 sr", "nvfp4", "nvfp4", Operand("nvfp4", rounding="sr")), 1.0,
    ),
    "nvfp4 sr all": (
        linear_recipe("nvfp4 sr", *[Operand("nvfp4", rounding="sr")] * 3), 1.0,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """Loss of `arm` minus loss of `reference` is positive, or within the margin of zero."""

    hypothesis: str
    arm: str
    reference: str
    says: str  # "worse" or "equal"


CLAIMS = (
    Claim("underflow", "fp8 unscaled", "bf16", "worse"),
    Claim("underflow", "fp8 loss scale", "fp8 unscaled", "better"),
    Claim("underflow", "fp8 by tensor", "fp8 unscaled", "better"),
    Claim("placement", "nvfp4 sr all", "nvfp4 sr dy", "worse"),
    Claim("mxfp8", "mxfp8", "bf16", "equal"),
    Claim("fp4", "nvfp4", "bf16", "worse"),
    Claim("fp4", "mxfp4", "bf16", "worse"),
)
#: Share of the non-zero dY of the BF16 run that a format flushes, pooled over layers, must be
#: above the first and at most the second number.
FLUSHED = {"e4m3": (0.5, 1.0), "e5m2": (0.5, 1.0), "fp16": (0.0, 0.5)}
VERDICTS = ("supported", "contradicted", "not resolved")


@dataclass(frozen=True)
class Budget:
    shape: model.Shape
    training: model.Training
    seeds: int
    held_out: int  # bytes


QUICK = Budget(
    model.Shape(width=64, layers=2, heads=2, context=64),
    model.Training(steps=40, batch=8, rate=1e-3, warmup=10),
    seeds=2,
    held_out=1 << 13,
)
DEFAULT = Budget(
    model.Shape(width=128, layers=3, heads=4, context=128),
    model.Training(steps=200, batch=8, rate=1e-3, warmup=20),
    seeds=6,
    held_out=1 << 16,
)

# Training ----------------------------------------------------------------------------------------


def train(
    recipe: Recipe, scale: float, seed: int, budget: Budget, text: model.Corpus, device: str
) -> tuple[float, dict[str, list[int]]]:
    """Held-out loss at the end, and per format how many non-zero dY of the last step it flushes."""
    shape, plan = budget.shape, budget.training
    gpt = model.GPT(shape, torch.Generator().manual_seed(seed)).to(device)
    fpemu.nn.convert(gpt.blocks, recipe, keep=(), seed=seed, verbose=False)
    adamw = model.optimizer(gpt, plan)
    order = torch.Generator().manual_seed(seed + (1 << 32))
    flushed: dict[str, list[int]] = {fmt: [0, 0] for fmt in FLUSHED}

    def count(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        for fmt, sums in flushed.items():
            found = fpemu.stats(grad_output[0], fmt)
            sums[0] += int(found.underflow)
            sums[1] += int(found.size - found.zeros)

    for step in range(plan.steps):
        if step == plan.steps - 1 and recipe.name == "bf16":
            for layer in gpt.blocks.modules():
                if isinstance(layer, fpemu.nn.Linear):
                    layer.register_full_backward_hook(count)
        starts = torch.randint(len(text.train) - shape.context, (plan.batch,), generator=order)
        inputs, targets = (t.to(device) for t in model.windows(text.train, starts, shape.context))
        (model.next_byte_loss(gpt, inputs, targets) * scale).backward()
        for p in gpt.parameters():
            if p.grad is not None:
                p.grad /= scale
        nn.utils.clip_grad_norm_(gpt.parameters(), plan.clip)
        for group in adamw.param_groups:
            group["lr"] = model.rate_at(step, plan)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
    loss = model.held_out_loss(gpt, text.held_out, device, plan.batch, budget.held_out)
    return (loss if math.isfinite(loss) else DIVERGED), flushed


# Verdicts ----------------------------------------------------------------------------------------


def interval(differences: Sequence[float], claims: int) -> tuple[float, float, float]:
    """Mean and the ends of its interval, one of `claims` that hold together."""
    n = len(differences)
    mean = statistics.fmean(differences)
    tail = (1 - CONFIDENCE) / claims / 2
    half = float(distributions.t.ppf(1 - tail, n - 1)) * statistics.stdev(differences) / n**0.5
    return mean, mean - half, mean + half


def verdict(says: str, low: float, high: float, margin: float = MARGIN) -> str:
    """What an interval of the difference says about a claim.

    >>> verdict("worse", 0.1, 0.2), verdict("worse", -0.1, 0.2), verdict("better", 0.1, 0.2)
    ('supported', 'not resolved', 'contradicted')
    >>> verdict("equal", -0.002, 0.009), verdict("equal", 0.002, 0.02), verdict("equal", 0.02, 0.03)
    ('supported', 'not resolved', 'contradicted')
    """
    if says == "equal":
        inside, outside = -margin <= low and high <= margin, low > margin or high < -margin
    else:
        inside, outside = (low > 0, high < 0) if says == "worse" else (high < 0, low > 0)
    return "supported" if inside else "contradicted" if outside else "not resolved"


def together(verdicts: Sequence[str]) -> str:
    """A hypothesis of several claims."""
    if "contradicted" in verdicts:
        return "contradicted"
    return "supported" if set(verdicts) == {"supported"} else "not resolved"


def judge(losses: dict[str, list[float]], flushed: dict[str, list[int]]) -> dict[str, Any]:
    """Claims, shares and hypotheses with their verdicts."""
    claims: list[dict[str, Any]] = []
    found: dict[str, list[str]] = {}
    for claim in CLAIMS:
        differences = [
            a - b for a, b in zip(losses[claim.arm], losses[claim.reference], strict=True)
        ]
        mean, low, high = interval(differences, len(CLAIMS))
        said = verdict(claim.says, low, high)
        claims.append({**asdict(claim), "mean": mean, "low": low, "high": high, "verdict": said})
        found.setdefault(claim.hypothesis, []).append(said)
    shares = []
    for fmt, (above, most) in FLUSHED.items():
        share = flushed[fmt][0] / flushed[fmt][1]
        said = "supported" if above < share <= most else "contradicted"
        shares.append(
            {"format": fmt, "share": share, "above": above, "most": most, "verdict": said}
        )
        found["underflow"].append(said)
    hypotheses = {name: together(verdicts) for name, verdicts in found.items()}
    return {"claims": claims, "flushed": shares, "hypotheses": hypotheses}


def study(budget: Budget, seed: int, device: str) -> dict[str, Any]:
    text = model.corpus()
    losses: dict[str, list[float]] = {name: [] for name in ARMS}
    flushed = {fmt: [0, 0] for fmt in FLUSHED}
    with harness.progress("runs", len(ARMS) * budget.seeds) as advance:
        for k in range(budget.seeds):
            for name, (recipe, scale) in ARMS.items():
                advance(0, note=f"{name}, seed {k + 1} of {budget.seeds}")
                loss, counts = train(recipe, scale, seed * 1000 + k, budget, text, device)
                losses[name].append(loss)
                for fmt, (part, whole) in counts.items():
                    flushed[fmt][0] += part
                    flushed[fmt][1] += whole
                advance()
    return {
        "losses": losses,
        **judge(losses, flushed),
        "corpus": {"name": text.name, "sha256": text.sha256},
    }


# The script --------------------------------------------------------------------------------------

EXAMPLES = """
python experiments/recipes.py --quick
python experiments/recipes.py --seed 1 --out /tmp/recipes
python figures/recipes.py                     # draw the figure again
"""


def show(metrics: dict[str, Any], print_: Callable[..., None]) -> None:
    rows = [
        [name, f"{statistics.fmean(values):.4f}", *(f"{v:.4f}" for v in values[:4])]
        for name, values in metrics["losses"].items()
    ]
    seeds = len(rows[0]) - 2
    heads = ["recipe", "mean", *(f"seed {k + 1}" for k in range(seeds))]
    print_(harness.table("Held-out loss, nats per byte", heads, rows))
    rows = [
        [f"{c['arm']} - {c['reference']}", c["says"], f"{c['mean']:+.4f}",
         f"{c['low']:+.4f}", f"{c['high']:+.4f}", c["verdict"]]
        for c in metrics["claims"]
    ]  # fmt: skip
    print_(
        harness.table("Paired differences", ["", "claim", "mean", "low", "high", "verdict"], rows)
    )
    rows = [[f["format"], harness.percent(f["share"]), f["verdict"]] for f in metrics["flushed"]]
    print_(harness.table("dY flushed, %", ["format", "share", "verdict"], rows))
    for name, said in metrics["hypotheses"].items():
        print_(f"hypothesis {name:10s} {said}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, record. Returns the exit status."""
    args: argparse.Namespace = harness.parse(harness.arguments(__doc__ or "", EXAMPLES), argv)
    budget = QUICK if args.quick else DEFAULT
    point = {
        "quick": args.quick, "seed": args.seed, "model": asdict(budget.shape),
        "training": asdict(budget.training), "seeds": budget.seeds, "margin": MARGIN,
        "confidence": CONFIDENCE, "loss_scale": LOSS_SCALE, "claims": [asdict(c) for c in CLAIMS],
    }  # fmt: skip
    path = harness.record_path(args, NAME)
    with harness.recording(path, NAME, point, args.argv, args.device) as metrics:
        metrics |= study(budget, args.seed, args.device)
    out = harness.console()
    show(harness.plain(metrics), out.print)
    from figures import recipes as drawing

    figure, _ = drawing.draw(path, harness.figures_dir(args))
    out.print(f"record {harness.shown(path)}\nfigure {harness.shown(figure)}, .png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
