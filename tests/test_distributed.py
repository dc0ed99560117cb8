"""One process a GPU, as far as it goes without a GPU: meetings, refusals, diagnosis, the custom op.

Why the grid is enough. Refusals: every way in which a group of ranks can be unfit has one fake
topology, and each is seen from every rank. Meetings: everybody comes, one is late, one never
comes, one gives up, two disagree about where they are; on 2 and 3 ranks, which are threads here.
Diagnosis: each phase that the kernel can report. What needs the GPUs is in test_gpu_ranks.py.
"""

import re
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers import Layer, make_config

from megamoe import distributed
from megamoe.config import MegaMoEInputError
from megamoe.diagnosis import Failure, awaited_ranks, explain, failure_of, missing_ranks
from megamoe.distributed import SymmetricMoE
from megamoe.plan import Plan
from megamoe.ranks import ops
from megamoe.ranks.compile_lock import cache_directory, compile_lock
from megamoe.ranks.lane import Lane, tile_policies
from megamoe.ranks.meeting import Meeting, MeetingError
from megamoe.ranks.memory import Party, SharedMemory
from megamoe.ranks.topology import Gpu, Member, why_no_access, why_not_gpu, why_not_together
from megamoe.symmetric import MegaMoEError, SymmetricBuffer

H200 = Gpu(host="a", host_name="node1", uuid="0", name="H200", capability=(9, 0), sms=132)


class FakeProbe:
    """What each rank's machine would say. blocked: pairs of GPUs without peer access."""

    def __init__(self, gpu, *, blocked=(), missing=None):
        self._gpu, self._blocked, self._missing = gpu, blocked, missing

    def gpu(self, device):
        return self._gpu

    def peer_access(self, device, peer):
        return {self._gpu.uuid, peer.uuid} not in [set(pair) for pair in self._blocked]

    def missing(self):
        return self._missing


def gpus(ranks, **changes):
    return [replace(H200, uuid=str(r), **changes) for r in range(ranks)]


def in_threads(ranks, work):
    """Run work(rank) on every rank at once; returns what each returned or raised."""
    results = [None] * ranks

    def run(rank):
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


