"""Trials: one MoE layer through the fused kernel, the chain and the reference, compared."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from megamoe import formats
from megamoe.bench.cases import draw_experts
from megamoe.checkpoint import (
    KIND_OF_RECIPE,
    CheckpointExperts,
    WeightsError,
    quantise_experts,
)
from megamoe.config import MoEConfig
from megamoe.reference import BOUNDS, Bound, Comparison, compare, moe_reference
from megamoe.weights import pack_weights

ROUTINGS = ("uniform", "zipf", "one-expert")
RANDOM_TOKENS = 32
# Captured outputs come from an fp32 model; the kernel rounds L1's output, the partials and the
# result to bf16, by up to 2^-9 each.
CAPTURED_BOUND = Bound(1e-2, 4e-2, "the captured output was computed in fp32 throughout")


class TrialError(ValueError):
    """A trial that cannot be set up as asked."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One layer's inputs, a tensor per rank.

    x [t, H] bf16, topk_idx [t, k] int64, topk_weights [t, k] fp32. expected: the output
    [sum of t, H] captured from another implementation, if there is one.
    """

    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor]
    expected: torch.Tensor | None = None

    def call(self, *, device: str) -> dict[str, list[torch.Tensor]]:
        """The arguments of a forward."""
        given = {"x": self.x, "topk_idx": self.topk_idx, "topk_weights": self.topk_weights}
        return {name: [rank.to(device) for rank in ranks] for name, ranks in given.items()}

    def tokens_per_expert(self, experts: int) -> list[int]:
        ids = torch.cat([idx.flatten() for idx in self.topk_idx])
        return torch.bincount(ids[ids >= 0], minlength=experts).tolist()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer to try. experts are in the recipe's number format."""

    config: MoEConfig
    experts: CheckpointExperts
    inputs: Inputs
    layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at. passed: None where there is no bound, so nothing to fail."""

    name: str
    passed: bool | None
    say: str


@dataclass(kw_only=True)
class Outcome:
    """What one trial found. Errors and cosine are those against the reference (see `checks`)."""

    case: Case
    backend: str
    tokens_per_expert: list[int] = field(default_factory=list)
    launches: list[list[str]] = field(default_factory=list)
    chain_launches: list[list[str]] = field(default_factory=list)
    bit_equal_to_chain: bool | None = None
    relative_error: float | None = None
    cosine: float | None = None
    checks: list[Check] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not any(check.passed is False for check in self.checks)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """Runs `work` and files its seconds under `name`."""
        began = time.perf_counter()
        result = work()
        self.parts[name] = time.perf_counter() - began
        return result


# making inputs and weights


def random_experts(config: MoEConfig, *, seed: int) -> CheckpointExperts:
    """Random bf16 experts that keep the size of what they multiply; each is made when asked for."""
    wide, narrow = (config.intermediate, config.hidden), (config.hidden, config.intermediate)

    def matrices(projection: int, shape: tuple[int, int]) -> _Made:
        def make(expert: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + 3 * expert + projection)
            return (torch.randn(shape, generator=generator) * shape[1] ** -0.5).bfloat16()

        return _Made(config.experts, make)

    return CheckpointExperts.from_per_expert(
        gate_proj=matrices(0, wide), up_proj=matrices(1, wide), down_proj=matrices(2, narrow)
    )


class _Made:
    """A sequence of tensors that are made when asked for."""

    def __init__(self, count: int, make: Callable[[int], torch.Tensor]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._make(index)


def random_inputs(config: MoEConfig, *, tokens: int, routing: str, seed: int) -> Inputs:
    """`tokens` random tokens on every rank, whose top-k experts are chosen as `routing` says.

    uniform: every expert alike; zipf: expert e in proportion to 1 / (e + 1); one-expert: every slot
    takes expert 0.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = tokens * config.ranks
    x = torch.randn(rows, config.hidden, generator=generator).bfloat16()
    weights = torch.rand(rows, config.topk, generator=generator) + 0.1
    weights = weights / weights.sum(dim=1, keepdim=True)
    idx = _choose_experts(config, rows, routing, generator)
    split = [tokens] * config.ranks
    return Inputs(
        x=list(x.split(split)),
        topk_idx=list(idx.split(split)),
        topk_weights=list(weights.split(split)),
    )


