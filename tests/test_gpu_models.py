"""Layers of real models on one GPU, at the size that one of their ranks has.

Why the grid is enough. The shapes are those of five public models: hidden and intermediate sizes
with and without padding (2880), from 768 to 14336; 8 to 128 experts a rank; each recipe occurs.
Token counts go over every tile the policy picks, none at all, and calls in which the pool's ring
goes round many times (8192). Bits are compared with the chain in one fixed tile; eight tokens of
each call with a float32 reference computed here on the same weights.
"""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from gpu_helpers import ON_GPU, precompile, random_call, weights_for
from helpers import same_bits

from megamoe import MegaMoE, MoEConfig, diagnosis
from megamoe.bench.cases import random_weights
from megamoe.reference import BOUNDS, compare, moe_reference

pytestmark = ON_GPU

# per rank: hidden, intermediate, experts, topk, recipe
MODELS = {
    "DeepSeek-V4-Flash": (4096, 2048, 32, 6, "mxfp4"),
    "DeepSeek-V4-Pro": (7168, 3072, 48, 6, "fp8"),
    "Qwen3-30B-A3B": (2048, 768, 128, 8, "bf16"),
    "gpt-oss-120b": (2880, 2880, 32, 4, "mxfp4"),
    "Mixtral-8x7B": (4096, 14336, 8, 2, "fp8_block"),
}
TOKENS = (0, 1, 7, 64, 513, 2048, 8192)
CHECKED = 8  # tokens that are compared with the reference


def config_of(name, **options):
    hidden, intermediate, experts, topk, recipe = MODELS[name]
    return MoEConfig(
        hidden=hidden, intermediate=intermediate, experts=experts, topk=topk, recipe=recipe,
        capacity=max(TOKENS), **options,
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled():
    configs = [config_of(name) for name in MODELS]
    precompile(
        [(c, False, TOKENS) for c in configs]
        + [(replace(c, block_m=128), True, (1,)) for c in configs]
    )


def near_reference(moe, weights, call, y):
    config = moe.config
    picked = torch.linspace(0, len(y) - 1, min(CHECKED, len(y))).long().unique().to(y.device)

    @lru_cache(maxsize=1)
    def expert(index):
        return weights.dequantise(index)

    expected = moe_reference(
        x=moe.dequantised_x(call["x"][picked].contiguous()),
        topk_idx=call["topk_idx"][picked],
        topk_weights=call["topk_weights"][picked],
        gate=lambda e: expert(e)[0],
        up=lambda e: expert(e)[1],
        down=lambda e: expert(e)[2],
        l1_output="bf16" if config.recipe == "bf16" else "e4m3",
        dtype=torch.float32,
    )
    found = compare(y[picked], expected)
    print(f"  {len(y)} tokens: {found.relative_l2:.5f}, worst row {found.worst_row_relative:.5f}")
    found.check(BOUNDS[config.recipe])


@pytest.mark.parametrize("name", MODELS)
def test_model(name):
    config = config_of(name)
    weights = random_weights(config, rank=0, seed=7, device="cuda")
    moe = MegaMoE(config=config, weights=weights, backend="gluon")
    fixed = replace(config, block_m=128)
    chain = MegaMoE(config=fixed, weights=weights_for(weights, fixed), backend="gluon")
    chain._fused = None  # frees its buffer: only the chain of this one is used
    generator = torch.Generator(device="cuda").manual_seed(8)
    print(f"weights: seed 7, inputs: seed 8, {config}")
    for tokens in TOKENS:
        call = random_call(config, tokens, generator, masked=0.02)
        moe._fused.buffers[0].poison()
        moe._fused.y[0].fill_(float("nan"))
        y = moe(**call)
        moe.check()
        wanted = chain.chain(**call)
        assert same_bits([y], [wanted]), f"{tokens} tokens"
        diagnosis.check(chain._chain.buffers[0], rank=0)
        if tokens:
            near_reference(moe, weights, call, y)
    del moe, chain
    torch.cuda.empty_cache()
