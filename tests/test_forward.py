"""The kernel on simulated ranks: fused against chain to the bit, and both against the reference.

Why the grid is enough. `GRID` is a covering design: every pair of values of (recipe and scales of
x, ranks, tokens, top-k, block_m, routing, programs) that fits in a small call occurs in at least
one case (`test_grid_covers_every_pair`). Faults of the kernel hang on one or two of these at a
time: token counts go around the sizes at which something changes (0, a warp's share, a block of 16
and of 64, past the largest block), block_m over all tile families, routings over crowded, empty,
masked and repeated experts. Uneven ranks, ring reuse, clamp, padding, calls in a row and
independence of what must not matter have tests of their own, in each recipe where the code differs
by recipe. Hidden 256 and intermediate 128 are the smallest shapes with several K steps and several
tiles in every family; padded shapes are tried apart. The interpreter raises on any race, unwritten
read or address fault on the way, so these runs check the protocol too.

External oracle: the outputs of a trained model's MoE layers, made by another implementation.
"""

from pathlib import Path

import pytest
import torch
from helpers import (
    FORMATS,
    ROUTINGS,
    Call,
    Layer,
    bits,
    check_call,
    covering,
    distinct,
    live_blocks,
    make_call,
    make_config,
    pairs_of,
    same_bits,
    wire,
)
from safetensors import safe_open

import megamoe.plan
from megamoe import MegaMoE, MoEConfig
from megamoe.reference import Bound, compare
from megamoe.symmetric import SCRATCH
from megamoe.weights import CheckpointExperts, pack_weights

TINY = Path(__file__).parents[1] / "examples" / "tiny-moe"
ONE_OF_EACH = [("bf16", "none"), ("fp8", "ue8m0_32"), ("fp8_block", "block128"), ("mxfp4", "token")]


def name_of(value: object) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


# --- the grid ----------------------------------------------------------------------------------

VALUES = {
    "form": FORMATS,
    "ranks": (1, 2, 4, 8),
    "tokens": (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 130),
    "topk": (1, 2, 4, 6, 8),
    "block_m": (None, 16, 32, 64, 128),
    "routing": tuple(ROUTINGS),
    "programs": (1, 2, 3),
}
MAX_ROWS = 1100


def small_enough(case: dict) -> bool:
    return case["ranks"] * case["tokens"] * case["topk"] <= MAX_ROWS


GRID = covering(VALUES, seed=1, allowed=small_enough)


def test_grid_covers_every_pair():
    covered = set().union(*map(pairs_of, GRID))
    for a in VALUES:
        for b in list(VALUES)[list(VALUES).index(a) + 1 :]:
            for x in VALUES[a]:
                for y in VALUES[b]:
                    fits = small_enough({"ranks": 1, "tokens": 1, "topk": 1} | {a: x, b: y})
                    assert ((a, x), (b, y)) in covered or not fits


@pytest.mark.parametrize("case", GRID, ids=lambda c: "-".join(name_of(v) for v in c.values()))
def test_grid(case):
    layer = Layer(
        make_config(
            case["form"], ranks=case["ranks"], capacity=max(case["tokens"], 1),
            topk=case["topk"], block_m=case["block_m"],
        )
    )  # fmt: skip
    moe = layer.model(programs=case["programs"], seed=GRID.index(case))
    call = make_call(layer.config, case["tokens"], seed=GRID.index(case), routing=case["routing"])
    check_call(moe, layer, call)


# --- shapes of a call --------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
@pytest.mark.parametrize("tokens", [[0, 5, 0, 1], [7, 0, 3, 2]], ids=name_of)
def test_uneven_ranks(form, tokens):
    layer = Layer(make_config(form, ranks=4, capacity=7, topk=4))
    check_call(layer.model(), layer, make_call(layer.config, tokens, seed=2))


