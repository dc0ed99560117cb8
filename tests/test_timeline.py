"""Timelines: reading, activities, figures, files, and the interpreter's simulated time.

Why this is enough: the interval arithmetic is compared with counting nanoseconds one by one on
random cases; the figures with a recording small enough to work out by hand, in which every figure
has another value; and one recorded call of two ranks has every role, kind and wait that a call can
have, so what must precede what is checked on all of its events. Several GPUs differ from simulated
ranks by their timers and by how the recordings travel: the same call with a timer set off on one
rank, written and read as the processes do; the processes themselves need the GPUs (test_gpu_ranks).
Places for events are tried below one, at one and at many tiles a program, in both tile families.
"""

import json
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import megamoe.plan
from megamoe.bench import run as bench_run
from megamoe.bench.cases import BenchError
from megamoe.cli import main
from megamoe.interpreter.cost import H200
from megamoe.launch import FUSED
from megamoe.plan import MATH_PARTITIONS, ROLES, Plan
from megamoe.symmetric import MegaMoEError
from megamoe.timeline import events as timeline
from megamoe.timeline import gpus as timeline_gpus
from megamoe.timeline.events import (
    COMBINE,
    COMMUNICATE,
    LINEAR1,
    LINEAR2,
    LOAD_TOKENS,
    LOAD_WEIGHTS,
    MATH,
    PULL,
    REHEARSAL,
    ROUTE,
    SIGNAL,
    UNPACK,
    WAIT_COUNTS,
    Event,
    TimelineError,
)
from megamoe.timeline.trial import make, places_for

SHAPE = "256,256,4,2"


def trace_of(events: list[Event], *, programs: int, places: int) -> list[torch.Tensor]:
    """The region `trace` of every rank, as the kernel writes it: the low 32 bits of times."""
    ranks = 1 + max(event.rank for event in events)
    words = torch.zeros(ranks, programs, len(ROLES), places, 4, dtype=torch.int64)
    used: dict[tuple[int, int, int], int] = {}
    for e in events:
        where = (e.rank, e.program, e.role)
        place = used.get(where, 0)
        used[where] = place + 1
        tag = e.kind << 29 | e.block << 10 | e.tile
        words[(*where, place)] = torch.tensor([tag, e.begin, e.middle, e.end])
    return list(words.to(torch.int32).flatten(1, 3))  # which drops the upper half


# Two programs; times in ns, from 1000 on. Program 0 pulls 100, of which 0 lie under its K loop
# (1200 to 1400, tokens ready at 1200); its push (1400 to 1460) and combine (1500 to 1600) lie bare.
# Program 1 pulls 1100 to 1300, K loop of partition 1 1250 to 1500: 50 ns are hidden.
BY_HAND = [
    Event(0, 0, COMMUNICATE, ROUTE, 0, 0, 1000, 1000, 1050),
    Event(0, 0, COMMUNICATE, WAIT_COUNTS, 0, 0, 1050, 1050, 1080),
    Event(0, 0, COMMUNICATE, PULL, 0, 0, 1080, 1100, 1200),
    Event(0, 0, LOAD_TOKENS, LINEAR2, 3, 7, 1090, 1200, 1300),
    Event(0, 0, 0, LINEAR2, 3, 7, 1090, 1400, 1460),
    Event(0, 0, 0, COMBINE, 5, 0, 1460, 1500, 1600),
    Event(0, 1, COMMUNICATE, PULL, 1, 0, 1100, 1100, 1300),
    Event(0, 1, LOAD_WEIGHTS, LINEAR1, 70_000, 2, 1100, 1100, 1400),
    Event(0, 1, 1, LINEAR1, 70_000, 2, 1250, 1500, 1520),
    Event(0, 1, SIGNAL, LINEAR1, 70_000, 2, 1520, 1520, 1530),
]


def by_hand(places: int = 4) -> timeline.Timeline:
    return timeline.read(trace_of(BY_HAND, programs=2, places=places), programs=2)


def test_reading_gives_what_was_written():
    recorded = by_hand()
    assert sorted(recorded.events) == sorted(BY_HAND)
    assert recorded.full == ()
    assert (recorded.begin, recorded.end) == (1000, 1600)


