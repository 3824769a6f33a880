"""What does `fpemu.Monitor` cost? A training step of the GPT of experiments/model.py, with and without.

Each round takes turns: a step without a monitor, then recorded steps of each kind, so a machine
that slows down slows all of them. A monitor with every=n costs a recorded step once in n and
nothing measurable otherwise; its share is the recorded step's excess over n.

    python benchmarks/bench_monitor.py                 4 layers, width 256, 8 x 256 tokens, 2 threads
    python benchmarks/bench_monitor.py --rounds 20
    python benchmarks/bench_monitor.py --cpu           on a busy machine: processor time, 1 thread
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script: this checkout's fpemu and experiments

import torch

import fpemu
from experiments import model

CASES: dict[str, list[str]] = {
    "no format": [],
    "nvfp4": ["nvfp4"],
    "the default three": ["fp8_tensor_e4m3", "mxfp8_e4m3", "nvfp4"],
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="medians of so many steps (9)")
    parser.add_argument("--threads", type=int, default=2, help="of torch and fpemu (2)")
    parser.add_argument("--cpu", action="store_true", help="processor time of one thread")
    args = parser.parse_args()
    if args.cpu:
        args.threads = 1
    clock = time.process_time if args.cpu else time.perf_counter
    torch.set_num_threads(args.threads)
    fpemu.set_num_threads(args.threads)

    shape = model.Shape(context=256)
    gpt = model.GPT(shape, torch.Generator().manual_seed(0))
    adamw = model.optimizer(gpt, model.Training())
    text = model.corpus()
    inputs, targets = model.windows(text.train, torch.arange(8) * 1000, shape.context)

    def step(monitor: fpemu.Monitor | None) -> float:
        start = clock()
        model.next_byte_loss(gpt, inputs, targets).backward()
        if monitor is not None:
            monitor.step()
        adamw.step()
        adamw.zero_grad()
        return clock() - start

    seconds: dict[str, list[float]] = {name: [] for name in ("none", *CASES)}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.rounds + 1):  # the first warms up and does not count
            taken = {"none": step(None)}
            for name, formats in CASES.items():
                path = Path(folder) / f"{name}.jsonl"
                with fpemu.Monitor(gpt, formats, every=1, path=path, exists="replace") as monitor:
                    taken[name] = step(monitor)
            for name, value in taken.items():
                seconds[name] += [value] if turn else []
    base = statistics.median(seconds["none"])
    print(f"step without a monitor: {1000 * base:.0f} ms")
    print(f"{'formats':<20} {'recorded step':>14} {'every=1':>9} {'every=10':>9} {'every=100':>10}")
    for name in CASES:
        # Paired by round; the best estimate of an excess on a machine that others use too.
        pairs = zip(seconds[name], seconds["none"], strict=True)
        excess = statistics.median(a - b for a, b in pairs)
        shares = [f"{100 * excess / base / n:.{n > 1:d}f} %" for n in (1, 10, 100)]
        print(f"{name:<20} {1000 * (base + excess):>11.0f} ms", end="")
        print(f" {'+' + shares[0]:>9} {'+' + shares[1]:>9} {'+' + shares[2]:>10}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