@pytest.mark.parametrize("form", [("bf16", "none"), ("mxfp4", "ue8m0_32")], ids=name_of)
def test_uneven_over_eight_ranks(form):
    """Ranks choose their tiles by their own token count: here decode and prefill tiles meet."""
    layer = Layer(make_config(form, ranks=8, capacity=97, topk=2))
    moe = layer.model()
    tokens = [3, 97, 1, 64, 0, 33, 17, 8]
    assert len({moe.plan.policy(t).family for t in tokens}) == 2
    check_call(moe, layer, make_call(layer.config, tokens, seed=3, routing="zipf"))


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=name_of)
def test_no_tokens_anywhere_then_some(form):
    layer = Layer(make_config(form, ranks=4, capacity=7))
    moe = layer.model()
    y = check_call(moe, layer, make_call(layer.config, [0, 0, 0, 0], seed=4))
    assert [tuple(a.shape) for a in y] == [(0, 256)] * 4
    check_call(moe, layer, make_call(layer.config, [7, 0, 3, 2], seed=5))
    check_call(moe, layer, make_call(layer.config, [0, 0, 0, 0], seed=6))


@pytest.mark.parametrize("topk", [9, 10, 16])
def test_large_topk(topk):
    layer = Layer(make_config(("fp8", "token"), ranks=2, experts=16, topk=topk))
    check_call(layer.model(), layer, make_call(layer.config, [5, 8], seed=topk))


# (hidden, intermediate); hidden 264 is no multiple of a scale block, and a row of 1280 is pulled in
# five steps
PADDED = [(288, 136), (352, 200), (320, 128), (512, 320), (1280, 128)]


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
@pytest.mark.parametrize("shape", [*PADDED, (264, 72)], ids=name_of)
def test_padded_shapes(form, shape):
    hidden, intermediate = shape
    if hidden % 32 and (form[1] == "ue8m0_32" or form[0] == "mxfp4"):
        pytest.skip("refused by MoEConfig: tests/test_config.py")
    layer = Layer(
        make_config(form, ranks=2, hidden=hidden, intermediate=intermediate, experts=4, topk=2)
    )
    check_call(layer.model(), layer, make_call(layer.config, [3, 6], seed=hidden))


def test_more_scales_in_a_row_than_a_warp_has_lanes():
    layer = Layer(
        make_config(("fp8_block", "block128"), hidden=4352, intermediate=128, experts=4, topk=2)
    )
    check_call(layer.model(), layer, make_call(layer.config, [5], seed=34))


def test_empty_tensors_and_zero_row_slices():
    layer = Layer(make_config(ranks=2))
    full = make_call(layer.config, [6, 4], seed=7)
    lists = {name: [v[0][0:0], v[1]] for name, v in full.arguments.items()}
    y = check_call(layer.model(), layer, Call(**lists))
    lists = {name: [torch.empty(0, *v[0].shape[1:], dtype=v[0].dtype), v[1]]
             for name, v in full.arguments.items()}  # fmt: skip
    assert same_bits(y, check_call(layer.model(), layer, Call(**lists)))


def test_one_rank_takes_and_returns_bare_tensors():
    layer = Layer(make_config(ranks=1))
    call = make_call(layer.config, 5, seed=8)
    listed = layer.model()(**call.arguments)
    bare = layer.model()(**{name: v[0] for name, v in call.arguments.items()})
    assert isinstance(bare, torch.Tensor) and same_bits(listed, [bare])