def test_used_up_places_are_reported():
    recorded = by_hand(places=3)
    assert recorded.full == ((0, 0, COMMUNICATE),)
    lines = timeline.figures(recorded).lines()
    warning = " ".join(lines[5:])
    assert warning.startswith("WARNING") and "events lost" in warning
    assert "communicate (1)" in warning and "--events" in warning
    assert max(map(len, lines)) <= timeline.LINE
    assert not any("WARNING" in line for line in timeline.figures(by_hand()).lines())


ROWS = 2 * len(ROLES)


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        (torch.zeros(ROWS, 4, dtype=torch.int32), "nothing was recorded"),
        (torch.zeros(ROWS - 1, 4, dtype=torch.int32), "int32"),
        (torch.zeros(ROWS, 4, dtype=torch.int64), "int64"),
    ],
)
def test_what_is_no_recording_is_refused(trace, says):
    with pytest.raises(TimelineError, match=says):
        timeline.read([trace], programs=2)


def test_figures_by_hand():
    figures = timeline.figures(by_hand())
    assert figures.span_us == 0.6
    # K loops: 200 of partition 0 of program 0, 250 of partition 1 of program 1
    assert figures.math_share == pytest.approx(450 / (2 * 600))
    assert figures.first_tile_us == pytest.approx((0.2, 0.225, 0.25))
    assert figures.tail_us == pytest.approx(0.1)
    assert figures.communication_us == pytest.approx({"pull": 0.15, "push": 0.03, "combine": 0.05})
    assert figures.hidden == pytest.approx(50 / (100 + 60 + 100 + 200))
    assert len(figures.lines()) == 5


def test_spans_cut_events_without_gaps():
    by_event = {}
    for span in timeline.spans(by_hand()):
        key = (span.program, span.role, span.block, span.tile)
        by_event.setdefault(key, []).append(span)
    for event in BY_HAND:
        if event.role == COMMUNICATE:
            continue
        parts = by_event[event.program, event.role, event.block, event.tile]
        assert parts[0].begin == event.begin and parts[-1].end == event.end
        assert all(a.end == b.begin for a, b in zip(parts, parts[1:], strict=False))
    assert [s.activity for s in by_event[0, 0, 3, 7]] == ["wait for operands", "L2", "push"]
    assert [s.activity for s in by_event[0, COMMUNICATE, 0, 0]] == [
        "route",
        "wait for counts",
        "wait for slot",
        "pull",
    ]


def test_intervals_against_counting():
    chance = random.Random(0)
    for _ in range(200):
        lists = []
        for _ in range(2):
            starts = [chance.randrange(50) for _ in range(chance.randrange(8))]
            lists.append([(s, s + chance.randrange(1, 12)) for s in starts])
        covered = [{t for b, e in part for t in range(b, e)} for part in lists]
        joined = [timeline.union(part) for part in lists]
        for one, times in zip(joined, covered, strict=True):
            assert timeline.length(one) == len(times)
            assert all(a[1] < b[0] for a, b in zip(one, one[1:], strict=False))
        assert timeline.overlap(*joined) == len(covered[0] & covered[1])


def test_a_recording_without_matrix_work_is_refused():
    events = [event for event in BY_HAND if event.role not in MATH]
    recorded = timeline.read(trace_of(events, programs=2, places=4), programs=2)
    with pytest.raises(TimelineError, match="no matrix work$"):
        timeline.figures(recorded)
    with pytest.raises(TimelineError, match="no matrix work: events were lost, .*--events"):
        timeline.figures(replace(recorded, full=((0, 0, COMMUNICATE),)))


def test_perfetto_file(tmp_path):
    recorded = by_hand()
    timeline.write_perfetto(recorded, tmp_path / "trace.json")
    items = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [item for item in items if item["ph"] == "X"]
    names = {
        (item["pid"], item["tid"]): item["args"]["name"]
        for item in items
        if item["name"] == "thread_name"
    }
    assert len(spans) == len(timeline.spans(recorded))
    assert min(item["ts"] for item in spans) == 0
    assert max(item["ts"] + item["dur"] for item in spans) == pytest.approx(0.6)
    assert all((item["pid"], item["tid"]) in names for item in spans)
    assert "otherData" not in json.loads((tmp_path / "trace.json").read_text())
    push = next(item for item in spans if item["name"] == "push")
    assert (push["ts"], push["dur"], push["args"]) == (0.4, 0.06, {"block": 3, "tile": 7})
    assert names[push["pid"], push["tid"]] == "math 0"


