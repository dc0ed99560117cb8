"""One small call on one GPU, for tools that watch a process: `python gpu_small_call.py RECIPE`.

Prints the seconds of compilation and a digest of the result's bytes. Four experts get 37 tokens in
blocks of 16, some of them part full, and eight programs have several tiles each: the fused kernel
does all that it does in a large call, with little enough work for a tool that makes each access a
hundred times slower.
"""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import replace

import torch
from helpers import Call, Layer, make_call

from megamoe import MegaMoE, MoEConfig, plan
from megamoe.launch import FUSED, InterpreterBackend

RECIPES = ("fp8", "mxfp4")
TOKENS = 37
PROGRAMS = 8
SEED = 23
FEW_STAGES = 2  # of a ring: each is used many times over


def layer_of(recipe: str) -> Layer:
    """timeout_s: of the waits in the kernel, which are slow when they are watched."""
    shape = {"hidden": 256, "intermediate": 256, "experts": 4, "topk": 2, "capacity": TOKENS}
    return Layer(MoEConfig(recipe=recipe, block_m=16, timeout_s=60.0, **shape))


def call_of(layer: Layer) -> Call:
    return make_call(layer.config, TOKENS, seed=SEED)


def result(recipe: str, *, backend: str = "gluon") -> torch.Tensor:
    """y bf16 [37, 256], on the CPU; prints how long the compilation took."""
    layer = layer_of(recipe)
    call = call_of(layer)
    moe = MegaMoE(config=layer.config, weights=layer.weights(), backend=backend, programs=PROGRAMS)
    if not isinstance(moe._fused, InterpreterBackend):
        begin = time.monotonic()
        moe._fused._compile(FUSED[0], moe.plan.spec(moe.plan.policy(TOKENS)))
        print(f"compiled in {time.monotonic() - begin:.1f} s", flush=True)
    device = "cuda" if backend == "gluon" else "cpu"
    (y,) = moe(**{name: [t.to(device) for t in ts] for name, ts in call.arguments.items()})
    moe.check()
    return y.cpu()


def digest(y: torch.Tensor) -> str:
    return hashlib.sha256(y.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()


def prepare_for_instrumented_kernels() -> None:
    """A kernel that Triton's concurrency sanitizer watches keeps its notes in global memory."""
    import triton

    if triton.knobs.compilation.instrumentation_mode:
        print(f"instrumented: {triton.knobs.compilation.instrumentation_mode}", flush=True)
        make_rings_short()
        triton.set_allocator(
            lambda size, alignment, stream: torch.zeros(size, dtype=torch.int8, device="cuda")
        )


def make_rings_short() -> None:
    """What the concurrency sanitizer adds to a kernel grows with the number of its buffers, beyond
    what the assembler can take in the kernel of MXFP4.
    """
    policy_of = plan.tile_policy

    def short(config: MoEConfig, tokens_per_expert: float, *, chain: bool) -> plan.TilePolicy:
        policy = policy_of(config, tokens_per_expert, chain=chain)
        return replace(policy, stages=FEW_STAGES, packed_stages=FEW_STAGES, in_flight=FEW_STAGES)

    plan.tile_policy = short


if __name__ == "__main__":
    prepare_for_instrumented_kernels()
    print(f"digest {digest(result(sys.argv[1]))}", flush=True)
