"""The plan: regions, sizes, tile policy, ring and schedule. Pure functions, so thousands of cases.

Why the grid is enough: regions are checked against arithmetic written here, at the smallest and the
largest configurations and past 2^31 and 2^32 bytes. The schedule is a function of (blocks, lag,
tiles of L1, tiles of L2): every combination up to sizes past all its seams is compared with the
order written from its description, as is the kernel's own `tile_at`, which the interpreter
evaluates. From that order the ring's size follows: it must hold what is alive between a block's
first use and its last, plus what one unit of dispatch asks for at once.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers import make_config

from megamoe import MoEConfig
from megamoe.config import RECIPES, X_SCALES, model_shape
from megamoe.interpreter.dtypes import int32
from megamoe.interpreter.language import arange
from megamoe.interpreter.rebind import rebind
from megamoe.interpreter.values import Scalar
from megamoe.kernel.schedule import LINEAR1, tile_at
from megamoe.plan import (
    ALIGN,
    BLOCK_MS,
    ITEMSIZE,
    SHARED_BYTES,
    Plan,
    TilePolicy,
    lag_blocks,
    max_blocks,
    tile_policy,
)

MODEL_OPTIONS = {"capacity": 8192, "ranks": 8}


def models(**options) -> list[MoEConfig]:
    names = ("DeepSeek-V4-Flash", "DeepSeek-V4-Pro", "Qwen3-30B-A3B", "Mixtral-8x7B")
    return [
        model_shape(name).config(recipe=recipe, **(MODEL_OPTIONS | options))
        for name in names
        for recipe in RECIPES
    ]


CONFIGS = [
    make_config(capacity=1, topk=1, experts=1),
    make_config(("mxfp4", "token"), capacity=130, topk=32, ranks=4),
    make_config(("fp8_block", "block128"), hidden=16384, intermediate=14336, capacity=1 << 20),
    make_config(("bf16", "none"), experts=72, ranks=72, capacity=1 << 20, topk=32, hidden=16384),
    *models(),
]


def short(c: MoEConfig) -> str:
    return f"{c.recipe}-{c.hidden}x{c.intermediate}-{c.experts}over{c.ranks}-{c.capacity}"


# --- regions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=short)
@pytest.mark.parametrize("chain", [False, True])
def test_regions_are_aligned_and_do_not_overlap(config, chain):
    plan = Plan(config, chain=chain)
    end = 0
    for region in plan.regions:
        assert region.offset % ALIGN == 0 and region.offset >= end, region
        size = ITEMSIZE[region.dtype]
        for length in region.shape:
            size *= length
        assert region.nbytes == size
        end = region.offset + size
    assert plan.nbytes >= end and plan.nbytes % ALIGN == 0
    spec = plan.spec(plan.policy(config.capacity))
    for name, region in plan.region.items():
        assert getattr(spec.offset, name) == region.offset
    assert 2 * spec.offset.block_set == plan.region["arrived"].nbytes
    assert 2 * spec.offset.token_set == plan.region["token_arrivals"].nbytes


def test_sizes_past_32_bits_are_exact():
    config = MoEConfig(
        hidden=7168, intermediate=2048, experts=288, topk=8, ranks=72, capacity=65536, recipe="fp8"
    )
    plan = Plan(config)
    region = plan.region
    assert region["partials"].nbytes == 65536 * 8 * 7168 * 2 == 7_516_192_768
    assert region["x"].nbytes == 65536 * 7168
    # 72 ranks x 4 experts a rank, and every slot of a rank may name the same expert
    assert region["routes"].nbytes == 72 * 4 * 65536 * 8 * 4 == 603_979_776
    assert plan.nbytes > 2**32 > 2**31
    spec = plan.spec(plan.policy(65536))
    assert all(isinstance(offset, int) for offset in vars(spec.offset).values())
    assert spec.offset.routes - spec.offset.x_scale >= 65536 * 7168 // 32
    wide = Plan(MoEConfig(hidden=16384, intermediate=14336, experts=72, topk=32, ranks=72,
                          capacity=1 << 20, recipe="bf16"))  # fmt: skip
    assert wide.region["partials"].nbytes == 2**20 * 32 * 16384 * 2 == 2**40
    assert wide.nbytes > 2**40


@pytest.mark.parametrize("config", CONFIGS, ids=short)
def test_every_block_m_fits_the_regions(config):
    """Whatever the policy picks in a call, its rows, scales and counters have room."""
    plan = Plan(config)
    shapes = {name: r.shape for name, r in plan.region.items()}
    for block_m in BLOCK_MS if config.block_m is None else (config.block_m,):
        rows = plan.ring_blocks(block_m) * block_m
        assert rows <= shapes["pool_x"][0] and rows <= shapes["pool_weight"][0]
        assert max_blocks(config, block_m) <= shapes["arrived"][1] == shapes["l2_done"][1]
    assert shapes["token_arrivals"][1] >= config.capacity
    assert shapes["counts_ready"][0] >= config.ranks


def test_memory_of_known_models():
    """Decimal gigabytes of one rank's buffer, of which the partials are the most."""
    for recipe, flash, pro in (("fp8", 0.7, 1.8), ("mxfp4", 0.7, 1.8), ("bf16", 0.7, 1.8)):
        for name, limit in (("DeepSeek-V4-Flash", flash), ("DeepSeek-V4-Pro", pro)):
            plan = Plan(model_shape(name).config(recipe=recipe, **MODEL_OPTIONS))
            print(f"{name} {recipe}: {plan.nbytes / 1e9:.3f} GB")
            assert plan.nbytes < limit * 1e9