def test_every_role_has_activities_and_a_thread(tmp_path):
    """By its name: also roles that nothing here knows, and roles that record nothing."""
    kinds = {role: ROUTE if role == COMMUNICATE else LINEAR1 for role in range(len(ROLES))}
    middle = {LOAD_TOKENS: 12}  # K loops begin then
    events = [Event(0, 0, role, kind, 1, 2, 10, middle.get(role, 20), 30)
              for role, kind in kinds.items()]  # fmt: skip
    for some in (events, events[: LOAD_TOKENS + 1]):
        recorded = timeline.read(trace_of(some, programs=1, places=2), programs=1)
        found = {span.role: span.activity for span in timeline.spans(recorded)}
        assert set(found) == {event.role for event in some}
        assert timeline.figures(recorded).partitions == len(MATH)
        timeline.write_perfetto(recorded, tmp_path / "trace.json")
        items = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        names = [item["args"]["name"] for item in items if item["name"] == "thread_name"]
        assert names == [ROLES[event.role] for event in some]
    last = {ROLES[role]: activity for role, activity in found.items()}
    assert last["math 1"] == "activation" and last["load weights"] == "load weights"


@pytest.mark.parametrize("role", [r for r, name in enumerate(ROLES) if name.startswith("expand")])
def test_an_expander_expands(role):
    events = [*BY_HAND, Event(0, 1, role, LINEAR2, 4, 5, 1100, 1250, 1250)]
    recorded = timeline.read(trace_of(events, programs=2, places=4), programs=2)
    mine = [(s.activity, s.begin, s.end) for s in timeline.spans(recorded) if s.role == role]
    assert mine == [("expand", 1100, 1250)]
    # it is neither matrix work nor communication
    assert timeline.figures(recorded) == timeline.figures(by_hand())


@pytest.mark.parametrize("ranks", [1, 3])
def test_picture(tmp_path, ranks):
    pytest.importorskip("matplotlib")
    from megamoe.timeline import plot as timeline_plot

    extra = [Event(0, 0, role, LINEAR1, 0, 0, 1000, 1000, 1100) for role in range(8, len(ROLES))]
    events = [event._replace(rank=rank) for rank in range(ranks) for event in BY_HAND + extra]
    recorded = timeline.read(trace_of(events, programs=2, places=4), programs=2)
    path = tmp_path / "trace.png"
    timeline_plot.plot(recorded, timeline.figures(recorded), path, title="by hand")
    assert path.read_bytes().startswith(b"\x89PNG")


# --- several GPUs --------------------------------------------------------------------------------


def test_ranks_are_aligned_at_their_first_event(tmp_path):
    """The files of two ranks whose timers differ by years, and what is told about it."""
    events = BY_HAND + [e._replace(rank=1) for e in BY_HAND[:-1]]
    late = (2**32 - 1500, 10**17)  # the low half of rank 0's timer passes 0 between its events
    later = [e._replace(begin=e.begin + late[e.rank], middle=e.middle + late[e.rank],
                        end=e.end + late[e.rank]) for e in events]  # fmt: skip
    traces = trace_of(later, programs=2, places=4)
    files = [tmp_path / f"{rank}.pt" for rank in (0, 1)]
    for file, trace in zip(files, traces, strict=True):
        torch.save({"trace": trace, "programs": 2}, file)
    recorded = timeline_gpus.put_together(files)
    moved = [e._replace(begin=e.begin - 1000, middle=e.middle - 1000, end=e.end - 1000)
             for e in events]  # fmt: skip
    assert sorted(recorded.events) == sorted(moved)
    assert [e.begin for e in recorded.events] == sorted(e.begin for e in moved)
    figures = timeline.figures(recorded)
    assert figures.span_us == 0.6 and figures.ranks == 2
    assert any("aligned at their first event" in line for line in figures.lines())
    assert not any("aligned" in line for line in timeline.figures(by_hand()).lines())
    timeline.write_perfetto(recorded, tmp_path / "trace.json")
    assert "alignment" in json.loads((tmp_path / "trace.json").read_text())["otherData"]


def test_ranks_that_are_in_step_stay_so(simulated):
    """Simulated ranks begin together, so aligning them moves all events alike."""
    begin = [min(e.begin for e in simulated.events if e.rank == rank) for rank in (0, 1)]
    spread = abs(begin[0] - begin[1])
    aligned = timeline.align(simulated)
    assert min(e.begin for e in aligned.events) == 0
    span = aligned.end - aligned.begin
    assert abs(span - (simulated.end - simulated.begin)) <= spread
    assert aligned.full == simulated.full