@pytest.fixture
def world(monkeypatch):
    """Ranks as threads: a store they meet on, and buffers in CPU memory instead of a GPU's."""
    store, local, buffers = dist.HashStore(), threading.local(), {}

    def find_party(config, group):
        return Party(local.rank, local.ranks, None, store)

    def allocate_local(plan, device):
        problem = getattr(local, "out_of_memory", None)
        if problem:
            raise RuntimeError(problem)
        return torch.ones(plan.nbytes, dtype=torch.uint8)

    def join_memory(memory, plan, party, timeout_s):
        buffers[party.rank] = memory
        return SharedMemory(
            memory=memory,
            distances=(0,) * party.ranks,
            status_of=lambda rank: SymmetricBuffer(
                plan=plan, memory=buffers[rank], unpacked=buffers[rank][:0]
            ).view("status"),
            handle=(None, 0),
        )

    def allocate_alone(plan, device):
        return SharedMemory(memory=torch.ones(plan.nbytes, dtype=torch.uint8), distances=(0,))

    def allocate_unpacked(plan, device):
        problem = getattr(local, "out_of_memory_beside", None)
        if problem:
            raise RuntimeError(problem)
        return torch.empty(plan.unpacked_bytes, dtype=torch.uint8)

    for function in (find_party, allocate_local, allocate_alone, allocate_unpacked, join_memory):
        monkeypatch.setattr(distributed, function.__name__, function)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(SymmetricMoE, "_make_watch", lambda self: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def make(rank, config, probe, *, ranks, timeout_s=5.0, trace=0):
        local.rank, local.ranks = rank, ranks
        return SymmetricMoE(
            config=config, device="cuda:0", probe=probe, setup_timeout_s=timeout_s, trace=trace
        )

    make.local = local
    return make


def set_up(world, configs, probes, **options):
    """Construct and set up a rank a thread; returns the objects or the errors."""

    def work(rank):
        moe = world(rank, configs[rank], probes[rank], ranks=len(configs), **options)
        moe.setup()
        return moe

    return in_threads(len(configs), work)


def refusals(world, configs, probes, **options):
    results = set_up(world, configs, probes, **options)
    assert all(isinstance(r, MegaMoEError) for r in results), results
    return [str(r) for r in results]


# --- set-up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_set_up_gives_a_zeroed_buffer(world, ranks):
    config = make_config(ranks=ranks)
    moes = set_up(world, [config] * ranks, [FakeProbe(g) for g in gpus(ranks)])
    for rank, moe in enumerate(moes):
        assert moe.rank == rank
        assert moe.plan == Plan(config, programs=132)
        assert not moe._fused.buffer.memory.any()


def test_programs_are_those_of_the_smallest_gpu(world):
    config = make_config(ranks=2, reserve_sms=10)
    first, second = gpus(2)
    moes = set_up(world, [config] * 2, [FakeProbe(first), FakeProbe(replace(second, sms=114))])
    assert [moe.plan.programs for moe in moes] == [104, 104]


def test_set_up_again_clears_the_buffer(world):
    config = make_config(ranks=2)
    moes = set_up(world, [config] * 2, [FakeProbe(g) for g in gpus(2)])
    memory = [moe._fused.buffer.memory for moe in moes]

    def again(rank):
        memory[rank].fill_(3)
        moes[rank].poisoned = "a test"
        moes[rank].setup()

    assert in_threads(2, again) == [None, None]
    for moe, old in zip(moes, memory, strict=True):
        assert moe._fused.buffer.memory is old and not old.any()
        assert moe.poisoned is None


@pytest.mark.parametrize(
    "capability,why",
    [
        ((8, 0), "8.0.*Ampere"),
        ((8, 9), "8.9.*Ada"),
        ((10, 0), "10.0.*tcgen05"),
        ((12, 0), "12.0.*consumer Blackwell"),
    ],
)
def test_a_gpu_without_wgmma_is_refused_on_every_rank(world, capability, why):
    probes = [FakeProbe(g) for g in gpus(3)]
    probes[1] = FakeProbe(replace(H200, uuid="1", capability=capability))
    found = refusals(world, [make_config(ranks=3, experts=9)] * 3, probes)
    for rank, message in enumerate(found):
        assert message.startswith(f"rank {rank}")
        assert "compute capability" in message and "needs WGMMA" in message
        assert ("rank 1 gave up" in message) == (rank != 1)
    assert all(re.search(why, message) for message in found)


def test_a_rank_without_cuda_is_refused_on_every_rank(world):
    probes = [FakeProbe(H200), FakeProbe(None, missing="no CUDA device is visible")]
    found = refusals(world, [make_config(ranks=2)] * 2, probes)
    assert all("no CUDA device is visible" in message for message in found)


def test_no_peer_access_is_refused_on_every_rank(world):
    probes = [FakeProbe(g, blocked=[("1", "2")]) for g in gpus(4)]
    found = refusals(world, [make_config(ranks=4)] * 4, probes)
    assert all("no peer access between the GPUs of ranks 1 and 2:" in m for m in found)


def test_two_machines_are_refused_on_every_rank(world):
    probes = [FakeProbe(H200), FakeProbe(replace(H200, uuid="1", host="b", host_name="node2"))]
    found = refusals(world, [make_config(ranks=2)] * 2, probes)
    assert all("rank 0 is on node1 and rank 1 on node2" in message for message in found)


def test_two_ranks_on_one_gpu_are_refused_on_every_rank(world):
    found = refusals(world, [make_config(ranks=2)] * 2, [FakeProbe(H200)] * 2)
    assert all("ranks 0 and 1 are on the same GPU" in message for message in found)


@pytest.mark.parametrize("change", [{"hidden": 512}, {"capacity": 9}, {"timeout_s": 1.0}])
def test_different_configurations_are_refused_on_every_rank(world, change):
    configs = [make_config(ranks=3, experts=9) for _ in range(3)]
    configs[2] = make_config(**({"ranks": 3, "experts": 9} | change))
    found = refusals(world, configs, [FakeProbe(g) for g in gpus(3)])
    (name,) = change
    assert all("ranks 0 and 2 were given different configurations" in m for m in found)
    assert all(f"{name} is {getattr(configs[0], name)!r} and {change[name]!r}" in m for m in found)


@pytest.mark.parametrize("last,says", [(8, "trace is 4 and 8"), (-1, "at least 0, got -1")])
def test_different_traces_are_refused_on_every_rank(world, last, says):
    config, probes = make_config(ranks=3, experts=9), [FakeProbe(g) for g in gpus(3)]

    def work(rank):
        world(rank, config, probes[rank], ranks=3, trace=(4, 4, last)[rank]).setup()

    for error in in_threads(3, work):
        assert isinstance(error, MegaMoEError) and says in str(error)


def test_a_trace_is_part_of_the_buffer_and_taken_once(world):
    config = make_config(ranks=2)
    moes = set_up(world, [config] * 2, [FakeProbe(g) for g in gpus(2)], trace=3)
    for rank, moe in enumerate(moes):
        moe.device = torch.device("cpu")
        assert moe.plan == Plan(config, programs=132, trace=3)
        moe._fused.buffer.view("trace")[5] = torch.arange(4) + rank
    for rank, moe in enumerate(moes):
        taken = moe.take_trace()
        assert taken.shape == moe.plan.region["trace"].shape and taken.dtype == torch.int32
        assert taken[5].tolist() == [rank, rank + 1, rank + 2, rank + 3]
        assert not moe.take_trace().any()
        assert taken.any(), "what was taken stays"
    (plain,) = set_up(world, [make_config()], [FakeProbe(H200)])
    with pytest.raises(MegaMoEError, match="nothing is recorded.*trace=N"):
        plain.take_trace()


def test_a_wrong_number_of_ranks_is_refused_on_every_rank(world):
    configs = [make_config(ranks=2), make_config(ranks=4)]
    found = refusals(world, configs, [FakeProbe(g) for g in gpus(2)])
    assert all("has 4 ranks, the process group 2" in message for message in found)


@pytest.mark.parametrize("which", ["out_of_memory", "out_of_memory_beside"])
def test_no_memory_on_one_rank_is_refused_on_every_rank(world, which):
    """For the buffer, or for the weights that are unpacked beside it."""

    def work(rank):
        moe = world(rank, make_config(ranks=2), FakeProbe(gpus(2)[rank]), ranks=2)
        if rank == 1:
            setattr(world.local, which, "CUDA out of memory")
        moe.setup()

    found = in_threads(2, work)
    assert all("rank 1 cannot allocate" in str(e) and "out of memory" in str(e) for e in found)


def test_a_rank_that_never_comes_is_named_and_set_up_can_be_tried_again(world):
    moes = [None, None]

    def work(rank):
        probe = FakeProbe(gpus(2)[rank])
        moes[rank] = world(rank, make_config(ranks=2), probe, ranks=2, timeout_s=0.3)
        if rank == 0:
            moes[rank].setup()

    error, _ = in_threads(2, work)
    assert "waited 0.3 s at 'configuration' for rank 1, which did not come" in str(error)
    with pytest.raises(MegaMoEError, match="cannot be used until setup"):
        moes[0].plan  # noqa: B018
    # the late one hears that the other has gone, instead of waiting
    with pytest.raises(MegaMoEError, match="rank 0 gave up"):
        moes[1].setup()
    assert in_threads(2, lambda rank: moes[rank].setup()) == [None, None]


def test_calls_before_set_up_say_so(world):
    moe = world(0, make_config(ranks=1), FakeProbe(H200), ranks=1)
    layer = Layer(moe.config)
    with pytest.raises(MegaMoEError, match=r"setup\(\)"):
        moe.forward(weights=layer.weights()[0], x=torch.zeros(1, 256))
    with pytest.raises(MegaMoEError, match=r"setup\(\)"):
        moe.warmup(layer.weights()[0])
    moe.close()
    with pytest.raises(MegaMoEError, match="it was closed"):
        moe.plan  # noqa: B018


def test_without_a_process_group():
    with pytest.raises(MegaMoEError, match="2 ranks need a process group"):
        SymmetricMoE(config=make_config(ranks=2), probe=FakeProbe(H200))


def test_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(MegaMoEError, match="rank 0: the compiled kernel cannot run here: no CUDA"):
        SymmetricMoE(config=make_config())


# --- calls and their end -----------------------------------------------------------------------


def three(world):
    config = make_config(ranks=3, experts=9)
    return set_up(world, [config] * 3, [FakeProbe(g) for g in gpus(3)])


def test_a_wait_that_expired_poisons_until_set_up_again(world):
    moes = three(world)
    buffer = moes[0]._fused.buffer
    moes[0].check()
    buffer.view("control")[0] = 5
    buffer.view("counts_ready")[:3] = torch.tensor([5, 4, 5])
    buffer.view("status")[:7] = torch.tensor([1, 1, 1, 1, 5, 4, 1])
    with pytest.raises(MegaMoEError, match="rank 0, call 5: .*expected 5, saw 4; rank 1 did not"):
        moes[0].check()
    with pytest.raises(MegaMoEError, match="until setup.*rank 1 did not arrive"):
        moes[0].inputs(1)
    # another rank, whose own call went well, hears of it
    with pytest.raises(MegaMoEError, match="rank 0, call .*results of ranks 1, 2 cannot"):
        moes[2].check()
    assert moes[2].poisoned
    assert in_threads(3, lambda rank: moes[rank].setup()) == [None] * 3
    for moe in moes:
        moe.check()
        assert moe.inputs(3)["topk_idx"].shape == (3, 2)


def test_the_memory_of_a_missing_rank_is_not_read(world):
    moes = three(world)
    buffer = moes[0]._fused.buffer
    buffer.view("control")[0] = 5
    buffer.view("counts_ready")[:3] = torch.tensor([5, 4, 5])
    buffer.view("status")[:7] = torch.tensor([1, 1, 1, 1, 5, 4, 1])
    read = []
    of = moes[0]._fused.shared.status_of
    moes[0]._fused.shared = replace(
        moes[0]._fused.shared, status_of=lambda rank: (read.append(rank), of(rank))[1]
    )
    with pytest.raises(MegaMoEError):
        moes[0].check()
    assert read == [2]


@pytest.fixture
def called(world, monkeypatch):
    """A rank on its own, whose launches are only written down."""
    log = []
    monkeypatch.setattr(
        Lane, "prepare", lambda self, w, tokens, y: [lambda: log.append(("launch", tokens))]
    )
    monkeypatch.setattr(distributed.staging, "stage", lambda *a, **k: log.append("stage"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    config = make_config()
    (moe,) = set_up(world, [config], [FakeProbe(H200)])
    moe.device = torch.device("cpu")
    return moe, Layer(config).weights()[0], log


def test_inputs_are_staged_before_the_launch(called):
    moe, weights, log = called
    y = moe.forward(weights=weights, **arguments(moe.config, 3))
    assert y.shape == (3, moe.config.hidden) and y.dtype == torch.bfloat16
    assert log == ["stage", ("launch", 3)]
    log.clear()
    out = torch.empty(5, moe.config.hidden, dtype=torch.bfloat16)
    assert moe.forward(weights=weights, tokens=5, out=out) is out
    assert log == [("launch", 5)]


@pytest.mark.parametrize("change,message", [
    ({"x": torch.zeros(9, 256).bfloat16()}, "capacity"),
    ({"x": torch.zeros(3, 8).bfloat16()}, "x must have shape"),
    ({"topk_idx": torch.zeros(3, 1).int()}, "topk_idx must have shape"),
    ({"topk_idx": None}, "topk_idx must be a torch.Tensor"),
    ({"x_scale": torch.zeros(3, 2).int()}, "x_scale is only allowed"),
    ({"x": None, "tokens": 3}, "without x all inputs are taken from the buffer"),
    ({"x": None, "tokens": 9, "topk_idx": None, "topk_weights": None}, "tokens must be between 0"),
    ({"out": torch.zeros(3, 256)}, "out must be bfloat16"),
    ({"out": torch.zeros(256, 3).bfloat16().T}, "out must be bfloat16"),
    ({"out": torch.zeros(2, 256).bfloat16()}, "out must be bfloat16"),
])  # fmt: skip
def test_wrong_inputs_are_refused_before_anything_is_written(called, change, message):
    moe, weights, log = called
    with pytest.raises(MegaMoEInputError, match=message):
        moe.forward(weights=weights, **(arguments(moe.config, 3) | change))
    assert log == []


def test_a_chain_needs_its_own_set_up(called):
    moe, weights, log = called
    with pytest.raises(MegaMoEError, match=r"setup_chain\(\)"):
        moe.chain(weights=weights, **arguments(moe.config, 3))
    moe.setup_chain()
    moe.chain(weights=weights, **arguments(moe.config, 3))
    assert log == ["stage", ("launch", 3)]
    assert moe._chain.plan.chain and not moe.plan.chain


def test_a_known_failure_stops_the_next_call(called):
    moe, weights, log = called

    class Watch:
        failed = True

    moe._watch = Watch()
    moe._fused.buffer.view("status")[:7] = torch.tensor([1, 0, 6, 4, 0, 99, 1])
    with pytest.raises(MegaMoEError, match="slot 4 of topk_idx holds expert 99"):
        moe.forward(weights=weights, **arguments(moe.config, 3))
    assert log == []


def test_closing(called):
    moe, weights, log = called
    with moe as same:
        assert same is moe
    with pytest.raises(MegaMoEError, match="it was closed"):
        moe.forward(weights=weights, **arguments(moe.config, 3))
    moe.close()
    moe.setup()
    moe.forward(weights=weights, **arguments(moe.config, 3))


# --- verdicts ----------------------------------------------------------------------------------


def test_verdicts_accept_what_is_fit():
    config = make_config(ranks=2)
    members = [Member(config=config, gpu=g, torch="2", triton="3") for g in gpus(2)]
    assert why_not_together(members) is None
    assert why_no_access([[], []]) is None
    assert why_not_gpu(H200) is None
    assert "torch: 2, 1" in why_not_together([members[0], replace(members[1], torch="1")])


# --- meetings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_gather_returns_values_by_rank(ranks):
    store = dist.HashStore()

    def work(rank):
        meeting = Meeting(store, rank=rank, ranks=ranks, timeout_s=5)
        time.sleep(0.05 * rank)
        return [meeting.gather("first", rank), meeting.gather("second", -rank)]

    numbers = list(range(ranks))
    assert in_threads(ranks, work) == [[numbers, [-n for n in numbers]]] * ranks


def test_ranks_at_different_steps_are_told():
    store = dist.HashStore()

    def work(rank):
        Meeting(store, rank=rank, ranks=2, timeout_s=5).barrier(["warm-up", "set-up"][rank])

    first, second = in_threads(2, work)
    assert "rank 0 is at 'warm-up' and rank 1 at 'set-up'" in str(first)
    assert isinstance(second, MeetingError)


def test_objects_of_one_store_do_not_mix():
    store = dist.HashStore()

    def work(rank):
        a, b = (Meeting(store, rank=rank, ranks=2, timeout_s=5) for _ in range(2))
        return a.gather("x", ("a", rank)), b.gather("x", ("b", rank))

    for a, b in in_threads(2, work):
        assert a == [("a", 0), ("a", 1)] and b == [("b", 0), ("b", 1)]


def test_one_rank_meets_itself():
    assert Meeting(None, rank=0, ranks=1, timeout_s=1).gather("x", 5) == [5]
    with pytest.raises(ValueError, match="2 ranks need a store"):
        Meeting(None, rank=0, ranks=2, timeout_s=1)


# --- diagnosis ---------------------------------------------------------------------------------


def failing_buffer(*, call=7, ready=(7, 7, 7, 7)):
    buffer = SymmetricBuffer.allocate(plan=Plan(make_config(ranks=4, topk=3), programs=2))
    buffer.view("control")[0] = call
    buffer.view("counts_ready")[:4] = torch.tensor(ready, dtype=torch.int32)
    return buffer


def failed(phase, index, **changes):
    values = {"rank": 0, "call": 7, "phase": phase, "index": index, "wanted": 9, "seen": 4}
    return Failure(**(values | changes))


@pytest.mark.parametrize(
    "ready,missing", [((7, 7, 6, 7), [2]), ((7, 3, 6, 7), [1, 2]), ((7, 8, 7, 6), [3])]
)
@pytest.mark.parametrize("phase", [1, 2, 3, 4, 5, 7])
def test_ranks_whose_counts_have_not_come_are_missing(phase, ready, missing):
    buffer = failing_buffer(ready=ready)
    found = failed(phase, missing[0])
    assert missing_ranks(found, buffer) == missing
    message = explain(found, [], buffer)
    assert "rank 0, call 7" in message and f"phase {phase}" in message
    assert "expected 9, saw 4" in message
    assert ", ".join(map(str, missing)) + " did not arrive" in message
    assert "set up again" in message


def test_owners_of_a_token_that_waits_are_missing():
    buffer = failing_buffer()
    buffer.view("topk_idx")[3] = torch.tensor([-1, 7, 0])  # two experts a rank
    assert awaited_ranks(failed(5, 3), buffer) == [0, 3]
    buffer.view("topk_idx")[3] = torch.tensor([2, 7, 0])
    assert "rows were awaited from ranks 0, 1, 3" in explain(failed(5, 3), [], buffer)


def test_a_rank_that_came_after_the_report_is_still_named():
    assert "rank 2 did not arrive" in explain(failed(1, 2), [], failing_buffer())


def test_a_wrong_expert_blames_nobody():
    buffer = failing_buffer(ready=(7, 6, 7, 7))
    message = explain(failed(6, 5, seen=99), [], buffer)
    assert "slot 5 of topk_idx holds expert 99, allowed are -1 and 0 to 7" in message
    assert "arrive" not in message


def test_a_failure_elsewhere_is_reported_here():
    message = explain(None, [failed(6, 5, rank=2)], failing_buffer())
    assert "rank 2, call 7: slot 5" in message
    assert "results of ranks 0, 1, 3 cannot be trusted" in message
    assert explain(None, [], failing_buffer()) is None


def test_a_report_counts_once_it_is_complete():
    words = [1, 1, 5, 3, 9, 4, 0]
    assert failure_of(words, rank=0, call=7) is None
    words[6] = 1
    assert failure_of(words, rank=0, call=7) == failed(5, 3)


# --- compilation -------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {}, {"ranks": 4}, {"capacity": 1}, {"capacity": 5000}, {"topk": 7, "ranks": 8, "capacity": 90},
    {"block_m": 64}, {"form": ("mxfp4", "token"), "capacity": 3500},
])  # fmt: skip
def test_warm_up_finds_every_policy(options):
    plan = Plan(make_config(**options), programs=4)
    every = {plan.policy(n) for n in range(plan.config.capacity + 1)}
    assert set(tile_policies(plan, None)) == every
    assert tile_policies(plan, [0, 0, 1]) == list(dict.fromkeys(map(plan.policy, [0, 1])))


def test_one_process_compiles_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert cache_directory() == tmp_path / "cache"
    inside, most = [], []

    def work(rank):
        with compile_lock(timeout_s=10):
            inside.append(rank)
            most.append(len(inside))
            time.sleep(0.05)
            inside.remove(rank)

    assert in_threads(4, work) == [None] * 4
    assert most == [1] * 4
    with compile_lock(timeout_s=1):
        with pytest.raises(TimeoutError, match="megamoe.lock"):
            with compile_lock(timeout_s=0.1):
                pass


# --- the custom op -----------------------------------------------------------------------------


class Pretend(SymmetricMoE):
    """Calls that only add up their inputs, in CPU memory."""

    def run(self, weights, x, x_scale, topk_idx, topk_weights, *, tokens, out, chain):
        assert isinstance(tokens, int) and list(weights) == list(self.expected.tensors)
        self.calls.append(tokens)
        out.copy_(x.float() * topk_weights.sum(1, keepdim=True) + 100 * chain)


@pytest.fixture
def pretend(monkeypatch):
    config = make_config(capacity=64)
    moe = Pretend(config=config, device="cuda:0", probe=FakeProbe(H200))
    moe._order = torch.zeros(1, dtype=torch.int32)
    moe.calls, moe.expected = [], Layer(config).weights()[0]
    return moe


def arguments(config, tokens):
    g = torch.Generator().manual_seed(tokens)
    return {
        "x": torch.randn(tokens, config.hidden, generator=g).bfloat16(),
        "topk_idx": torch.zeros(tokens, config.topk, dtype=torch.int64),
        "topk_weights": torch.rand(tokens, config.topk, generator=g),
    }


def test_compiles_without_a_graph_break(pretend):
    weights = pretend.expected

    def layer(x, topk_idx, topk_weights):
        given = {"x": x + 1, "topk_idx": topk_idx, "topk_weights": topk_weights}
        first = pretend.forward(weights=weights, **given)
        second = pretend.chain(weights=weights, **given)
        out = torch.empty_like(x)
        pretend.forward(weights=weights, out=out, **given)
        return first * 2 + second, out

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 0, 17):
        given = arguments(pretend.config, tokens)
        wanted = layer(**given)
        pretend.calls.clear()
        got = compiled(**given)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert pretend.calls == [tokens] * 3


def test_calls_whose_result_is_not_used_are_made(pretend):
    """Each call must happen on every rank as often as on the others."""

    def layer(x, topk_idx, topk_weights):
        given = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
        pretend.forward(weights=pretend.expected, **given)
        a = pretend.forward(weights=pretend.expected, **given)
        b = pretend.forward(weights=pretend.expected, **given)
        return a + b

    torch.compile(layer, fullgraph=True, backend="aot_eager")(**arguments(pretend.config, 4))
    assert pretend.calls == [4, 4, 4]


def test_op_of_an_object_that_is_gone():
    with pytest.raises(RuntimeError, match="no longer exists"):
        ops._find(-1)


def test_calls_without_x_need_a_count(pretend):
    with pytest.raises(MegaMoEInputError, match="pass tokens"):
        pretend.forward(weights=pretend.expected)


def test_weights_of_another_rank_are_refused(pretend):
    other = replace(pretend.expected, rank=1)
    with pytest.raises(MegaMoEInputError, match="packed for rank 1"):
        pretend.forward(weights=other, **arguments(pretend.config, 2))
