"""What the tests on GPUs share: marks, calls on the device, and compiling many kernels at once."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
from helpers import Call

from megamoe.config import MoEConfig
from megamoe.kernel import compat
from megamoe.launch import CHAIN, FUSED, Launch, compile_launch, fixed_arguments
from megamoe.plan import Plan, TilePolicy
from megamoe.symmetric import SymmetricBuffer
from megamoe.weights import KernelWeights

WORKERS = min(16, max(1, (os.cpu_count() or 2) // 2))


def why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    if compat.TRITON_VERSION is None:
        return "Triton is missing or hidden"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"the kernel needs compute capability 9.0, this GPU has {capability}"
    return None


REASON = why_no_gpu()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def on_device(call: Call, device: str = "cuda") -> dict[str, list[torch.Tensor]]:
    """The arguments of MegaMoE on the GPU."""
    return {name: [t.to(device) for t in ts] for name, ts in call.arguments.items()}


def weights_for(weights: KernelWeights, config: MoEConfig) -> KernelWeights:
    """The same tensors for a configuration that differs in nothing that weights depend on."""
    return replace(weights, config=config)


def random_call(
    config: MoEConfig, tokens: int, generator: torch.Generator, *, masked: float = 0.1
) -> dict[str, torch.Tensor]:
    """One rank's inputs, made on the GPU: any expert in any slot, a tenth of the slots skipped."""
    device = generator.device
    shape = (tokens, config.topk)
    idx = torch.randint(0, config.experts, shape, generator=generator, device=device)
    skip = torch.rand(shape, generator=generator, device=device) < masked
    x = torch.randn(tokens, config.hidden, generator=generator, device=device).bfloat16()
    return {
        "x": x,
        "topk_idx": idx.masked_fill(skip, -1),
        "topk_weights": torch.rand(shape, generator=generator, device=device) + 0.05,
    }


# --- compiling ---------------------------------------------------------------------------------

# (configuration, whether the chain is wanted, token counts)
Job = tuple[MoEConfig, bool, tuple[int, ...]]


def precompile(jobs: Sequence[Job], *, programs: int | None = None) -> None:
    """Compile what the tests of a file launch; see :func:`compile_ahead`."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    work = []
    for config, chain, tokens in jobs:
        grid = programs or max(1, (sms - config.reserve_sms) // config.ranks)
        plan = Plan(config, programs=grid, chain=chain)
        policies = dict.fromkeys(plan.policy(n) for n in tokens)
        launches = CHAIN if chain else FUSED
        work += [(plan, policy, launch) for policy in policies for launch in launches]
    compile_ahead(work)


def compile_ahead(work: Sequence[tuple[Plan, TilePolicy, Launch]]) -> None:
    """Fill Triton's cache, several processes at a time.

    Only saves time: whatever is not in the cache is compiled when it is launched.
    """
    begin = time.monotonic()
    work = list(dict.fromkeys(work))
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        for problem in pool.map(_compile, work):
            if problem:
                print(f"not compiled ahead: {problem}")
    print(f"compiled {len(work)} kernels in {time.monotonic() - begin:.1f} s")


def _compile(work: tuple) -> str | None:
    from megamoe.weights import _allocate

    plan, policy, launch = work
    try:
        torch.cuda.init()
        # the kernel depends on types and alignment only: no memory is needed
        buffer = SymmetricBuffer.allocate(plan=plan, device="meta")
        peers = torch.empty(plan.config.ranks, dtype=torch.int64, device="meta")
        y = torch.empty(8, dtype=torch.bfloat16, device="meta")
        spec = plan.spec(policy, launch.phases)
        weights = _allocate(plan.config, 0, "meta").tensors
        head, peers, *rest = fixed_arguments(spec, buffer, peers, weights)
        compile_launch(launch, [head, peers, 0, 0, y, *rest, spec], plan.programs)
    except Exception as error:
        return f"{launch.phases} of {plan.config.recipe}: {type(error).__name__}: {error}"
    return None