# --- slots -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=name_of)
def test_every_pattern_of_masked_slots(form):
    layer = Layer(make_config(form, ranks=2, capacity=16, topk=4))
    call = make_call(layer.config, 16, seed=9)
    keep = (torch.arange(16)[:, None] >> torch.arange(4)) & 1 == 1
    call = call.changed(topk_idx=[torch.where(keep, i, -1) for i in call.topk_idx])
    for y in check_call(layer.model(), layer, call):
        assert torch.count_nonzero(bits(y[0])) == 0
        assert (y[1:] != 0).any(dim=1).all()


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=name_of)
def test_all_slots_masked(form):
    """On one rank, then everywhere: zero rows exactly, whatever the masked tokens hold."""
    layer = Layer(make_config(form, ranks=2, capacity=9, topk=4))
    moe = layer.model()
    call = make_call(layer.config, [9, 6], seed=10)
    call.x[1][2] = float("nan")
    nobody = [torch.full_like(i, -1) for i in call.topk_idx]
    y = check_call(moe, layer, call.changed(topk_idx=[call.topk_idx[0], nobody[1]]))
    assert (y[0] != 0).any(dim=1).all() and torch.count_nonzero(bits(y[1])) == 0
    y = check_call(moe, layer, call.changed(topk_idx=nobody))
    assert all(torch.count_nonzero(bits(a)) == 0 for a in y)
    assert int(moe.tokens_per_expert.sum()) == 0


def test_same_expert_in_several_slots():
    """Each slot is computed, also those that name the same expert."""
    layer = Layer(make_config(("fp8", "token"), ranks=4, experts=128, topk=6, capacity=4))
    call = make_call(layer.config, 4, seed=11)
    rows = [[121, 62, 117, 62, 32, 13], [5, 5, 5, 5, 5, 5], [5, -1, 5, 62, -1, 5], [0, 127] * 3]
    idx = torch.tensor(rows, dtype=torch.int32)
    y = check_call(layer.model(), layer, call.changed(topk_idx=[idx.roll(r, 0) for r in range(4)]))
    once = torch.where(torch.arange(6) == 0, idx, -1)
    z = layer.model()(**call.changed(topk_idx=[once.roll(r, 0) for r in range(4)]).arguments)
    assert not same_bits(y, z)


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=name_of)
def test_router_weights_of_any_sign_and_zero(form):
    layer = Layer(make_config(form, ranks=2, topk=4))
    call = make_call(layer.config, [8, 5], seed=12)
    signs = torch.tensor([1.0, -1.0, 0.0, 2.5])
    weights = [w * signs for w in call.topk_weights]
    weights[0][3] = 0.0
    y = check_call(layer.model(), layer, call.changed(topk_weights=weights))
    assert torch.count_nonzero(y[0][3]) == 0
    flipped = layer.model()(**call.changed(topk_weights=[-w for w in weights]).arguments)
    assert all(torch.equal(a, -b) for a, b in zip(y, flipped, strict=True))


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
@pytest.mark.parametrize("clamp", [0.5, 10.0])
def test_clamp(form, clamp):
    """Pre-activations on both sides of the clamp, and both signs of up."""
    layer = Layer(make_config(form, ranks=2, clamp=clamp))
    call = make_call(layer.config, [8, 5], seed=13)
    call = call.changed(x=[x * 3 * clamp for x in call.x])
    y = check_call(layer.model(), layer, call)
    free = Layer(make_config(form, ranks=2))
    assert not same_bits(y, free.model()(**call.arguments))


# --- what must not matter ----------------------------------------------------------------------


def test_ids_and_weights_of_any_dtype():
    layer = Layer(make_config(ranks=2, topk=4))
    call = make_call(layer.config, [8, 3], seed=14, routing="masked")
    call = call.changed(topk_weights=[w.bfloat16() for w in call.topk_weights])
    y = layer.model()(**call.arguments)
    for idx in (torch.int32, torch.int64):
        for dtype in (torch.bfloat16, torch.float32):
            lists = {
                "topk_idx": [i.to(idx) for i in call.topk_idx],
                "topk_weights": [w.to(dtype) for w in call.topk_weights],
            }
            assert same_bits(y, layer.model()(**call.changed(**lists).arguments))