def _choose_experts(
    config: MoEConfig, rows: int, routing: str, generator: torch.Generator
) -> torch.Tensor:
    if routing not in ROUTINGS:
        raise TrialError(f"routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")
    if routing == "one-expert":
        return torch.zeros(rows, config.topk, dtype=torch.int64)
    share = torch.ones(config.experts)
    if routing == "zipf":
        share = 1.0 / torch.arange(1, config.experts + 1)
    return draw_experts(share, rows=rows, topk=config.topk, generator=generator)


def captured_layers(path: Path) -> list[int]:
    """The layers a file of captured inputs holds, ascending."""
    with _opened(path) as file:
        names = (name.split(".") for name in file.keys())
        layers = sorted(int(name[1]) for name in names if name[0] == "layers" and len(name) == 3
                        and name[2] == "hidden_states")  # fmt: skip
    if not layers:
        raise TrialError(f"{path} holds no layers.N.hidden_states")
    return layers


def captured_inputs(path: Path, *, layer: int, ranks: int, tokens: int | None) -> Inputs:
    """Inputs of one layer as captured from a model; the rows are dealt to the ranks in order.

    tokens: rows per rank, None for all there are (the first ranks get one more where the rows do
    not divide evenly).
    """
    with _opened(path) as file:
        present = set(file.keys())

        def read(name: str, *, optional: bool = False) -> torch.Tensor | None:
            full = f"layers.{layer}.{name}"
            if full not in present:
                if optional:
                    return None
                raise TrialError(f"{path} holds no {full}")
            return file.get_tensor(full)

        x, idx, weights = read("hidden_states"), read("topk_indices"), read("topk_weights")
        expected = read("output", optional=True)
    split = _shares(len(x), ranks, tokens, path)
    used = sum(split)
    return Inputs(
        x=[part.contiguous() for part in x[:used].bfloat16().split(split)],
        topk_idx=[part.contiguous() for part in idx[:used].split(split)],
        topk_weights=[part.contiguous() for part in weights[:used].float().split(split)],
        expected=None if expected is None else expected[:used],
    )


def _shares(rows: int, ranks: int, tokens: int | None, path: Path) -> list[int]:
    if tokens is None:
        return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
    if tokens * ranks > rows:
        raise TrialError(
            f"{tokens} tokens on each of {ranks} ranks are {tokens * ranks}, and {path} has {rows}"
        )
    return [tokens] * ranks


def _opened(path: Path) -> Any:
    from safetensors import safe_open

    if not path.is_file():
        raise TrialError(f"{path} does not exist")
    return safe_open(str(path), framework="pt")


