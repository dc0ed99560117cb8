"""What the tests of the kernel share: layers, routings, calls on simulated ranks, checks."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

from megamoe import formats
from megamoe.config import MoEConfig
from megamoe.forward import MegaMoE
from megamoe.kernel.compat import gl, gluon
from megamoe.launch import FUSED
from megamoe.reference import BOUNDS, compare, moe_reference
from megamoe.symmetric import SymmetricBuffer
from megamoe.weights import CheckpointExperts, KernelWeights, pack_weights, quantise_experts

# (recipe, scales of x): all that a configuration may have
FORMATS = (
    ("bf16", "none"),
    ("fp8", "ue8m0_32"),
    ("fp8", "token"),
    ("fp8_block", "block128"),
    ("mxfp4", "ue8m0_32"),
    ("mxfp4", "token"),
)
SMALL = {"hidden": 256, "intermediate": 128, "experts": 8, "topk": 2}


def make_config(form: tuple[str, str] = ("fp8", "ue8m0_32"), **options: object) -> MoEConfig:
    """A small layer; `options` are fields of MoEConfig that differ from it."""
    recipe, x_scales = form
    return MoEConfig(**({"recipe": recipe, "x_scales": x_scales, "capacity": 8} | SMALL | options))


# --- layers ------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _checkpoint(recipe: str, shape: tuple[int, int, int], seed: int) -> CheckpointExperts:
    hidden, intermediate, experts = shape
    g = torch.Generator().manual_seed(seed)

    def matrices(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(experts, rows, columns, generator=g) / columns**0.5).bfloat16()

    bf16 = CheckpointExperts.from_per_expert(
        gate_proj=matrices(intermediate, hidden),
        up_proj=matrices(intermediate, hidden),
        down_proj=matrices(hidden, intermediate),
    )
    return quantise_experts(bf16, recipe)


@lru_cache(maxsize=256)
def _dequantised(recipe: str, shape: tuple[int, int, int], seed: int, expert: int) -> tuple:
    return tuple(m.double() for m in _checkpoint(recipe, shape, seed).dequantise(expert))


@lru_cache(maxsize=32)
def _packed(
    recipe: str, shape: tuple[int, int, int], seed: int, x_scales: str, ranks: int
) -> tuple[KernelWeights, ...]:
    hidden, intermediate, experts = shape
    config = MoEConfig(
        hidden=hidden, intermediate=intermediate, experts=experts, topk=1, capacity=1,
        recipe=recipe, x_scales=x_scales, ranks=ranks,
    )  # fmt: skip
    checkpoint = _checkpoint(recipe, shape, seed)
    return tuple(pack_weights(config, checkpoint, rank) for rank in range(ranks))


@dataclass(frozen=True)
class Layer:
    """Random experts for a configuration, made once for every configuration of that shape."""

    config: MoEConfig
    seed: int = 1

    @property
    def _key(self) -> tuple:
        c = self.config
        return c.recipe, (c.hidden, c.intermediate, c.experts), self.seed

    @property
    def checkpoint(self) -> CheckpointExperts:
        return _checkpoint(*self._key)

    def weights(self) -> list[KernelWeights]:
        packed = _packed(*self._key, self.config.x_scales, self.config.ranks)
        return [dataclasses.replace(w, config=self.config) for w in packed]

    def matrices(self, expert: int) -> tuple[torch.Tensor, ...]:
        return _dequantised(*self._key, expert)

    def model(self, **options: object) -> MegaMoE:
        """The layer on the interpreter; `options` go to MegaMoE (programs, seed)."""
        return MegaMoE(
            config=self.config, weights=self.weights(), **({"backend": "interpreter"} | options)
        )

    def expected(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The reference's y for dequantised x, all ranks together: float64 [tokens, hidden]."""
        return moe_reference(
            x=x,
            topk_idx=idx,
            topk_weights=weights,
            gate=lambda e: self.matrices(e)[0],
            up=lambda e: self.matrices(e)[1],
            down=lambda e: self.matrices(e)[2],
            clamp=self.config.clamp,
            l1_output="bf16" if self.config.recipe == "bf16" else "e4m3",
        )


def make_model(form: tuple[str, str] = ("fp8", "ue8m0_32"), **options: object) -> MegaMoE:
    """A model of :func:`make_config`; `programs` and `seed` go to MegaMoE."""
    run = {name: options.pop(name) for name in ("programs", "seed") if name in options}
    return Layer(make_config(form, **options)).model(**run)


# --- routings ----------------------------------------------------------------------------------

Routing = Callable[[MoEConfig, int, torch.Generator], torch.Tensor]