@pytest.mark.parametrize("form", FORMATS[1:], ids=name_of)
def test_quantised_x_gives_the_same_bits(form):
    layer = Layer(make_config(form, ranks=2))
    call = make_call(layer.config, [8, 3], seed=15)
    y = layer.model()(**call.arguments)
    values, scales = zip(*(wire(layer.config, x) for x in call.x), strict=True)
    given = call.changed(x=list(values)).arguments | {"x_scale": list(scales)}
    assert same_bits(y, layer.model()(**given))
    assert same_bits(y, layer.model().chain(**given))


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=name_of)
def test_capacity_changes_no_bit(form):
    results = []
    for capacity in (8, 64, 1024):
        layer = Layer(make_config(form, ranks=2, capacity=capacity, topk=4))
        call = make_call(layer.config, 8, seed=16)
        results.append(check_call(layer.model(), layer, call))
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
def test_block_m_programs_and_schedule_change_no_bit(form):
    def run(block_m, programs, seed):
        layer = Layer(make_config(form, ranks=2, capacity=21, topk=2, block_m=block_m))
        call = make_call(layer.config, [21, 14], seed=17, routing="zipf")
        return layer.model(programs=programs, seed=seed)(**call.arguments)

    first = run(None, 2, 0)
    for block_m, programs, seed in ((16, 1, 1), (32, 3, 2), (64, 2, 3), (128, 5, 4)):
        assert same_bits(first, run(block_m, programs, seed)), (block_m, programs, seed)


UNPACKED = [
    {"experts": 1, "topk": 1, "capacity": 129},
    {"experts": 2, "topk": 2, "capacity": 140, "ranks": 2, "hidden": 384, "intermediate": 256},
    {"experts": 4, "topk": 2, "capacity": 150, "ranks": 2},
    {"experts": 2, "topk": 1, "capacity": 270, "hidden": 288, "intermediate": 96},
]


