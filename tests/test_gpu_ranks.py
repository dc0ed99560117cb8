"""One process a GPU, on every GPU of this machine: bits, drift, graphs, and ranks that go missing.

Why the grid is enough. What ranks exchange does not depend on the number formats beyond the size
of a row, so two recipes stand for all: one with scales on the wire and one without. Token counts
are even, uneven, none on one rank and none anywhere; routings go to all experts, to those of one
rank, to a single one, and skip half of the slots. Bits are compared with the chain on every rank,
and the values of all ranks together with the float64 reference. The repeated launches have nothing
between the ranks, which drift apart as far as the protocol allows. A rank can be missing in two
ways, late and dead; both are caused at a call that is not the first. A timeline is recorded once:
what is done with it does not need GPUs.
"""

import json
import os
import queue
import signal
import socket
import time
import traceback
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
from gpu_helpers import ON_GPU, precompile, random_call
from helpers import Layer, bits, make_call

from megamoe import MegaMoEError, MoEConfig
from megamoe.cli import main
from megamoe.distributed import SymmetricMoE
from megamoe.reference import BOUNDS, compare

RANKS = torch.cuda.device_count()
pytestmark = [*ON_GPU, pytest.mark.skipif(RANKS < 2, reason="needs two GPUs, one a rank")]

RECIPES = ("mxfp4", "bf16")
CAPACITY = 130
LAUNCHES = int(os.environ.get("MEGAMOE_GPU_LAUNCHES", "10000")) // 5
BACKEND = os.environ.get("MEGAMOE_TEST_PROCESS_GROUP", "gloo")
# NVLink multicast stays off: nothing here uses it
ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}


def config_of(recipe, ranks, **options):
    shape = {"hidden": 512, "intermediate": 256, "experts": 4 * ranks, "topk": 4}
    return MoEConfig(
        recipe=recipe, ranks=ranks, **(shape | {"capacity": CAPACITY, "timeout_s": 20.0} | options)
    )


SECOND = 4  # number of a test's second call: warm-up has made two
# timeout_s is part of the kernel, so a short one is another kernel
FAILING = {"capacity": 16, "timeout_s": 2.0, "block_m": 16}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    everything = tuple(range(CAPACITY + 1))
    jobs = [(config_of(r, RANKS), c, everything) for r in RECIPES for c in (False, True)]
    jobs += [(config_of("mxfp4", RANKS, **FAILING), c, (1,)) for c in (False, True)]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    precompile(jobs, programs=sms)


# --- processes ---------------------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _process(rank, ranks, port, work, results, all_done, options):
    import torch.distributed as dist

    try:
        torch.cuda.set_device(rank)
        torch.set_num_threads(1)
        dist.init_process_group(
            BACKEND, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
        )
        results.put((rank, "done", work(rank, ranks, **options)))
    except BaseException:
        results.put((rank, "failed", traceback.format_exc()))
    # rank 0 serves the store: it stays until nobody needs it. No destroy_process_group: a process
    # must end without the others.
    all_done.wait(60)