def model_topk(model_dir: Path) -> int:
    """Experts per token, from a checkpoint's config.json."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise TrialError(f"{path} is missing; it says how many experts a token takes")
    config = json.loads(path.read_text())
    for level in (config, config.get("text_config") or {}):
        for key in ("num_experts_per_tok", "experts_per_token", "moe_topk"):
            if level.get(key) is not None:
                return int(level[key])
    raise TrialError(f"{path} has no num_experts_per_tok")


def random_case(
    *,
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    topk: int,
    ranks: int,
    recipe: str,
    routing: str,
    seed: int,
    live_tokens: int | None = None,
) -> Case:
    """Random weights and tokens. tokens: the capacity per rank; live_tokens: those of the call."""
    config = MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        topk=topk,
        ranks=ranks,
        capacity=tokens,
        recipe=recipe,
    )
    live = _live_tokens(tokens if live_tokens is None else live_tokens)
    if live > tokens:
        raise TrialError(f"{live} tokens are more than the {tokens} per rank of the shape")
    return Case(
        config=config,
        experts=experts_for(recipe, random_experts(config, seed=seed)),
        inputs=random_inputs(config, tokens=live, routing=routing, seed=seed),
    )


def model_case(
    model_dir: Path,
    *,
    layer: int,
    ranks: int,
    recipe: str,
    routing: str,
    seed: int,
    inputs: Path | None = None,
    tokens: int | None = None,
) -> Case:
    """One layer of a checkpoint, with captured inputs or (inputs=None) random ones.

    tokens: per rank; by default all the captured rows, or `RANDOM_TOKENS` random ones.
    """
    experts = experts_for(recipe, CheckpointExperts.from_safetensors(model_dir, layer))
    captured = None
    if inputs is not None:
        captured = captured_inputs(inputs, layer=layer, ranks=ranks, tokens=tokens)
        live = max(len(x) for x in captured.x)
    else:
        live = RANDOM_TOKENS if tokens is None else _live_tokens(tokens)
    config = MoEConfig(
        hidden=experts.hidden,
        intermediate=experts.intermediate,
        experts=experts.experts,
        topk=model_topk(model_dir) if captured is None else captured.topk_idx[0].shape[1],
        ranks=ranks,
        capacity=max(1, live),
        recipe=recipe,
    )
    if captured is None:
        captured = random_inputs(config, tokens=live, routing=routing, seed=seed)
    return Case(config=config, experts=experts, inputs=captured, layer=layer)


def _live_tokens(tokens: int) -> int:
    if tokens < 0:
        raise TrialError(f"tokens must not be negative, got {tokens}")
    return tokens


def experts_for(recipe: str, checkpoint: CheckpointExperts) -> CheckpointExperts:
    """The checkpoint as the recipe needs it: bf16 is quantised, the recipe's own format kept."""
    if checkpoint.kind == "bf16":
        return quantise_experts(checkpoint, recipe)
    if checkpoint.kind != KIND_OF_RECIPE[recipe]:
        raise WeightsError(
            f"the checkpoint is {checkpoint.kind}, and recipe {recipe} needs "
            f"{KIND_OF_RECIPE[recipe]} or bf16 experts"
        )
    return checkpoint


# running


def run_case(
    case: Case,
    *,
    backend: str,
    programs: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda what: None,
) -> Outcome:
    """Runs one case and checks it; a failed check is reported in the outcome, not raised.

    backend "reference" runs the reference alone, which is then checked against the captured output.
    progress is called with the name of each step as it begins.
    """
    counts = case.inputs.tokens_per_expert(case.config.experts)
    outcome = Outcome(case=case, backend=backend, tokens_per_expert=counts)
    if backend != "reference":
        actual = _run_kernel(outcome, programs, seed, progress)
    progress("reference")
    expected = outcome.timed("reference", lambda: _reference(case))
    if backend == "reference":
        actual = expected
    else:
        _check_reference(outcome, actual, expected)
    _check_captured(outcome, actual)
    return outcome


def _run_kernel(
    outcome: Outcome, programs: int | None, seed: int, progress: Callable[[str], None]
) -> torch.Tensor:
    from megamoe import MegaMoE

    case = outcome.case
    config = case.config
    call = case.inputs.call(device="cuda" if outcome.backend == "gluon" else "cpu")
    progress("packing weights")
    weights = outcome.timed(
        "weights", lambda: [pack_weights(config, case.experts, rank=r) for r in range(config.ranks)]
    )
    moe = MegaMoE(
        config=config, weights=weights, backend=outcome.backend, programs=programs, seed=seed
    )
    progress("fused kernel")
    fused = outcome.timed("fused", lambda: _finished(moe, moe(**call)))
    outcome.launches = moe.launches
    outcome.tokens_per_expert = moe.tokens_per_expert.tolist()
    progress("chain")
    chain = outcome.timed("chain", lambda: _finished(moe, moe.chain(**call)))
    outcome.chain_launches = moe.launches
    _check_launches(outcome)
    _check_bits(outcome, fused, chain)
    _check_counts(outcome)
    return torch.cat(fused)


def _finished(moe: Any, y: list[torch.Tensor]) -> list[torch.Tensor]:
    """y on the CPU, once the device is done and has reported no fault."""
    moe.check()
    return [rank.cpu() for rank in y]


