"""Timelines: reading, activities, figures, files, and the interpreter's simulated time.

Why this is enough: the interval arithmetic is compared with counting nanoseconds one by one on
random cases; the figures with a recording small enough to work out by hand, in which every figure
has another value; and one recorded call of two ranks has every role, kind and wait that a call can
have, so what must precede what is checked on all of its events.
"""

import json
import random
from dataclasses import replace

import pytest
import torch

from megamoe import timeline
from megamoe.bench_cases import BenchError
from megamoe.cli import main
from megamoe.interpreter.cost import H200
from megamoe.launch import FUSED
from megamoe.plan import ROLES
from megamoe.timeline import (
    COMBINE,
    COMMUNICATE,
    LINEAR1,
    LINEAR2,
    LOAD_TOKENS,
    LOAD_WEIGHTS,
    MATH_ROLES,
    PULL,
    ROUTE,
    SIGNAL,
    WAIT_COUNTS,
    Event,
    TimelineError,
)
from megamoe.timeline_trial import make

SHAPE = "256,256,4,2"


def trace_of(events: list[Event], *, programs: int, places: int) -> list[torch.Tensor]:
    """The region `trace` of every rank, as the kernel writes it."""
    ranks = 1 + max(event.rank for event in events)
    words = torch.zeros(ranks, programs, len(ROLES), places, 4, dtype=torch.int64)
    used: dict[tuple[int, int, int], int] = {}
    for e in events:
        where = (e.rank, e.program, e.role)
        place = used.get(where, 0)
        used[where] = place + 1
        tag = e.kind << 48 | e.block << 16 | e.tile
        words[(*where, place)] = torch.tensor([tag, e.begin, e.middle, e.end])
    return list(words.flatten(1, 3))


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
    assert "record more events" in timeline.figures(recorded).lines()[-1]


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        (torch.zeros(16, 4, dtype=torch.int64), "nothing was recorded"),
        (torch.zeros(15, 4, dtype=torch.int64), "int64"),
        (torch.zeros(16, 4, dtype=torch.int32), "int32"),
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
    events = [event for event in BY_HAND if event.role >= MATH_ROLES]
    recorded = timeline.read(trace_of(events, programs=2, places=4), programs=2)
    with pytest.raises(TimelineError, match="no matrix work"):
        timeline.figures(recorded)


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
    push = next(item for item in spans if item["name"] == "push")
    assert (push["ts"], push["dur"], push["args"]) == (0.4, 0.06, {"block": 3, "tile": 7})
    assert names[push["pid"], push["tid"]] == "math 0"


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from megamoe import timeline_plot

    recorded = by_hand()
    path = tmp_path / "trace.png"
    timeline_plot.plot(recorded, timeline.figures(recorded), path, title="by hand")
    assert path.read_bytes().startswith(b"\x89PNG")


# --- simulated time ------------------------------------------------------------------------------


def small_trial(**options):
    given = {"backend": "interpreter", "shape": SHAPE, "tokens": 9, "ranks": 2, "recipe": "fp8"}
    return make(**(given | options))


@pytest.fixture(scope="module")
def simulated():
    return small_trial().record()


def test_every_role_and_kind_is_there(simulated):
    seen = {(event.role, event.kind) for event in simulated.events}
    math = {(role, kind) for role in range(4) for kind in (LINEAR1, LINEAR2)}
    helpers = {(r, k) for r in range(LOAD_WEIGHTS, SIGNAL + 1) for k in (LINEAR1, LINEAR2)}
    communicate = {(COMMUNICATE, kind) for kind in (ROUTE, WAIT_COUNTS, PULL)}
    assert math | helpers | communicate <= seen
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
            if e.role < MATH_ROLES and e.kind == LINEAR1:
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
    pushed = [e.middle for e in simulated.events if e.role < MATH_ROLES and e.kind == LINEAR2]
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
    from megamoe import timeline_plot

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