class Ranks:
    """As bench_timing.Together, for one rank without a GPU."""

    rank, ranks = 1, 2

    def __init__(self, log):
        self._log = log

    def host_barrier(self):
        self._log.append("all ready")

    def device_barrier(self):
        self._log.append("all released")


@pytest.mark.parametrize("cold", [True, False])
def test_a_rank_records_its_last_call(monkeypatch, cold):
    from megamoe import distributed

    log, call = [], iter(range(100))

    class Moe:
        plan = SimpleNamespace(programs=7)

        def __init__(self, *, config, trace):
            log.append((config.ranks, trace))
            self.trace = None

        def __enter__(self):
            return self

        def __exit__(self, *_):
            log.append("closed")

        def setup(self):
            log.append("set up")

        def warmup(self, weights, *, tokens):
            assert weights.rank == 1 and tokens == [5]

        def forward(self, *, weights, tokens=None, x=None, x_scale=None, topk_idx=None,
                    topk_weights=None):  # fmt: skip
            assert (tokens is None) == (x is not None)
            assert x is None or x.shape[0] == topk_idx.shape[0] == 5
            log.append("call")
            self.trace = next(call)

        def check(self):
            log.append("check")

        def take_trace(self):
            taken, self.trace = self.trace, None
            return taken

    monkeypatch.setattr(distributed, "SymmetricMoE", Moe)
    monkeypatch.setattr(timeline_gpus, "DEVICE", "cpu")
    monkeypatch.setattr(timeline_gpus, "FLUSH_BYTES", 16)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"))
    trial = gpus_trial(cold=cold)
    trace, programs = timeline_gpus.record_rank(trial, Ranks(log))
    assert programs == 7 and trace == log.count("call") - 1
    once = ["all ready", "sleep", "all released", "call"]
    once = once if cold else ["call", *once]
    wanted = [(2, 33), "set up", "call", "check", *once * 3, "check", "all ready", "closed"]
    assert log == wanted


def gpus_trial(**options):
    given = {"shape": SHAPE, "tokens": 5, "gpus": 2, "recipe": "fp8", "routing": "balanced",
             "events": 33, "seed": 0, "cold": True}  # fmt: skip
    return timeline_gpus.GpusTrial(**(given | options))


def test_processes_are_started_and_their_files_read(monkeypatch):
    traces = trace_of(BY_HAND + [e._replace(rank=1) for e in BY_HAND], programs=2, places=4)

    def spawn(work, *, args, nprocs):
        trial, folder, port = args
        assert work is timeline_gpus._rank_main and nprocs == 2 and 0 < port < 65536
        for rank, trace in enumerate(traces):
            torch.save({"trace": trace, "programs": 2}, timeline_gpus._file(folder, rank))

    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    recorded = gpus_trial().record()
    assert recorded.aligned and len(recorded.events) == 2 * len(BY_HAND)


@pytest.mark.parametrize("last", ["megamoe.symmetric.MegaMoEError: rank 1 refuses: too small",
                                  "ValueError: a bug"])  # fmt: skip
