"""Which tile is the fastest for how many rows an expert: measured on one GPU.

    python benchmarks/search_tiles.py --shape flash --recipes mxfp4,fp8 --json benchmarks/tiles.json

Every tile is forced on the same calls, one after another: cold L2, balanced routing, inputs in the
buffer, medians. The policy in `megamoe.plan` (TILES) is read off this table by hand; it depends on
the rows of an average expert alone.
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

import torch

from megamoe.bench.cases import choose_experts, random_inputs, random_weights, shape_fields
from megamoe.bench.run import machine, require_gpus
from megamoe.bench.timing import DEVICE, Alone, LocalEngine, Timer
from megamoe.config import MoEConfig
from megamoe.plan import BLOCK_MS

ROWS = (4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 192, 256)  # an expert
SAMPLES = 10


def times_of(config: MoEConfig, weights: object, rows: tuple[int, ...]) -> dict[int, float]:
    """Microseconds of the fused call for each number of rows an expert, with config.block_m."""
    engine = LocalEngine(config=config, weights=replace(weights, config=config), chain=False)
    timer = Timer(Alone(), samples=SAMPLES)
    found = {}
    for count in rows:
        tokens = count * config.experts // config.topk
        idx = choose_experts(config, tokens=tokens, routing="balanced", seed=count)[0]
        engine.write(random_inputs(config, idx=idx, seed=count, device=DEVICE))
        engine.fused(tokens)
        engine.check()
        found[count] = median(timer.measure(lambda i, n=tokens: engine.fused(n)))
    engine.close()
    return found


def search(shape: str, recipe: str, rows: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """For each tile the times of :func:`times_of`."""
    fields = shape_fields(shape, ranks=1)
    capacity = max(rows) * fields["experts"] // fields["topk"]
    config = MoEConfig(**fields, recipe=recipe, capacity=capacity)
    weights = random_weights(config, rank=0, seed=0, device=DEVICE)
    table = {}
    for block_m in BLOCK_MS:
        table[block_m] = times_of(replace(config, block_m=block_m), weights, rows)
        gc.collect()
        torch.cuda.empty_cache()
    print(f"{shape}, {recipe}: us by rows an expert")
    print("block_m " + "".join(f"{n:>8}" for n in rows))
    for block_m, times in table.items():
        best = [times[n] == min(t[n] for t in table.values()) for n in rows]
        marks = ("*" if b else " " for b in best)
        cells = (f"{times[n]:7.0f}{mark}" for n, mark in zip(rows, marks, strict=True))
        print(f"{block_m:>7} " + "".join(cells))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", nargs="+", default=["flash"])
    parser.add_argument("--recipes", default="mxfp4,fp8,fp8_block,bf16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    require_gpus(1)
    found = {
        f"{shape} {recipe}": search(shape, recipe, ROWS)
        for shape in arguments.shape
        for recipe in arguments.recipes.split(",")
    }
    if arguments.json is not None:
        report = {"date": date.today().isoformat(), "machine": machine(), "us": found}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
