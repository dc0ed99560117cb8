"""The plan: regions, sizes, tile policy, ring and schedule. Pure functions, so thousands of cases.

Why the grid is enough: regions are checked against arithmetic written here, at the smallest and the
largest configurations and past 2^31 and 2^32 bytes. The schedule is a function of (rows of each
expert, lag, tiles of L1, tiles of L2, programs): combinations up to sizes past all its seams are
walked by the kernel's own schedule role, which the interpreter evaluates, and compared with shares
dealt from the order that is written here from its description; no combination deadlocks. From that
order the ring's size follows: it must hold what is alive between a block's first use and its last,
plus what one unit of dispatch asks for at once.
"""

import itertools
from collections import Counter
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import make_config
from schedule_walk import KINDS, WALKS, blocks_of, order, right_shares, walk

import megamoe.plan
from megamoe import MoEConfig
from megamoe.config import RECIPES, X_SCALES, MegaMoEConfigError, model_shape
from megamoe.interpreter.dtypes import int32
from megamoe.interpreter.rebind import rebind
from megamoe.interpreter.values import Scalar
from megamoe.kernel.schedule import place_of_l1, place_of_l2, schedule_role
from megamoe.plan import (
    ALIGN,
    BLOCK_MS,
    HALF_N,
    ITEMSIZE,
    MATH_PARTITIONS,
    SHARED_BYTES,
    TILES,
    UNPACK_ROWS,
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


def test_places_are_those_of_that_order():
    l1, l2 = rebind(place_of_l1), rebind(place_of_l2)
    for blocks, lag, c1, c2 in SCHEDULES:
        spec = SimpleNamespace(l1_tiles=c1, l2_tiles=c2)
        lag, count = (Scalar(n, int32) for n in (min(lag, blocks), blocks))
        for place, (layer, b, t) in enumerate(order(blocks, int(lag), c1, c2)):
            if layer == 1:
                found = l1(Scalar(b * c1 + t, int32), lag, spec)
            else:
                found = l2(Scalar(b * c2 + t, int32), lag, count, spec)
            assert int(found) == place, (blocks, int(lag), c1, c2, layer, b, t)


@pytest.mark.parametrize("phases", ["fused", "linear1", "linear2"])
def test_programs_walk_that_order(phases):
    for case in WALKS:
        assert walk(schedule_role, case, phases) == right_shares(case, phases), case


def test_programs_have_equal_shares():
    """Every tile is somebody's; nobody has two more than another, of L1, of L2, of both."""
    for case in WALKS:
        rows, lag, c1, c2, programs = case
        shares = walk(schedule_role, case)
        blocks = len(blocks_of(rows))
        once = [(KINDS[layer], b, t) for layer, b, t in order(blocks, lag, c1, c2)]
        assert sorted(task[:3] for share in shares for task in share) == sorted(once)
        counts = [Counter(task[0] for task in share) for share in shares]
        l1, l2 = ([count[KINDS[layer]] for count in counts] for layer in (1, 2))
        for numbers in (l1, l2, [a + b for a, b in zip(l1, l2, strict=True)]):
            assert max(numbers) - min(numbers) <= 1, case
        # as few programs as can be have one more of both
        more = [(a > blocks * c1 // programs) + (b > blocks * c2 // programs)
                for a, b in zip(l1, l2, strict=True)]  # fmt: skip
        extras = blocks * c1 % programs + blocks * c2 % programs
        assert more.count(2) == max(0, extras - programs), case


def test_programs_never_wait_for_each_other_in_a_circle():
    """Each walks its share in order. A tile of L2 waits for the L1 tiles of its block, one of L1
    for a slot: `lag` + 1 blocks are what the order itself keeps alive.
    """
    for case in WALKS:
        _, lag, c1, c2, programs = case
        shares = walk(schedule_role, case)
        done: Counter[tuple[int, int]] = Counter()
        next_of = [0] * programs
        moved = True
        while moved:
            moved = False
            for program, share in enumerate(shares):
                while next_of[program] < len(share):
                    kind, block = share[next_of[program]][:2]
                    if kind == KINDS[2]:
                        free = done[KINDS[1], block] == c1
                    else:
                        free = block <= lag or done[KINDS[2], block - lag - 1] == c2
                    if not free:
                        break
                    done[kind, block] += 1
                    next_of[program] += 1
                    moved = True
        assert next_of == [len(share) for share in shares], case


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
        assert spec.lag == lag_blocks(config, programs) and spec.ring_blocks == ring
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
    bounds, tiles = zip(*TILES, strict=True)
    assert bounds[-1] == float("inf") and list(bounds) == sorted(bounds)
    assert list(tiles) == sorted(tiles) and set(tiles) <= set(BLOCK_MS)
    edges = [(0, tiles[0]), (1, tiles[0]), (1e6, tiles[-1])]
    for bound, block_m, wider in zip(bounds[:-1], tiles, tiles[1:], strict=False):
        edges += [(bound, block_m), (bound + 0.1, wider)]
    for tokens, block_m in edges:
        policy = tile_policy(config, tokens)
        assert policy.block_m == block_m
        assert policy.family == ("decode" if block_m <= 32 else "prefill")
        unpacks = recipe == "mxfp4" and tokens > UNPACK_ROWS
        assert policy.unpacks == unpacks
        two = tokens > 128 and recipe in ("fp8", "bf16") or unpacks
        assert policy.block_n == (256 if two else 128) and HALF_N == 64 * MATH_PARTITIONS == 128
        long = block_m <= (64 if recipe == "mxfp4" else 32)
        assert policy.block_k == (64 if recipe == "bf16" else 256 if long else 128)
        assert policy.expanders == (recipe == "mxfp4" and block_m == 128 and not unpacks)
        chain = tile_policy(config, tokens, chain=True)
        assert not chain.unpacks and (chain == policy or unpacks)
    for block_m in BLOCK_MS:
        fixed = make_config((recipe, X_SCALES[recipe][0]), block_m=block_m)
        assert {tile_policy(fixed, t).block_m for t in (0, 20, 1000)} == {block_m}


def test_memory_for_unpacked_weights():
    """All experts of a rank in a byte a weight, where the longest call unpacks."""
    shape = {"experts": 6, "ranks": 2, "topk": 1, "hidden": 512, "intermediate": 256}
    most = UNPACK_ROWS * 3
    for form, capacity, wanted in (
        (("mxfp4", "token"), most, 0),
        (("mxfp4", "token"), most + 1, 3 * 3 * 512 * 256),
        (("fp8", "token"), most + 1, 0),
    ):
        config = make_config(form, capacity=capacity, **shape)
        plan, chain = Plan(config), Plan(config, chain=True)
        assert plan.unpacked_bytes == wanted and chain.unpacked_bytes == 0
        assert plan.region["unpacked"].shape == (2, 3 if wanted else 0)
        spec = plan.spec(plan.policy(capacity))
        assert spec.unpacks == (wanted > 0)
        assert spec.offset.unpacked_set == (12 if wanted else 0)
        # also in the kernels of shorter calls, which clear what the longer ones count
        assert plan.spec(plan.policy(1)).offset.unpacked_set == spec.offset.unpacked_set


def test_policy_of_a_call_counts_live_tokens():
    """tokens x ranks x top-k / experts rows for an average expert."""
    config = make_config(ranks=4, experts=16, topk=4, capacity=1024)
    for tokens in range(300):
        assert Plan(config).policy(tokens) == tile_policy(config, tokens)
    half = make_config(ranks=4, experts=16, topk=2, capacity=1024)
    for tokens in range(300):
        assert Plan(half).policy(tokens) == tile_policy(half, tokens / 2)


def policies() -> list[tuple[MoEConfig, TilePolicy]]:
    configs = [make_config((recipe, scales)) for recipe in RECIPES for scales in X_SCALES[recipe]]
    return [(c, tile_policy(c, rows)) for c in configs for rows, _ in TILES]


@pytest.mark.parametrize(("config", "policy"), policies(), ids=lambda v: getattr(v, "recipe", ""))
def test_registers_fit(config, policy):
    """setmaxnreg hands out what the launch has: 65,536 over the warps, in eights, rounded down.

    The warps are whole warpgroups: math, communicate, expand, and one of the four single warps.
    """
    p = policy
    groups = MATH_PARTITIONS + 1 + p.expanders + 1
    launched = 65536 // (128 * groups) // 8 * 8
    assert launched == {4: 128, 5: 96}[groups]
    total = MATH_PARTITIONS * p.math_registers + p.dispatch_registers
    total += p.expanders * p.expand_registers + p.load_registers
    assert total <= launched * groups
    budgets = [p.math_registers, p.dispatch_registers, p.load_registers]
    for budget in budgets + [p.expand_registers] * (p.expanders > 0):
        assert budget % 8 == 0 and 24 <= budget <= 256


@pytest.mark.parametrize(("config", "policy"), policies(), ids=lambda v: getattr(v, "recipe", ""))
def test_shared_memory_fits(config, policy):
    """Operands of WGMMA in stages, with scales of tokens; fp8_block and MXFP4 have a word for each
    weight row and 128 of K too; MXFP4 lands as half a byte a weight, in wide tiles in stages of its
    own beside those of what it is expanded to, unpacked by dispatch as FP8.
    """
    p, spec = policy, Plan(config).spec(policy)
    size = 2 if config.recipe == "bf16" else 1
    weights = p.block_n * p.block_k * size
    codes = config.recipe == "mxfp4" and not p.unpacks
    if codes and not p.expanders:
        weights //= 2
    stage = weights + p.block_m * p.block_k * size
    scales = 1 if config.recipe == "bf16" else p.block_k // 128
    assert spec.stage_scale_rows == scales and spec.stage_bytes_x == p.block_m * p.block_k * size
    used = p.stages * (stage + 4 * scales * p.block_m)
    words = 4 * p.block_n * p.block_k // 128 if config.recipe == "fp8_block" or codes else 0
    if p.expanders:
        # a stage of codes for two of operands
        assert p.packed_k == 2 * p.block_k and p.stages % 2 == 0
        assert spec.packed_bytes == 2 * (p.block_n * p.block_k // 2 + words)
        used += p.packed_stages * spec.packed_bytes
        # a half of an activated tile waits for the other: fp32, 64 columns of each token
        assert spec.sets_aside
        used += 4 * 64 * p.block_m
        # the expander frees a stage of codes before its operands have been read
        assert p.packed_k * p.packed_stages >= p.block_k * p.stages and p.stages >= 4
    else:
        assert p.packed_k == p.block_k
        assert spec.packed_bytes == weights + words and not spec.sets_aside
        used += p.stages * words
        assert p.packed_stages == p.stages >= 4
    assert used <= SHARED_BYTES == 232_448
    for length in (config.padded_hidden, config.padded_intermediate):
        assert length % p.block_k == 0 and length % p.block_n == 0
        assert length % p.packed_k == 0
    # weights in flight: as many as the memory needs, some, and not more than there is room for
    assert 1 <= p.in_flight <= p.packed_stages
    assert p.in_flight * weights <= 98_304 or p.in_flight == 1


@pytest.mark.parametrize("hidden", [8, 256, 288, 2304, 4096, 7168, 16384])
def test_dispatch_moves_a_row_in_whole_steps(hidden):
    for form in (("fp8", "ue8m0_32"), ("bf16", "none")):
        config = make_config(form, hidden=max(hidden, 32))
        spec = Plan(config).spec(tile_policy(config, 1))
        groups, words = spec.padded_hidden // 32, spec.padded_hidden * spec.x_bytes // 4
        for step, whole in ((spec.pull_groups, groups), (spec.pull_words, words)):
            assert whole % step == 0 and step & (step - 1) == 0
        assert 8 <= spec.pull_groups <= 32
        # a lane for each word of four codes
        assert spec.code_lanes >= groups // 4 and spec.code_lanes & (spec.code_lanes - 1) == 0


def test_a_timeline_numbers_all_that_a_call_can_fetch():
    """An event has 19 bits for the number of a group of four rows."""
    shape = {"ranks": 2, "topk": 8, "experts": 16}
    most = make_config(capacity=(4 << 19) // 16, **shape)
    assert Plan(most, trace=1).region["trace"].nbytes > 0
    more = make_config(capacity=most.capacity + 1, **shape)
    assert Plan(more).trace == 0
    with pytest.raises(MegaMoEConfigError, match="can number 524288 groups of rows.*524292.*small"):
        Plan(more, trace=1)


def test_compiled_kernels_are_named_by_the_rules_of_the_plan():
    """Triton keys a compilation by the spec's text and the kernel's source, of which the properties
    of a spec are no part: another version of them must not find the old one's kernels.
    """
    digest = sha256(Path(megamoe.plan.__file__).read_bytes()).hexdigest()
    config = make_config()
    spec = Plan(config).spec(tile_policy(config, 16))
    assert digest.startswith(spec.rules) and len(spec.rules) >= 12
    assert spec.rules in repr(spec)