def test_the_words_of_a_rank_are_passed_on(monkeypatch, last):
    import torch.multiprocessing as multiprocessing

    def spawn(work, *, args, nprocs):
        raise multiprocessing.ProcessRaisedException(f"Traceback\n  line\n{last}\n", 1, 99)

    monkeypatch.setattr(multiprocessing, "spawn", spawn)
    refused = "MegaMoEError" in last
    wanted = MegaMoEError if refused else multiprocessing.ProcessRaisedException
    with pytest.raises(wanted) as caught:
        gpus_trial().record()
    assert not refused or str(caught.value) == "rank 1 refuses: too small"


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--gpus", "2"], "--gpus records the compiled kernel, which cannot run here"),
        (["--gpus", "1"], "--gpus must be at least 2, got 1"),
        (["--gpus", "0"], "--gpus must be at least 2, got 0"),
        (["--gpus", "2", "--ranks", "2"], "not both"),
        (["--gpus", "2", "--backend", "interpreter"], "--backend interpreter has no GPU"),
        (["--gpus", "2", "--programs", "4"], "--programs goes without --gpus"),
        (["--gpus", "2", "--tokens", "0"], "tokens must be at least 1, got 0"),
        (["--gpus", "2", "--events", "0"], "events must be at least 1, got 0"),
        (["--gpus", "2", "--shape", "nope"], "unknown shape 'nope'"),
        (["--gpus", "3", "--shape", "Mixtral-8x7B"], "8 experts cannot be divided"),
        (["--warm"], "--warm goes with --gpus"),
    ],
)
def test_several_gpus_are_refused_in_one_line(extra, says, capsys):
    if torch.cuda.is_available() and extra == ["--gpus", "2"]:
        pytest.skip("this machine has a GPU")
    assert main(["trace", *extra]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_more_gpus_than_there_are_and_places_by_default(monkeypatch):
    monkeypatch.setattr(bench_run, "why_not_gluon", lambda config: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda n: SimpleNamespace(multi_processor_count=(132, 114)[n]),
    )
    given = {"tokens": 300, "recipe": "fp8"}
    with pytest.raises(BenchError, match="--gpus 4, but 2 GPUs are visible"):
        timeline_gpus.make(gpus=4, **given)
    trial = timeline_gpus.make(gpus=2, **given)
    assert trial.shape == "flash" and trial.cold and trial.config.ranks == 2
    assert trial.events == places_for(Plan(trial.config, programs=114), trial.idx)
    assert timeline_gpus.make(gpus=2, events=9, **given).events == 9


# --- simulated time ------------------------------------------------------------------------------


def small_trial(**options):
    given = {"backend": "interpreter", "shape": SHAPE, "tokens": 9, "ranks": 2, "recipe": "fp8"}
    return make(**(given | options))


@pytest.fixture(scope="module")
def simulated():
    return small_trial().record()


def test_every_role_and_kind_is_there(simulated):
    seen = {(event.role, event.kind) for event in simulated.events}
    math = {(role, kind) for role in range(MATH_PARTITIONS) for kind in (LINEAR1, LINEAR2)}
    helpers = {(r, k) for r in (LOAD_WEIGHTS, LOAD_TOKENS, SIGNAL) for k in (LINEAR1, LINEAR2)}
    communicate = {(COMMUNICATE, kind) for kind in (ROUTE, WAIT_COUNTS, PULL)}
    rehearsal = {(r, REHEARSAL) for r in (*MATH, LOAD_WEIGHTS, LOAD_TOKENS, SIGNAL)}
    assert math | helpers | communicate | rehearsal <= seen
    assert any(kind == COMBINE for _, kind in seen)
    assert {event.rank for event in simulated.events} == {0, 1}
    assert simulated.full == ()


def test_simulated_time_keeps_causes_before_effects(simulated):
    for event in simulated.events:
        assert event.begin <= event.middle <= event.end
    for rank in (0, 1):
        mine = [event for event in simulated.events if event.rank == rank]
        l1_end = {}
        for e in mine:
            if e.role in MATH and e.kind == LINEAR1:
                l1_end[e.block] = max(l1_end.get(e.block, 0), e.middle)
        second = [e for e in mine if e.role == LOAD_TOKENS and e.kind == LINEAR2]
        assert second
        for e in second:
            assert e.middle >= l1_end[e.block]
        # counts come from every rank, when the last of its programs has routed
        routed = [
            min(e.end for e in simulated.events if e.rank == r and e.kind == ROUTE) for r in (0, 1)
        ]
        assert min(e.end for e in mine if e.kind == WAIT_COUNTS) >= max(routed)
    pushed = [e.middle for e in simulated.events if e.role in MATH and e.kind == LINEAR2]
    combined = [e.end for e in simulated.events if e.kind == COMBINE]
    assert max(combined) > max(pushed)


def test_simulated_time_is_repeatable_and_does_not_change_results(simulated):
    assert small_trial().record() == simulated
    trial = small_trial()
    results = []
    for cost in (H200, None):
        trial.backend.machine.cost = cost
        for buffer, inputs in zip(trial.backend.buffers, trial.inputs, strict=True):
            buffer.write_inputs(inputs)
        policy = trial.backend.plan.policy(9)
        results.append(trial.backend.run(FUSED, [policy] * 2, [9, 9]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(bool(torch.isfinite(y).all()) for y in results[0])


@pytest.mark.parametrize(
    ("change", "activity"),
    [
        ({"flops_per_ns": H200.flops_per_ns / 50}, "L1"),
        ({"link_bytes_per_ns": H200.link_bytes_per_ns / 50}, "pull"),
        ({"memory_bytes_per_ns": H200.memory_bytes_per_ns / 50}, "combine"),
    ],
)
def test_a_slower_machine_shows_where_it_is_slower(simulated, change, activity):
    trial = small_trial()
    trial.backend.machine.cost = replace(H200, **change)

    def total(recorded: timeline.Timeline) -> int:
        return sum(s.end - s.begin for s in timeline.spans(recorded) if s.activity == activity)

    slow = trial.record()
    assert total(slow) > 2 * total(simulated)
    assert timeline.figures(slow).span_us > timeline.figures(simulated).span_us


@pytest.mark.parametrize(
    ("recipe", "tokens", "ranks", "routing"),
    [("fp8", 1, 1, "balanced"), ("mxfp4", 40, 2, "zipf"), ("fp8", 70, 1, "one-hot")],
)
def test_default_places_hold_all_events(recipe, tokens, ranks, routing):
    """And are not far more than are needed."""
    trial = small_trial(recipe=recipe, tokens=tokens, ranks=ranks, routing=routing)
    recorded = trial.record()
    assert recorded.full == ()
    used = Counter((e.rank, e.program, e.role) for e in recorded.events)
    assert max(used.values()) < trial.backend.plan.trace <= max(used.values()) + 12
    few = max(used.values()) - 1
    trial = small_trial(recipe=recipe, tokens=tokens, ranks=ranks, routing=routing, events=few)
    figures = timeline.figures(trial.record())
    lost = {ROLES[role] for (_, _, role), n in used.items() if n > few}
    assert lost <= set(figures.full) and "WARNING" in figures.lines()[5]


def test_a_call_that_unpacks_shows_it_and_loses_no_event(monkeypatch):
    """An event for each expert in each program; nobody multiplies before all have unpacked one."""
    monkeypatch.setattr(megamoe.plan, "UNPACK_ROWS", 64)
    trial = small_trial(recipe="mxfp4", tokens=150, ranks=1)
    plan = trial.backend.plan
    assert plan.policy(150).unpacks
    recorded = trial.record()
    assert recorded.full == ()
    unpacked = [e for e in recorded.events if e.kind == UNPACK and e.role == COMMUNICATE]
    experts = plan.config.experts_per_rank
    assert Counter(e.block for e in unpacked) == dict.fromkeys(range(experts), plan.programs)
    shown = [s for s in timeline.spans(recorded) if s.activity == "unpack"]
    assert len(shown) == len(unpacked)
    first = min(e.middle for e in recorded.events if e.role in MATH and e.kind == LINEAR1)
    assert first > max(e.end for e in unpacked if e.block == 0)


# --- the command ---------------------------------------------------------------------------------


def test_trace_command(tmp_path, capsys):
    arguments = ["trace", "--backend", "interpreter", "--shape", SHAPE, "--tokens", "5",
                 "--recipe", "mxfp4", "--out", str(tmp_path / "out")]  # fmt: skip
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "simulated time" in said and "hidden" in said
    items = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert {"pull", "L1", "L2", "push", "combine"} <= {item["name"] for item in items}


def test_trace_without_matplotlib_says_so(tmp_path, capsys, monkeypatch):
    from megamoe.timeline import plot as timeline_plot

    def missing():
        raise BenchError("a picture needs matplotlib, which is not installed")

    monkeypatch.setattr(timeline_plot, "require_matplotlib", missing)
    arguments = ["trace", "--backend", "interpreter", "--shape", SHAPE, "--tokens", "2",
                 "--out", str(tmp_path)]  # fmt: skip
    assert main(arguments) == 0
    assert "no picture: a picture needs matplotlib" in capsys.readouterr().out
    assert not (tmp_path / "trace.png").exists()


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--shape", "flash"], "too many for the interpreter"),
        (["--shape", "nope"], "unknown shape 'nope'"),
        (["--tokens", "0"], "tokens must be at least 1"),
        (["--events", "0"], "events must be at least 1"),
        (["--ranks", "0"], "ranks must be at least 1"),
    ],
)
def test_trace_refuses_in_one_line(extra, says, capsys):
    assert main(["trace", "--backend", "interpreter", *extra]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