def distinct(config: MoEConfig, tokens: int, g: torch.Generator) -> torch.Tensor:
    """Every expert alike, no expert twice in a token while there are enough."""
    rows = [torch.randperm(config.experts, generator=g) for _ in range(tokens)]
    repeats = -(-config.topk // config.experts)
    rows = [r.repeat(repeats)[: config.topk] for r in rows]
    return torch.stack(rows) if rows else torch.zeros(0, config.topk, dtype=torch.int64)


def zipf(config: MoEConfig, tokens: int, g: torch.Generator) -> torch.Tensor:
    """Expert e in proportion to (e + 1)^-1.5; an expert may occur twice in a token."""
    share = torch.arange(1, config.experts + 1).double() ** -1.5
    if not tokens:
        return torch.zeros(0, config.topk, dtype=torch.int64)
    picked = torch.multinomial(share, tokens * config.topk, replacement=True, generator=g)
    return picked.reshape(tokens, config.topk)


def one_expert(config: MoEConfig, tokens: int, g: torch.Generator) -> torch.Tensor:
    return torch.full((tokens, config.topk), config.experts - 2, dtype=torch.int64)


def one_rank(config: MoEConfig, tokens: int, g: torch.Generator) -> torch.Tensor:
    """Every slot goes to an expert of the last rank."""
    per = config.experts_per_rank
    return torch.randint(config.experts - per, config.experts, (tokens, config.topk), generator=g)


def masked(config: MoEConfig, tokens: int, g: torch.Generator) -> torch.Tensor:
    """Half of the slots are -1."""
    idx = distinct(config, tokens, g)
    return torch.where(torch.rand(idx.shape, generator=g) < 0.5, -1, idx)


def repeated(config: MoEConfig, tokens: int, g: torch.Generator) -> torch.Tensor:
    """Each token names one expert in all its slots, or in every second one."""
    idx = distinct(config, tokens, g)
    idx[0::2] = idx[0::2, :1]
    idx[1::2, 0::2] = idx[1::2, :1]
    return idx


ROUTINGS: dict[str, Routing] = {
    f.__name__: f for f in (distinct, zipf, one_expert, one_rank, masked, repeated)
}


# --- calls -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Inputs of one call, a tensor a rank."""

    x: list[torch.Tensor]
    topk_idx: list[torch.Tensor]
    topk_weights: list[torch.Tensor]

    @property
    def arguments(self) -> dict[str, list[torch.Tensor]]:
        return {"x": self.x, "topk_idx": self.topk_idx, "topk_weights": self.topk_weights}

    def changed(self, **lists: list[torch.Tensor]) -> Call:
        return dataclasses.replace(self, **lists)

    def over(self, shares: Sequence[int]) -> Call:
        """The same tokens in order, dealt to the ranks anew."""
        return Call(*(list(torch.cat(v).split(list(shares))) for v in self.arguments.values()))


def make_call(
    config: MoEConfig,
    tokens: Sequence[int] | int,
    *,
    seed: int,
    routing: Routing | str = distinct,
    dtype: torch.dtype = torch.int32,
) -> Call:
    """Random tokens (`tokens` on each rank, or one figure for all) and router weights."""
    counts = [tokens] * config.ranks if isinstance(tokens, int) else list(tokens)
    routing = ROUTINGS[routing] if isinstance(routing, str) else routing
    print(f"inputs: seed {seed}, tokens {counts}, routing {routing.__name__}")
    g = torch.Generator().manual_seed(seed)
    return Call(
        x=[torch.randn(t, config.hidden, generator=g).bfloat16() for t in counts],
        topk_idx=[routing(config, t, g).to(dtype) for t in counts],
        topk_weights=[torch.rand(t, config.topk, generator=g) + 0.05 for t in counts],
    )


def same_bits(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Equal to the last bit on every rank, NaN included (bf16)."""
    pairs = zip(a, b, strict=True)
    return all(p.shape == q.shape and torch.equal(bits(p), bits(q)) for p, q in pairs)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


def check_call(moe: MegaMoE, layer: Layer, call: Call) -> list[torch.Tensor]:
    """Fused = chain to the bit, both near the reference, and the counts right; returns y."""
    y = moe(**call.arguments)
    assert moe.launches == [["moe_kernel[fused]"]] * layer.config.ranks
    idx = torch.cat([i.long() for i in call.topk_idx])
    counted = torch.bincount(idx[idx >= 0].flatten(), minlength=layer.config.experts)
    assert torch.equal(moe.tokens_per_expert.long(), counted)
    chain = moe.chain(**call.arguments)
    assert moe.launches == [CHAIN_LAUNCHES] * layer.config.ranks
    assert same_bits(y, chain), "fused and chain differ"
    check_reference(moe, layer, call, y)
    return y


CHAIN_LAUNCHES = [
    "communicate_kernel[dispatch]",
    "moe_kernel[linear1]",
    "activation_kernel[activation]",
    "moe_kernel[linear2]",
    "communicate_kernel[combine]",
]


def check_reference(moe: MegaMoE, layer: Layer, call: Call, y: Sequence[torch.Tensor]) -> None:
    """Within the recipe's bound of the reference on the same quantised inputs."""
    x = torch.cat([moe.dequantised_x(a) for a in call.x]).double()
    expected = layer.expected(x, torch.cat(call.topk_idx), torch.cat(call.topk_weights))
    found = compare(torch.cat(list(y)).double(), expected)
    print(f"  relative L2 {found.relative_l2:.5f}, worst row {found.worst_row_relative:.5f}")
    found.check(BOUNDS[layer.config.recipe])


@gluon.jit
def copy_words(source, target, count):
    """int32 words, by one program."""
    lanes: gl.constexpr = 1024
    i = gl.arange(0, lanes, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for start in range(0, count, lanes):
        inside = start + i < count
        gl.store(target + start + i, gl.load(source + start + i, mask=inside, other=0), mask=inside)


def run_back_to_back(moe: MegaMoE, calls: Sequence[Call]) -> list[list[torch.Tensor]]:
    """Fused calls that follow each other on every rank's stream, with nothing between the ranks.

    A launch on the rank's own stream sets the inputs of each call and another takes its result, so
    a rank may be a call ahead of its peers. Returns y of each call, by rank.
    """
    backend, ranks = moe._fused, range(moe.config.ranks)
    machine, plan = backend.machine, backend.plan
    begin, end = plan.region["topk_idx"].offset, plan.region["routes"].offset
    results = []
    for call in calls:
        inputs = moe._inputs(**call.arguments, x_scale=None)
        tokens = [i.x.shape[0] for i in inputs]
        for rank in ranks:
            staged = SymmetricBuffer.allocate(plan=plan)
            staged.write_inputs(inputs[rank])
            source = machine.register(rank, staged.memory[begin:end].clone(), name="staged inputs")
            target = machine.pointer(backend._buffer[rank], dtype="int32", offset=begin)
            _enqueue_copy(machine, rank, source, target, end - begin)
        with _only_enqueued(machine):
            backend.run(FUSED, [plan.policy(t) for t in tokens], tokens)
        taken = [torch.zeros_like(y) for y in backend.y]
        for rank in ranks:
            target = machine.register(rank, taken[rank].view(torch.int16), name="taken y")
            source, target = backend._y[rank], machine.pointer(target, dtype="int32")
            _enqueue_copy(machine, rank, source, target, taken[rank].nbytes)
        results.append([y[:t] for y, t in zip(taken, tokens, strict=True)])
    machine.run()
    moe.check()
    return results


def _enqueue_copy(machine, rank: int, source, target, nbytes: int) -> None:
    source = machine.pointer(source, dtype="int32")
    machine.enqueue(rank, copy_words, grid=1, args=[source, target, nbytes // 4])


@contextmanager
def _only_enqueued(machine) -> Iterator[None]:
    """What would run at once only waits in the queues of the ranks."""
    machine.run = lambda: None
    try:
        yield
    finally:
        del machine.run


def live_blocks(call: Call, config: MoEConfig, rank: int, block_m: int) -> int:
    """Pool blocks that `rank` needs for a call."""
    idx = torch.cat([i.long() for i in call.topk_idx])
    rows = torch.bincount(idx[idx >= 0].flatten(), minlength=config.experts)
    mine = rows[rank * config.experts_per_rank : (rank + 1) * config.experts_per_rank]
    return int(((mine + block_m - 1) // block_m).sum())


def wire(config: MoEConfig, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """bf16 x as a caller may pass it: (values, x_scale)."""
    return formats.quantise_x(x, x_scales=config.x_scales)


# --- covering designs --------------------------------------------------------------------------


def covering(
    values: dict[str, Sequence], *, seed: int, allowed: Callable[[dict], bool] = lambda case: True
) -> list[dict]:
    """Few cases in which every allowed pair of values of two fields occurs.

    Greedy: each case takes an uncovered pair and fills the other fields so that it covers most.
    """
    rng = random.Random(seed)
    names = list(values)
    open_pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in values[a]
        for y in values[b]
    }
    cases = []
    while open_pairs:
        best, gain = None, 0
        for _ in range(60):
            start = dict(rng.choice(sorted(open_pairs, key=repr)))
            case = {n: start.get(n, rng.choice(list(values[n]))) for n in names}
            if not allowed(case):
                continue
            covered = len(pairs_of(case) & open_pairs)
            if covered > gain:
                best, gain = case, covered
        if best is None:
            # what is left cannot be had: say so rather than stop in silence
            best = _any_case(open_pairs, values, allowed)
            if best is None:
                return cases
        cases.append(best)
        open_pairs -= pairs_of(best)
    return cases


def pairs_of(case: dict) -> set:
    return set(itertools.combinations(case.items(), 2))


def _any_case(open_pairs: set, values: dict, allowed: Callable[[dict], bool]) -> dict | None:
    for pair in sorted(open_pairs, key=repr):
        fixed = dict(pair)
        rest = [n for n in values if n not in fixed]
        for choice in itertools.product(*(values[n] for n in rest)):
            case = {n: fixed.get(n, dict(zip(rest, choice, strict=True)).get(n)) for n in values}
            if allowed(case):
                return case
    return None