def spawn(work, *, seconds, dead=(), **options):
    """Run work(rank, ranks) in a process a GPU; returns what each returned, None for dead ones.

    All must end within `seconds`; a rank that is not in `dead` must end with exit code 0.
    """
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = get_context("spawn")
    results, all_done, port = context.Queue(), context.Event(), free_port()
    processes = [
        context.Process(target=_process, args=(r, RANKS, port, work, results, all_done, options))
        for r in range(RANKS)
    ]
    deadline = time.monotonic() + seconds
    for process in processes:
        process.start()
    try:
        found = {}
        while len(found) < RANKS - len(dead):
            try:
                rank, state, value = results.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"only ranks {sorted(found)} ended in time") from None
            assert state == "done", f"rank {rank}:\n{value}"
            found[rank] = value
        all_done.set()
        for rank, process in enumerate(processes):
            process.join(max(0.1, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank {rank} does not end"
            assert rank in dead or process.exitcode == 0, f"rank {rank}: {process.exitcode}"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return [found.get(rank) for rank in range(RANKS)]


def opened(config, layer, rank, *, tokens=None):
    """A warmed-up object of this rank, and its weights."""
    moe = SymmetricMoE(config=config, setup_timeout_s=120)
    moe.setup()
    moe.setup_chain()
    weights = layer.weights()[rank]
    moved = {name: tensor.cuda() for name, tensor in weights.tensors.items()}
    weights = replace(weights, **moved)
    moe.warmup(weights, tokens=tokens)
    return moe, weights


def mine(call, rank):
    return {name: values[rank].cuda() for name, values in call.arguments.items()}


def equal(a, b):
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


# --- results -----------------------------------------------------------------------------------


def calls_of(config):
    ranks = config.ranks
    full, one, none = CAPACITY, 1, 0
    counts = [
        ([64] * ranks, "distinct"),
        ([one] + [full] * (ranks - 1), "zipf"),
        ([none] + [7] * (ranks - 1), "masked"),
        ([full] + [none] * (ranks - 1), "distinct"),
        ([none] * ranks, "distinct"),
        ([33] * ranks, "one_rank"),
        ([full] * ranks, "one_expert"),
        ([5, 17] * (ranks // 2) + [3] * (ranks % 2), "repeated"),
    ]
    return [make_call(config, t, seed=s, routing=r) for s, (t, r) in enumerate(counts)]


def agree(rank, ranks, *, recipe):
    config = config_of(recipe, ranks)
    layers = [Layer(config, seed=s) for s in (1, 2)]
    moe, first = opened(config, layers[0], rank)
    second = layers[1].weights()[rank]
    second = replace(second, **{n: t.cuda() for n, t in second.tensors.items()})
    ys = []
    with moe:
        for call in calls_of(config):
            for weights in (first, second):
                moe._fused.buffer.poison()
                y = moe.forward(weights=weights, **mine(call, rank))
                moe.check()
                assert equal(y, moe.chain(weights=weights, **mine(call, rank))), "not the chain's"
                ys.append(y.cpu())
    return [y.view(torch.int16).numpy() for y in ys]


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_agree_with_the_chain_and_the_reference(recipe):
    config = config_of(recipe, RANKS)
    layers = [Layer(config, seed=s) for s in (1, 2)]
    by_rank = spawn(agree, seconds=240, recipe=recipe)
    quantise = layers[0].model(programs=1).dequantised_x
    for n, call in enumerate(calls_of(config)):
        x = torch.cat([quantise(a) for a in call.x]).double()
        idx, weights = torch.cat(call.topk_idx), torch.cat(call.topk_weights)
        for which, layer in enumerate(layers):
            parts = [torch.from_numpy(r[2 * n + which]).view(torch.bfloat16) for r in by_rank]
            found = compare(torch.cat(parts).double(), layer.expected(x, idx, weights))
            print(f"  call {n}: {found.relative_l2:.5f}, {found.worst_row_relative:.5f}")
            found.check(BOUNDS[recipe])


def repeat(rank, ranks, *, launches):
    config = config_of("mxfp4", ranks)
    moe, weights = opened(config, Layer(config), rank)
    generator = torch.Generator(device="cuda").manual_seed(100 + rank)
    host = torch.Generator().manual_seed(200 + rank)
    with moe:
        for n in range(launches):
            tokens = int(torch.randint(0, 65, (1,), generator=host))
            call = random_call(config, tokens, generator)
            moe._fused.buffer.poison()
            y = moe.forward(weights=weights, **call)
            if n % 50 == 0:
                again = moe.chain(weights=weights, **call)
                assert equal(y, again), f"launch {n}, {tokens} tokens"
                assert y.isfinite().all()
        moe.check()
    return launches


def test_repeated_launches_with_nothing_between_the_ranks():
    print(f"{LAUNCHES} launches, seeds 100 + rank, 200 + rank")
    assert spawn(repeat, seconds=240, launches=LAUNCHES) == [LAUNCHES] * RANKS


def graphs(rank, ranks):
    config = config_of("mxfp4", ranks)
    moe, weights = opened(config, Layer(config), rank)
    generator = torch.Generator(device="cuda").manual_seed(rank)
    tokens = [40, 3][rank % 2]
    with moe:
        static = random_call(config, tokens, generator)
        moe.forward(weights=weights, **static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = moe.forward(weights=weights, **static)
        for n in range(50):
            call = random_call(config, tokens, generator)
            for name, tensor in call.items():
                static[name].copy_(tensor)
            y.fill_(float("nan"))
            graph.replay()
            got = y.clone()
            assert equal(got, moe.forward(weights=weights, **call)), f"replay {n}"
        moe.check()
    return True


def test_graphs_replay_on_every_rank():
    assert spawn(graphs, seconds=180) == [True] * RANKS


@pytest.mark.parametrize("extra", [[], ["--warm"]])
def test_a_timeline_of_all_ranks(extra, tmp_path, capsys):
    arguments = ["trace", "--gpus", str(RANKS), "--shape", "512,256,4,4", "--tokens", "64",
                 "--recipe", "mxfp4", "--out", str(tmp_path), *extra]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr().out
    print(said)
    assert "aligned at their first event" in said and "WARNING" not in said
    items = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = {i["pid"]: i["args"]["name"] for i in items if i["name"] == "process_name"}
    spans = [item for item in items if item["ph"] == "X"]
    for rank in range(RANKS):
        mine = [s for s in spans if processes[s["pid"]].startswith(f"rank {rank},")]
        assert {"route", "pull", "L1", "L2", "push", "combine"} <= {s["name"] for s in mine}
        assert min(s["ts"] for s in mine) == 0
        assert max(s["ts"] + s["dur"] for s in mine) < 10_000, "microseconds of one call"


# --- ranks that are missing --------------------------------------------------------------------


def expect_failure(moe, weights, call):
    """Make one call that cannot succeed; returns the message and the seconds it took."""
    begin = time.monotonic()
    moe.forward(weights=weights, **call)
    with pytest.raises(MegaMoEError) as caught:
        moe.check()
    with pytest.raises(MegaMoEError, match="until setup"):
        moe.forward(weights=weights, **call)
    assert moe.poisoned
    return str(caught.value), time.monotonic() - begin


def held_back(rank, ranks):
    config = config_of("mxfp4", ranks, **FAILING)
    layer = Layer(config)
    moe, weights = opened(config, layer, rank, tokens=[7])
    call = mine(make_call(config, 7, seed=5), rank)
    with moe:
        good = moe.forward(weights=weights, **call)
        moe.check()
        if rank == ranks - 1:
            time.sleep(3 * config.timeout_s)
        said = expect_failure(moe, weights, call)
        moe.setup()
        assert moe.poisoned is None
        y = moe.forward(weights=weights, **call)
        moe.check()
        assert equal(y, good), "not the same after another set-up"
        assert equal(moe.chain(weights=weights, **call), good)
    return said


def test_a_rank_that_is_held_back_is_named_and_all_can_go_on():
    said = spawn(held_back, seconds=120)
    late = RANKS - 1
    for rank, (message, seconds) in enumerate(said[:late]):
        print(message)
        assert f"rank {rank}, call {SECOND}: waited 2 s for token counts of a rank" in message
        assert f"rank {late} did not arrive" in message
        assert f"expected {SECOND}, saw {SECOND - 1}" in message
        assert 1.9 < seconds < 20
    # the late rank's own waits may be satisfied by what the others had left: it must not trust it
    print(said[late][0])
    assert f"call {SECOND}" in said[late][0]


def killed(rank, ranks):
    config = config_of("mxfp4", ranks, **FAILING)
    moe, weights = opened(config, Layer(config), rank, tokens=[7])
    call = mine(make_call(config, 7, seed=6), rank)
    moe.forward(weights=weights, **call)
    moe.check()
    if rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = expect_failure(moe, weights, call)
    moe.close()
    return said


def test_a_rank_that_is_killed_is_named_and_the_others_end():
    dead = RANKS - 1
    said = spawn(killed, seconds=120, dead=(dead,))
    for rank, (message, seconds) in enumerate(said[:dead]):
        print(message)
        assert f"rank {rank}, call {SECOND}" in message and f"rank {dead} did not arrive" in message
        assert 1.9 < seconds < 20


def never_sets_up(rank, ranks):
    config = config_of("mxfp4", ranks, **FAILING)
    moe = SymmetricMoE(config=config, setup_timeout_s=3)
    if rank == ranks - 1:
        return "absent"
    with pytest.raises(MegaMoEError) as caught:
        moe.setup()
    return str(caught.value)


def test_a_rank_that_never_sets_up_is_named():
    said = spawn(never_sets_up, seconds=90)
    for message in said[:-1]:
        # who waits longest hears it from the first to give up
        assert f"for rank {RANKS - 1}" in message or "gave up" in message
    assert any(f"for rank {RANKS - 1}, which did not come" in message for message in said[:-1])


def different(rank, ranks):
    config = config_of("mxfp4", ranks, **(FAILING | {"capacity": 16 + 16 * (rank == 0)}))
    with pytest.raises(MegaMoEError) as caught:
        SymmetricMoE(config=config, setup_timeout_s=30).setup()
    return str(caught.value)


def test_different_shapes_are_refused_on_every_rank():
    for message in spawn(different, seconds=90):
        assert "different configurations: capacity is 32 and 16" in message
