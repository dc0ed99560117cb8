"""One call made to be recorded, on a GPU or on the interpreter with simulated time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from megamoe.bench.cases import (
    BenchError,
    choose_experts,
    random_inputs,
    random_weights,
    shape_fields,
)
from megamoe.config import MoEConfig, RankInputs
from megamoe.forward import choose_backend, default_programs
from megamoe.kernel import combine
from megamoe.launch import GluonBackend, InterpreterBackend
from megamoe.plan import MATH_PARTITIONS, Plan, ceil_div
from megamoe.timeline.events import Timeline, record

DEFAULT_SHAPE = {"gluon": "flash", "interpreter": "512,256,8,4"}
GPU_CALLS = 3  # the last one is recorded: the first ones compile, and fill the caches
INTERPRETER_WEIGHTS = 64 << 20  # more bytes than this take minutes


@dataclass(frozen=True, kw_only=True)
class TimelineTrial:
    """A call that is ready to be recorded."""

    title: str
    backend: GluonBackend | InterpreterBackend
    inputs: list[RankInputs]

    def record(self) -> Timeline:
        calls = GPU_CALLS if self.backend.name == "gluon" else 1
        return record(self.backend, self.inputs, calls=calls)


def make(
    *,
    backend: str = "auto",
    shape: str | None = None,
    tokens: int,
    ranks: int,
    recipe: str,
    routing: str = "balanced",
    programs: int | None = None,
    events: int | None = None,
    seed: int = 0,
) -> TimelineTrial:
    """Random weights and inputs for `tokens` tokens on each of `ranks` ranks of this process.

    shape: see :func:`~megamoe.bench.cases.shape_fields`; None for one that suits the backend.
    events: places for events of each role of a program; None for as many as the call needs.
    Raises BenchError, MegaMoEConfigError, or RuntimeError for a backend that cannot run here.
    """
    if events is not None and events < 1:
        raise BenchError(f"events must be at least 1, got {events}")
    if tokens < 1:
        raise BenchError(f"tokens must be at least 1, got {tokens}")

    def config_of(name: str) -> MoEConfig:
        fields = shape_fields(name, ranks=ranks)
        return MoEConfig(**fields, ranks=ranks, capacity=tokens, recipe=recipe)

    try:
        chosen = choose_backend(backend, config_of(shape or DEFAULT_SHAPE["gluon"]))
    except RuntimeError as error:
        raise BenchError(str(error)) from None
    name = shape or DEFAULT_SHAPE[chosen]
    config = config_of(name)
    on_cpu = chosen == "interpreter"
    if on_cpu and _weight_bytes(config) > INTERPRETER_WEIGHTS:
        raise BenchError(
            f"shape {name} has {_weight_bytes(config) >> 20} MiB of weights a rank, too many for "
            f"the interpreter (at most {INTERPRETER_WEIGHTS >> 20} MiB): give a smaller --shape, "
            f"such as {DEFAULT_SHAPE['interpreter']}"
        )
    device = "cpu" if on_cpu else torch.device("cuda", torch.cuda.current_device())
    weights = [random_weights(config, rank=r, seed=seed, device=device) for r in range(ranks)]
    idx = choose_experts(config, tokens=tokens, routing=routing, seed=seed)
    inputs = [
        random_inputs(config, idx=idx[r], seed=seed * 1009 + r, device=device) for r in range(ranks)
    ]
    plan = Plan(config, programs=programs or default_programs(chosen, config))
    plan = replace(plan, trace=events or places_for(plan, idx))
    title = f"{name}, {recipe}, {tokens} tokens a rank, {routing} routing, {ranks} rank(s), " + (
        "interpreter, simulated time" if on_cpu else torch.cuda.get_device_name(device)
    )
    if on_cpu:
        return TimelineTrial(title=title, backend=_interpreter(plan, weights, seed), inputs=inputs)
    return TimelineTrial(
        title=title,
        backend=GluonBackend(plan=plan, weights=weights, device=device),
        inputs=inputs,
    )


def places_for(plan: Plan, idx: torch.Tensor) -> int:
    """Places for events with which no role of any program loses one, and one to spare, whose use
    would show that more were recorded.

    idx: the call's routing, int [ranks, tokens, topk], -1 for a masked slot.
    """
    config, tokens = plan.config, idx.shape[1]
    spec = plan.spec(plan.policy(tokens))
    counts = torch.bincount(idx[idx >= 0].flatten().long(), minlength=config.experts)
    rows = counts.view(config.ranks, config.experts_per_rank)
    blocks = int(((rows + spec.block_m - 1) // spec.block_m).sum(dim=1).max())
    tasks = ceil_div(blocks * (spec.l1_tiles + spec.l2_tiles), plan.programs) + spec.rehearses
    pulls = ceil_div(ceil_div(int(rows.sum(dim=1).max()), spec.pull_rows), plan.programs)
    # a long call: one role may take all claims of its program's tokens
    shares = ceil_div(config.padded_hidden, combine.COLUMNS.value * combine.STEPS.value)
    combined = ceil_div(tokens, plan.programs * combine.TOKENS.value) * shares
    if tokens < plan.programs * combine.TOKENS.value:
        # shared by the math partitions and communicate of all programs
        units = ceil_div(tokens, combine.TOKENS.value)
        units *= config.padded_hidden // combine.COLUMNS.value
        combined = ceil_div(units, plan.programs * (MATH_PARTITIONS + 1))
    # route and wait for counts come before the pulls, and the first expert is always unpacked
    unpacked = config.experts_per_rank if spec.unpacks else 0
    return max(tasks, 2 + pulls + unpacked) + combined + 1


def _weight_bytes(config: MoEConfig) -> int:
    matrix = 3 * config.padded_hidden * config.padded_intermediate
    return config.experts_per_rank * matrix * config.weight_bits // 8


def _interpreter(plan: Plan, weights: list, seed: int) -> InterpreterBackend:
    from megamoe.interpreter.cost import H200

    backend = InterpreterBackend(plan=plan, weights=weights, seed=seed)
    backend.machine.cost = H200
    return backend