@pytest.mark.parametrize("form", [f for f in FORMATS if f[0] == "mxfp4"], ids=name_of)
@pytest.mark.parametrize("options", UNPACKED, ids=str)
def test_unpacked_weights(form, options, monkeypatch):
    """Long calls of MXFP4, whose weights dispatch unpacks, have the bits of the chain, which never
    does; also after a short call, and where an expert or a whole rank has few rows.
    """
    monkeypatch.setattr(megamoe.plan, "UNPACK_ROWS", 128)
    config = make_config(form, **options)
    layer = Layer(config)
    moe = layer.model(programs=3)
    tokens = [config.capacity, config.capacity - 9][: config.ranks]
    assert moe.plan.policy(tokens[0]).unpacks and moe.plan.unpacked_bytes
    for seed, counts in enumerate((tokens, [1] * config.ranks, tokens)):
        routing = "zipf" if config.experts > 2 else "distinct"
        check_call(moe, layer, make_call(config, counts, seed=seed, routing=routing))


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
def test_number_of_ranks_changes_no_bit(form):
    """The same 24 tokens and experts over 1, 2, 4, 8 ranks, evenly or not."""
    shares = {1: [24], 2: [24, 0], 4: [1, 10, 4, 9], 8: [3] * 8}
    whole = make_call(make_config(form, topk=4, capacity=24), 24, seed=18)
    results = []
    for ranks, share in shares.items():
        layer = Layer(make_config(form, ranks=ranks, capacity=24, topk=4))
        results.append(torch.cat(layer.model()(**whole.over(share).arguments)))
    assert all(same_bits(results[:1], [other]) for other in results[1:])


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
def test_a_row_does_not_depend_on_the_others(form):
    """One token alone, and with 1, 16, 63 others around it, in several places of the call."""
    layer = Layer(make_config(form, ranks=2, capacity=64, topk=4))
    alone = make_call(layer.config, [1, 0], seed=19)
    row = layer.model()(**alone.arguments)[0][0]
    for tokens, place in ((2, 1), (17, 8), (64, 0)):
        call = make_call(layer.config, [tokens, tokens // 2], seed=20 + tokens, routing="zipf")
        for mine, one in zip(call.arguments.values(), alone.arguments.values(), strict=True):
            mine[0][place] = one[0][0]
        y = layer.model()(**call.arguments)
        assert torch.equal(bits(y[0][place]), bits(row)), tokens


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_or_inf_stays_in_its_token(form, value):
    layer = Layer(make_config(form, ranks=2, topk=4))
    moe = layer.model()
    clean = make_call(layer.config, [8, 8], seed=21, routing="zipf")
    expected = moe(**clean.arguments)
    spoilt = clean.changed(x=[x.clone() for x in clean.x])
    spoilt.x[1][5, 77] = value
    y = check_call(moe, layer, spoilt)
    assert not y[1][5].isfinite().any()
    others = torch.arange(8) != 5
    assert same_bits([y[0], y[1][others]], [expected[0], expected[1][others]])
    assert same_bits(moe(**clean.arguments), expected), "the buffer remembers it"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_or_inf_router_weight_stays_in_its_token(value):
    layer = Layer(make_config(("mxfp4", "ue8m0_32"), ranks=2, topk=4))
    clean = make_call(layer.config, [8, 8], seed=22)
    expected = layer.model()(**clean.arguments)
    weights = [w.clone() for w in clean.topk_weights]
    weights[0][2, 1] = value
    y = check_call(layer.model(), layer, clean.changed(topk_weights=weights))
    assert not y[0][2].isfinite().any()
    others = torch.arange(8) != 2
    assert same_bits([y[0][others], y[1]], [expected[0][others], expected[1]])


# --- one buffer, many calls --------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
def test_three_calls_in_a_row(form):
    """Each as on a buffer of its own: nobody cleans up between them."""
    layer = Layer(make_config(form, ranks=4, capacity=12, topk=4))
    moe = layer.model()
    for seed, (tokens, routing) in enumerate(
        [([12, 3, 0, 7], "zipf"), ([1, 0, 12, 2], "one_rank"), ([5, 5, 5, 5], "masked")]
    ):
        call = make_call(layer.config, tokens, seed=30 + seed, routing=routing)
        assert same_bits(check_call(moe, layer, call), layer.model()(**call.arguments))


@pytest.mark.parametrize("form", [("bf16", "none"), ("mxfp4", "ue8m0_32")], ids=name_of)
def test_six_calls_of_changing_size(form):
    """Big and small in turn, uneven: each set of counters sees fewer tokens after more and back."""
    layer = Layer(make_config(form, ranks=2, capacity=40, topk=2, experts=16))
    moe = layer.model(programs=3)
    sizes = [[40, 1], [0, 2], [3, 33], [1, 0], [20, 20], [2, 1]]
    for seed, tokens in enumerate(sizes):
        call = make_call(layer.config, tokens, seed=40 + seed)
        assert same_bits(check_call(moe, layer, call), layer.model()(**call.arguments))
    assert [buffer.epoch() for buffer in moe._fused.buffers] == [6, 6]


@pytest.mark.parametrize("form", ONE_OF_EACH, ids=name_of)
def test_memory_is_nan_before_each_launch(form, monkeypatch):
    layer = Layer(make_config(form, ranks=2))
    moe = layer.model()
    backend, looked = moe._fused, []
    run = backend.machine.run

    def look_and_run() -> None:
        for buffer, y in zip(backend.buffers, backend.y, strict=True):
            assert y.isnan().all()
            for name in SCRATCH:
                region = buffer.plan.region[name]
                memory = buffer.memory[region.offset : region.offset + region.nbytes]
                assert (memory == 0xFF).all(), name
        looked.append(True)
        run()

    monkeypatch.setattr(backend.machine, "run", look_and_run)
    for seed in (50, 51):
        y = moe(**make_call(layer.config, [4, 2], seed=seed).arguments)
        assert all(a.isfinite().all() for a in y)
    assert len(looked) == 2


# --- the ring of pool blocks -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "block_m", "ranks", "experts", "tokens", "topk", "programs"),
    [
        (("bf16", "none"), 128, 1, 24, 6, 4, 1),
        (("fp8", "ue8m0_32"), 128, 2, 40, 10, 4, 1),
        (("fp8_block", "block128"), 128, 1, 32, 8, 4, 2),
        (("mxfp4", "ue8m0_32"), 128, 1, 24, 6, 4, 1),
        (("fp8", "token"), 64, 1, 32, 8, 4, 1),
        (("mxfp4", "token"), 16, 1, 24, 6, 4, 1),
        (("bf16", "none"), 32, 1, 24, 6, 4, 1),
    ],
    ids=name_of,
)
def test_ring_slots_are_used_again(form, block_m, ranks, experts, tokens, topk, programs):
    """More live blocks than the ring has: dispatch waits for the L2 tiles that free a slot."""
    layer = Layer(
        make_config(
            form, ranks=ranks, experts=experts, topk=topk, capacity=tokens, block_m=block_m,
            intermediate=64,
        )
    )  # fmt: skip
    moe = layer.model(programs=programs)

    def every_expert(config, count, g):
        # each expert gets one row, so each is a block of its own
        return torch.randperm(config.experts * ranks, generator=g)[: count * topk].reshape(
            count, topk
        ) % config.experts  # fmt: skip

    call = make_call(layer.config, tokens, seed=60, routing=every_expert)
    blocks = [live_blocks(call, layer.config, r, block_m) for r in range(ranks)]
    ring = moe.plan.ring_blocks(block_m)
    print(f"  blocks {blocks}, ring {ring}")
    assert min(blocks) > ring
    check_call(moe, layer, call)


# --- wide blocks -------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [64, 65, 128, 129, 192, 193], ids=str)
@pytest.mark.parametrize("form", ONE_OF_EACH, ids=name_of)
def test_blocks_of_which_one_partition_has_no_tokens(form, rows):
    """In wide tiles each math partition has 64 tokens of a block; here experts leave the second
    none, one, or all of them.
    """
    layer = Layer(make_config(form, capacity=rows, topk=1, block_m=128))
    call = make_call(layer.config, rows, seed=rows, routing="one_expert")
    check_call(layer.model(), layer, call)


# --- external oracle ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 3])
def test_layer_of_a_trained_model(number):
    """64 captured tokens over 2 ranks against what transformers' own experts made of them."""
    checkpoint = CheckpointExperts.from_safetensors(TINY, layer=number)
    config = MoEConfig(
        hidden=256, intermediate=128, experts=16, topk=4, ranks=2, capacity=32, recipe="bf16"
    )
    weights = [pack_weights(config, checkpoint, rank) for rank in range(2)]
    with safe_open(TINY / "layer_inputs.safetensors", framework="pt") as file:
        captured = {
            name: file.get_tensor(f"layers.{number}.{name}")[:64]
            for name in ("hidden_states", "topk_indices", "topk_weights", "output")
        }
    call = Call(
        x=list(captured["hidden_states"].split(32)),
        topk_idx=list(captured["topk_indices"].split(32)),
        topk_weights=list(captured["topk_weights"].split(32)),
    )
    moe = MegaMoE(config=config, weights=weights, backend="interpreter")
    y = moe(**call.arguments)
    assert same_bits(y, moe.chain(**call.arguments))
    found = compare(torch.cat(y), captured["output"])
    print(found)
    found.check(Bound(5e-3, 1e-2, "bf16 rounding of L1's output, partials and y"))


# kept last: the helpers' own claims that other tests rely on
def test_distinct_routing_repeats_no_expert_while_there_are_enough():
    config = make_config(topk=6)
    idx = distinct(config, 20, torch.Generator().manual_seed(0))
    assert all(len(set(row)) == 6 for row in idx.tolist())