def _reference(case: Case) -> torch.Tensor:
    config, inputs = case.config, case.inputs

    @lru_cache(maxsize=1)
    def expert(index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return case.experts.dequantise(index)

    return moe_reference(
        x=_multiplied_x(config, torch.cat(inputs.x)),
        topk_idx=torch.cat(inputs.topk_idx),
        topk_weights=torch.cat(inputs.topk_weights),
        gate=lambda index: expert(index)[0],
        up=lambda index: expert(index)[1],
        down=lambda index: expert(index)[2],
        clamp=config.clamp,
        l1_output="bf16" if config.recipe == "bf16" else "e4m3",
        h_group=config.h_group,
    )


def _multiplied_x(config: MoEConfig, x: torch.Tensor) -> torch.Tensor:
    """What the kernel multiplies for bf16 rows x [t, H]: fp32, after the recipe's rounding."""
    values, scale = formats.quantise_x(x, x_scales=config.x_scales)
    return formats.dequantise_x(values, scale, x_scales=config.x_scales)


# checks


def _check_launches(outcome: Outcome) -> None:
    counts = [len(names) for names in outcome.launches]
    chain = [len(names) for names in outcome.chain_launches]
    names = ", ".join(sorted({name for rank in outcome.launches for name in rank}))
    ranks = outcome.case.config.ranks
    outcome.checks.append(
        Check(
            name="one launch",
            passed=counts == [1] * ranks,
            say=f"{names}: {_per_rank(counts)}; the chain: {_per_rank(chain)}",
        )
    )


def _per_rank(counts: list[int]) -> str:
    if len(set(counts)) > 1:
        return f"launches by rank {counts}"
    launches = "1 launch" if counts[0] == 1 else f"{counts[0]} launches"
    return launches if len(counts) == 1 else f"{launches} on each of {len(counts)} ranks"


def _check_bits(outcome: Outcome, fused: list[torch.Tensor], chain: list[torch.Tensor]) -> None:
    different = [
        rank for rank, (a, b) in enumerate(zip(fused, chain, strict=True)) if not torch.equal(a, b)
    ]
    outcome.bit_equal_to_chain = not different
    say = "bit for bit" if not different else f"differs on rank(s) {different}"
    outcome.checks.append(Check(name="fused = chain", passed=not different, say=say))


def _check_counts(outcome: Outcome) -> None:
    wanted = outcome.case.inputs.tokens_per_expert(outcome.case.config.experts)
    same = outcome.tokens_per_expert == wanted
    say = f"{sum(wanted)} (token, slot) pairs counted" if same else "counts differ from the routing"
    outcome.checks.append(Check(name="expert counts", passed=same, say=say))


def _check_reference(outcome: Outcome, actual: torch.Tensor, expected: torch.Tensor) -> None:
    found = _compare(outcome, "reference", actual, expected, BOUNDS[outcome.case.config.recipe])
    outcome.relative_error, outcome.cosine = found.relative_l2, found.cosine


def _check_captured(outcome: Outcome, actual: torch.Tensor) -> None:
    """Against a model's captured output: a check for bf16, what the format costs for others."""
    expected = outcome.case.inputs.expected
    if expected is None:
        return
    bound = CAPTURED_BOUND if outcome.case.config.recipe == "bf16" else None
    found = _compare(outcome, "captured output", actual, expected, bound)
    if outcome.relative_error is None:
        outcome.relative_error, outcome.cosine = found.relative_l2, found.cosine


def _compare(
    outcome: Outcome, name: str, actual: torch.Tensor, expected: torch.Tensor, bound: Bound | None
) -> Comparison:
    found = compare(actual, expected)
    say = f"relative L2 error {found.relative_l2:.2e}, cosine {found.cosine:.6f}"
    if bound is None:
        recipe = outcome.case.config.recipe
        check = Check(name=name, passed=None, say=f"{say}: what {recipe} costs")
    else:
        problems = found.problems(bound)
        detail = f" (bound {bound.relative_l2:.0e})" if not problems else ": " + "; ".join(problems)
        check = Check(name=name, passed=not problems, say=say + detail)
    outcome.checks.append(check)
    return found