@pytest.mark.parametrize("ranks", range(1, 73))
def test_any_number_of_ranks(ranks):
    for capacity in (1, 130, 8192):
        plan = Plan(make_config(experts=ranks * 3, ranks=ranks, capacity=capacity, topk=4))
        assert plan.region["recv_counts"].shape == (2, ranks, 3)
        assert plan.region["routes"].shape == (ranks, 3, capacity * 4)
        spec = plan.spec(plan.policy(capacity))
        assert spec.rank_lanes >= ranks and spec.all_expert_lanes >= 3 * ranks
        assert spec.rank_lanes & (spec.rank_lanes - 1) == 0


# --- blocks ------------------------------------------------------------------------------------


def test_max_blocks_bounds_every_routing():
    """Random rows per expert, and the two extremes: one expert takes all, all share alike."""
    g = torch.Generator().manual_seed(3)
    for ranks, capacity, topk, per in itertools.product((1, 3), (1, 5, 40), (1, 4), (1, 7, 64)):
        config = make_config(experts=per * ranks, ranks=ranks, capacity=capacity, topk=topk)
        rows = ranks * capacity * topk
        share = rows // per
        routings = [[rows] + [0] * (per - 1), [share] * (per - 1) + [rows - share * (per - 1)]]
        for power in (0.2, 1.0, 4.0):
            weights = torch.rand(per, generator=g, dtype=torch.double) ** power
            picked = torch.multinomial(weights, rows, replacement=True, generator=g)
            routings.append(torch.bincount(picked, minlength=per).tolist())
        for block_m in BLOCK_MS:
            for routing in routings:
                needed = sum(-(-r // block_m) for r in routing)
                assert sum(routing) == rows and needed <= max_blocks(config, block_m)


def test_max_blocks_is_reached():
    """One row for each expert: no smaller bound would do."""
    config = make_config(experts=6, ranks=1, capacity=6, topk=1)
    assert max_blocks(config, 16) == 6


# --- schedule ----------------------------------------------------------------------------------


def order(blocks: int, lag: int, c1: int, c2: int) -> list[tuple[int, int, int]]:
    """(layer, block, tile) in order, from the description: L1 runs `lag` blocks ahead of L2."""
    first = min(lag, blocks)
    steps = [(1, b) for b in range(first)]
    for b in range(blocks):
        if first + b < blocks:
            steps.append((1, first + b))
        steps.append((2, b))
    return [(layer, b, t) for layer, b in steps for t in range(c1 if layer == 1 else c2)]


SCHEDULES = list(itertools.product((0, 1, 2, 3, 7, 20), (1, 2, 3, 9, 40), (1, 2, 8), (1, 3, 4)))


def test_order_is_complete_and_depends_only_on_the_past():
    for blocks, lag, c1, c2 in SCHEDULES:
        tiles = order(blocks, lag, c1, c2)
        wanted = [(1, b, t) for b in range(blocks) for t in range(c1)]
        wanted += [(2, b, t) for b in range(blocks) for t in range(c2)]
        assert sorted(tiles) == sorted(wanted)
        place = {tile: i for i, tile in enumerate(tiles)}
        for b in range(blocks):
            last_l1 = max(place[1, b, t] for t in range(c1))
            assert last_l1 < min(place[2, b, t] for t in range(c2))


@pytest.mark.parametrize("phases", ["fused", "linear1"])
def test_the_kernel_walks_that_order(phases):
    kernel = rebind(tile_at)
    for blocks, lag, c1, c2 in SCHEDULES:
        total = blocks * (c1 + c2)
        spec = SimpleNamespace(l1_tiles=c1, l2_tiles=c2, lag=lag, phases=phases)
        lanes = 1 << max(total - 1, 0).bit_length()
        found = kernel(arange(0, lanes), Scalar(blocks, int32), spec)
        columns = [torch.as_tensor(column.v).expand(lanes)[:total].tolist() for column in found]
        walked = list(zip(*columns, strict=True))
        # the launches of the chain do all of L1, then all of L2
        expected = order(blocks, blocks if phases == "linear1" else lag, c1, c2)
        kinds = {1: LINEAR1.value, 2: 1 - LINEAR1.value}
        assert walked == [(kinds[layer], b, t) for layer, b, t in expected], (blocks, lag, c1, c2)


def alive(tiles: list[tuple[int, int, int]]) -> int:
    """The most blocks at once between their first L1 tile and their last L2 tile."""
    last = {b: i for i, (layer, b, _) in enumerate(tiles) if layer == 2}
    most, live = 0, set()
    for i, (_, block, _) in enumerate(tiles):
        live.add(block)
        most = max(most, len(live))
        if last[block] == i:
            live.discard(block)
    return most


RING_CONFIGS = [
    make_config(form, hidden=hidden, intermediate=inter, experts=e, topk=4, capacity=c)
    for form in (("bf16", "none"), ("fp8", "token"), ("mxfp4", "token"))
    for hidden, inter in ((256, 128), (1024, 256), (4096, 2048), (7168, 3072))
    for e, c in ((8, 2), (64, 64), (256, 4096))
]


@pytest.mark.parametrize("block_m", BLOCK_MS)
def test_ring_holds_what_is_alive(block_m):
    """Also what one unit of dispatch waits for at once: `pull_rows` rows in as many blocks.

    Dispatch signals none of a unit's rows before all their slots are free. The slot of block b is
    freed by L2 of block b - ring, which comes after L1 of up to `lag` blocks more; were one of
    these in the same unit, everybody would wait.
    """
    for config, programs in itertools.product(RING_CONFIGS, (1, 2, 3, 7, 16, 33, 66, 132)):
        plan = Plan(config, programs=programs)
        policy = tile_policy(config, block_m)
        ring, most = plan.ring_blocks(block_m), max_blocks(config, block_m)
        if ring == most:
            continue  # every block of the largest call has a slot of its own
        spec = plan.spec(policy)
        assert spec.lag == lag_blocks(config, policy, programs) and spec.ring_blocks == ring
        for blocks in (ring + 1, 2 * ring + 1):
            tiles = order(blocks, spec.lag, spec.l1_tiles, spec.l2_tiles)
            assert alive(tiles) <= ring
        assert ring >= spec.lag + spec.pull_rows, (config, programs, ring, spec.lag)


def test_chain_has_no_ring():
    for config in RING_CONFIGS:
        for block_m in BLOCK_MS:
            assert Plan(config, chain=True).ring_blocks(block_m) == max_blocks(config, block_m)


# --- tile policy -------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_tile_policy_by_tokens_of_an_expert(recipe):
    config = make_config((recipe, X_SCALES[recipe][0]))
    edges = [(0, 16), (1, 16), (16, 16), (16.1, 32), (32, 32), (33, 64), (64, 64), (65, 128)]
    for tokens, block_m in [*edges, (128, 128), (129, 128), (1e6, 128)]:
        policy = tile_policy(config, tokens)
        assert policy.block_m == block_m
        assert policy.family == ("decode" if block_m <= 32 else "prefill")
        assert policy.math_partitions == (4 if block_m <= 32 else 2)
    for block_m in BLOCK_MS:
        fixed = make_config((recipe, X_SCALES[recipe][0]), block_m=block_m)
        assert {tile_policy(fixed, t).block_m for t in (0, 20, 1000)} == {block_m}


def test_policy_of_a_call_counts_live_tokens():
    """tokens x ranks x top-k / experts rows for an average expert."""
    plan = Plan(make_config(ranks=4, experts=16, topk=4, capacity=1024))
    assert [plan.policy(t).block_m for t in (0, 16, 17, 32, 33, 64, 65)] == [
        16, 16, 32, 32, 64, 64, 128
    ]  # fmt: skip


def policies() -> list[tuple[MoEConfig, TilePolicy]]:
    configs = [make_config((recipe, scales)) for recipe in RECIPES for scales in X_SCALES[recipe]]
    return [(c, tile_policy(c, b)) for c in configs for b in BLOCK_MS]


@pytest.mark.parametrize(("config", "policy"), policies(), ids=lambda v: getattr(v, "recipe", ""))
def test_registers_and_shared_memory_fit(config, policy):
    """setmaxnreg hands out what the launch has: 80 registers a thread in 24 warps, 128 in 16."""
    math = policy.math_partitions * policy.math_registers
    total = math + policy.dispatch_registers + policy.load_registers
    assert total == (480 if policy.family == "decode" else 512)
    for budget in (policy.math_registers, policy.dispatch_registers, policy.load_registers):
        assert budget % 8 == 0 and 24 <= budget <= 256
    spec = Plan(config).spec(policy)
    stage = spec.stage_bytes_w + spec.stage_bytes_x + 4 * spec.stage_scale_rows * spec.block_m
    assert policy.stages >= 2 and policy.stages * stage <= SHARED_BYTES == 232_448
    assert config.padded_hidden % policy.block_k == 0
    assert config.padded_intermediate % policy.block_k == 0
    assert config.padded_hidden % policy.block_n == 0
