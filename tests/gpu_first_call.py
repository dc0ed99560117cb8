"""The first call after warm-up, in a process of its own: `python gpu_first_call.py RECIPE`.

TRITON_CACHE_DIR must name an empty folder. Prints JSON: seconds of the warm-up, how many kernels it
compiled, microseconds of the first and of later calls by the host's clock, and what the first call
compiled, loaded from the cache or wrote into it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from megamoe import MoEConfig
from megamoe.bench.cases import choose_experts, random_weights
from megamoe.distributed import SymmetricMoE
from megamoe.ranks.compile_lock import cache_directory

SHAPE = {"hidden": 2048, "intermediate": 1024, "experts": 16, "topk": 4, "capacity": 8192}
TOKENS = 256
LATER = 20
BUSY_CYCLES = 200_000_000  # a tenth of a second, after which the clocks are up


def main(recipe: str) -> dict[str, object]:
    from triton import knobs

    compiled: list[bool] = []  # whether each kernel came from the cache
    knobs.compilation.listener = lambda **event: compiled.append(event["cache_hit"])
    config = MoEConfig(recipe=recipe, **SHAPE)
    weights = random_weights(config, rank=0, seed=0, device="cuda:0")
    call = _call(config)
    if _cached():
        raise RuntimeError(f"the cache {cache_directory()} is not empty")
    with SymmetricMoE(config=config, device=0) as moe:
        moe.setup()
        begin = time.perf_counter()
        moe.warmup(weights)
        warmup_s = time.perf_counter() - begin
        in_warmup, compiled[:] = list(compiled), []
        files = _cached()
        # as in a running program torch has a free block for y
        torch.empty(TOKENS, config.hidden, dtype=torch.bfloat16, device="cuda:0")
        first = _microseconds(lambda: moe.forward(weights=weights, **call))
        in_first, new_files = list(compiled), sorted(_cached() - files)
        later = [_microseconds(lambda: moe.forward(weights=weights, **call)) for _ in range(LATER)]
        moe.check()
    return {
        "warmup_s": warmup_s,
        "compiled": in_warmup.count(False),
        "first_us": first,
        "later_us": later,
        "compiled_in_first": in_first,
        "cached_in_first": new_files,
    }


def _call(config: MoEConfig) -> dict[str, torch.Tensor]:
    g = torch.Generator(device="cuda:0").manual_seed(1)
    idx = choose_experts(config, tokens=TOKENS, routing="balanced", seed=0)[0]
    return {
        "x": torch.randn(TOKENS, config.hidden, generator=g, device="cuda:0").bfloat16(),
        "topk_idx": idx.to("cuda:0"),
        "topk_weights": torch.rand(TOKENS, config.topk, generator=g, device="cuda:0"),
    }


def _cached() -> set[str]:
    return {str(path) for path in cache_directory().rglob("*") if path.is_file()}


def _microseconds(work: Callable[[], object]) -> float:
    """Of a call by itself: the GPU's clocks are up, and the host has waited."""
    torch.cuda._sleep(BUSY_CYCLES)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
