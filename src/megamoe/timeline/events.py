"""The timeline of a fused call: what every role of every program did when.

The kernel, compiled with `trace_events`, leaves rows of (tag, begin, middle, end) in the region
`trace`; here they become events, spans of one activity each, a Perfetto file, and a few figures.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import NamedTuple

import torch

from megamoe import diagnosis
from megamoe.config import RankInputs
from megamoe.launch import FUSED, GluonBackend, InterpreterBackend
from megamoe.plan import ROLES, TRACE_BLOCK_BIT, TRACE_KIND_BIT, TRACE_WORDS

MATH = tuple(role for role, name in enumerate(ROLES) if name.startswith("math "))
COMMUNICATE, LOAD_WEIGHTS, LOAD_TOKENS, SIGNAL = map(
    ROLES.index, ("communicate", "load weights", "load tokens", "signal")
)
LINEAR1, LINEAR2, UNPACK, ROUTE, WAIT_COUNTS, PULL, COMBINE, REHEARSAL = range(8)
# activities that move rows between ranks
COMMUNICATION = ("pull", "push", "combine")
LINE = 110  # characters of a line of text

Interval = tuple[int, int]


class Event(NamedTuple):
    """One record.  Times in nanoseconds of the GPU's global timer.

    role: index into plan.ROLES.  middle: the end of waiting (loaders, pull, combine) or of the
    K loop (math).
    """

    rank: int
    program: int
    role: int
    kind: int
    block: int
    tile: int
    begin: int
    middle: int
    end: int


class Span(NamedTuple):
    """One activity of one role."""

    rank: int
    program: int
    role: int
    activity: str
    begin: int
    end: int
    block: int
    tile: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The events of one call, by begin.  full: (rank, program, role) whose places were all used, so
    that the last ones may have been overwritten.  aligned: every rank's times were moved so that
    its first event begins at 0.
    """

    events: tuple[Event, ...]
    full: tuple[tuple[int, int, int], ...] = ()
    aligned: bool = False

    @property
    def begin(self) -> int:
        return min(event.begin for event in self.events)

    @property
    def end(self) -> int:
        return max(event.end for event in self.events)


class TimelineError(ValueError):
    """A recording that cannot be used."""


def _near(low: int, time: int) -> int:
    """The time nearest to `time` whose low 32 bits are `low`."""
    half = 1 << 31
    return time + (low - time + half) % (2 * half) - half


def _parts(tag: int) -> tuple[int, int, int]:
    """Kind, block and tile."""
    block = (tag >> TRACE_BLOCK_BIT) & ((1 << (TRACE_KIND_BIT - TRACE_BLOCK_BIT)) - 1)
    return tag >> TRACE_KIND_BIT, block, tag & ((1 << TRACE_BLOCK_BIT) - 1)


def read(traces: Sequence[torch.Tensor], *, programs: int) -> Timeline:
    """The timeline of one call from the region `trace` of each rank, in order of rank.

    traces: int32 [programs * roles * events, 4] each, zero where nothing was recorded: words
    without a sign, of which times are the low half of the timer's, so that a call may last two
    seconds.  The ranks' timers agree if the ranks are simulated or share a GPU; otherwise see
    :func:`align`.
    """
    events, full = [], []
    start: int | None = None  # a time of the rank's
    for rank, trace in enumerate(traces):
        rows = trace.shape[0] if trace.dim() == 2 else 0
        if trace.dtype != torch.int32 or rows == 0 or rows % (programs * len(ROLES)):
            raise TimelineError(
                f"rank {rank}: a trace of {programs} programs is int32 [{programs} * "
                f"{len(ROLES)} * events, {TRACE_WORDS}], got {trace.dtype} {list(trace.shape)}"
            )
        words = trace.cpu().view(programs, len(ROLES), -1, TRACE_WORDS).long() & 0xFFFFFFFF
        used = words.any(-1)
        if not used.any():
            continue
        first = int(words[used][0, 1])
        start = first if start is None else _near(first, start)
        for program, role in used[:, :, -1].nonzero().tolist():
            full.append((rank, program, role))
        for (program, role, _), row in zip(
            used.nonzero().tolist(), words[used].tolist(), strict=True
        ):
            tag, *low = row
            begin, middle, end = (_near(time, start) for time in low)
            events.append(Event(rank, program, role, *_parts(tag), begin, middle, end))
    if not events:
        raise TimelineError("nothing was recorded: was the plan made with trace events?")
    events.sort(key=lambda event: event.begin)
    return Timeline(events=tuple(events), full=tuple(full))


def align(timeline: Timeline) -> Timeline:
    """The same events with every rank's first one at 0: global timers of different GPUs are not in
    step.  What lies between two ranks is then only as right as that they began together.
    """
    begin: dict[int, int] = {}
    for event in timeline.events:
        begin[event.rank] = min(event.begin, begin.get(event.rank, event.begin))
    moved = [
        event._replace(
            begin=event.begin - begin[event.rank],
            middle=event.middle - begin[event.rank],
            end=event.end - begin[event.rank],
        )
        for event in timeline.events
    ]
    moved.sort(key=lambda event: event.begin)
    return replace(timeline, events=tuple(moved), aligned=True)


def record(
    backend: GluonBackend | InterpreterBackend, inputs: Sequence[RankInputs], *, calls: int = 1
) -> Timeline:
    """Run fused calls on the same inputs and read the timeline of the last one.

    backend: made with Plan(trace=N).  The calls before the last warm up the GPU.
    """
    tokens = [i.x.shape[0] for i in inputs]
    policies = [backend.plan.policy(n) for n in tokens]
    for _ in range(calls):
        for buffer, rank_inputs in zip(backend.buffers, inputs, strict=True):
            buffer.write_inputs(rank_inputs)
            buffer.view("trace").zero_()
        backend.run(FUSED, policies, tokens)
        for rank, buffer in enumerate(backend.buffers):
            diagnosis.check(buffer, rank=rank)
    return read([b.view("trace") for b in backend.buffers], programs=backend.plan.programs)


# --- activities ----------------------------------------------------------------------------------


def spans(timeline: Timeline) -> list[Span]:
    """The events cut into activities.  A K loop is "wait for operands" until the tokens of its tile
    could be loaded, and "L1" or "L2" from then on.
    """
    ready = _tokens_ready(timeline.events)
    out = []
    for event in timeline.events:
        for activity, begin, end in _activities(event, ready):
            if end > begin:
                out.append(
                    Span(
                        event.rank, event.program, event.role, activity, begin, end,
                        event.block, event.tile,
                    )
                )  # fmt: skip
    return out


def _tokens_ready(events: Iterable[Event]) -> dict[tuple[int, ...], int]:
    """When the token loader of a program stopped waiting, by (rank, program, kind, block, tile)."""
    return {
        (e.rank, e.program, e.kind, e.block, e.tile): e.middle
        for e in events
        if e.role == LOAD_TOKENS
    }


def _activities(event: Event, ready: dict[tuple[int, ...], int]) -> list[tuple[str, int, int]]:
    begin, middle, end = event.begin, event.middle, event.end
    if event.kind == REHEARSAL:
        return [("rehearsal", begin, end)]
    if event.kind == COMBINE:
        return [("wait for partials", begin, middle), ("combine", middle, end)]
    if event.role in MATH:
        task = (event.rank, event.program, event.kind, event.block, event.tile)
        start = min(max(begin, ready.get(task, begin)), middle)
        layer, after = ("L1", "activation") if event.kind == LINEAR1 else ("L2", "push")
        return [("wait for operands", begin, start), (layer, start, middle), (after, middle, end)]
    if event.role == LOAD_WEIGHTS:
        return [("load weights", begin, end)]
    if event.role == LOAD_TOKENS:
        return [("wait for rows", begin, middle), ("load tokens", middle, end)]
    if event.role == SIGNAL:
        return [("signal", begin, end)]
    if event.role == COMMUNICATE:
        return {
            ROUTE: [("route", begin, end)],
            WAIT_COUNTS: [("wait for counts", begin, end)],
            UNPACK: [("unpack", begin, end)],
            PULL: [("wait for slot", begin, middle), ("pull", middle, end)],
        }[event.kind]
    # a helper of the math, such as the expander
    return [(family(event.role), begin, end)]


def family(role: int) -> str:
    """The name of a role without its number: "expand" of "expand 0"."""
    return ROLES[role].rstrip("0123456789").rstrip()


# --- intervals -----------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order."""
    out: list[Interval] = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> int:
    """Time in both; each disjoint and in order."""
    total = i = j = 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


# --- figures -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a timeline says in numbers; times in microseconds.

    span_us: first begin to last end.
    math_share: of the span, the part that a math partition is in K loops whose tokens are there;
    mean over the math partitions of all programs.
    first_tile_us: when a program begins its first such K loop: first, median and last program.
    tail_us: from the end of the last K loop to the end.
    communication_us: by activity, the mean over the programs of the time in which some role pulls,
    pushes or combines (waiting not counted).
    hidden: on each program, the time in which some role pulls, pushes or combines, and some math
    partition is in such a K loop; over all programs, divided by the time in which some role pulls,
    pushes or combines.  None where nothing is communicated.
    full: in how many programs a role has used all its places, by the role's name.
    aligned: see :class:`Timeline`.
    """

    ranks: int
    programs: int
    partitions: int
    span_us: float
    math_share: float
    first_tile_us: tuple[float, float, float]
    tail_us: float
    communication_us: dict[str, float]
    hidden: float | None
    full: dict[str, int]
    aligned: bool = False

    def lines(self) -> list[str]:
        """Five lines of text, and more about what the recording cannot show."""
        each = ", ".join(f"{name} {us:.1f}" for name, us in self.communication_us.items())
        hidden = "nothing to hide" if self.hidden is None else f"{100 * self.hidden:.1f} %"
        first, middle, last = self.first_tile_us
        lines = [
            f"span           {self.span_us:.1f} us, {self.ranks} rank(s), {self.programs} programs "
            f"each, {self.partitions} math partitions in a program",
            f"matrix work    a math partition is in K loops {100 * self.math_share:.1f} % of the "
            "span",
            f"first tile     matrix work begins after {first:.1f} us (median {middle:.1f}, last "
            f"{last:.1f}); tail {self.tail_us:.1f} us after the last K loop",
            f"communication  us a program: {each}",
            f"hidden         {hidden} of the communication time lies under matrix work of the same "
            "SM",
        ]
        if self.aligned:
            lines.append(
                "alignment      ranks are aligned at their first event: the timers of their GPUs "
                "are not in step"
            )
        if self.full:
            roles = ", ".join(f"{role} ({programs})" for role, programs in self.full.items())
            warning = (
                "WARNING        events lost, record more with --events: all places were used by "
                f"these roles (programs): {roles}"
            )
            lines += wrap(warning, width=LINE, subsequent_indent=" " * 15)
        return lines


def figures(timeline: Timeline) -> Figures:
    """See :class:`Figures`."""
    origin, span = timeline.begin, timeline.end - timeline.begin
    by_activity: dict[str, dict[tuple[int, int], list[Interval]]] = defaultdict(
        lambda: defaultdict(list)
    )
    partitions, in_loops, last_loop = set(), 0, origin
    for s in spans(timeline):
        where = (s.rank, s.program)
        if s.activity in ("L1", "L2"):
            by_activity["matrix"][where].append((s.begin, s.end))
            partitions.add((*where, s.role))
            in_loops += s.end - s.begin
            last_loop = max(last_loop, s.end)
        elif s.activity in COMMUNICATION:
            by_activity[s.activity][where].append((s.begin, s.end))
            by_activity["any"][where].append((s.begin, s.end))
    if not partitions:
        lost = ": events were lost, record more with --events" if timeline.full else ""
        raise TimelineError("the recording holds no matrix work" + lost)
    places = {(event.rank, event.program) for event in timeline.events}
    matrix = {where: union(parts) for where, parts in by_activity["matrix"].items()}
    moving = {where: union(parts) for where, parts in by_activity["any"].items()}
    total = sum(map(length, moving.values()))
    under = sum(overlap(parts, matrix.get(where, [])) for where, parts in moving.items())
    starts = sorted(parts[0][0] - origin for parts in matrix.values())
    ranks = len({rank for rank, _ in places})
    return Figures(
        ranks=ranks,
        programs=len(places) // ranks,
        partitions=len({role for *_, role in partitions}),
        span_us=span / 1e3,
        math_share=in_loops / (len(partitions) * span),
        first_tile_us=tuple(ns / 1e3 for ns in (starts[0], median(starts), starts[-1])),
        tail_us=(timeline.end - last_loop) / 1e3,
        communication_us={
            name: sum(length(union(p)) for p in by_activity[name].values()) / len(places) / 1e3
            for name in COMMUNICATION
        },
        hidden=under / total if total else None,
        full=_by_role(timeline.full),
        aligned=timeline.aligned,
    )


def _by_role(full: Iterable[tuple[int, int, int]]) -> dict[str, int]:
    counts = Counter(role for *_, role in full)
    return {ROLES[role]: counts[role] for role in sorted(counts)}


# --- Perfetto ----------------------------------------------------------------------------------


def write_perfetto(timeline: Timeline, path: Path) -> None:
    """The spans as a Chrome trace (JSON), which ui.perfetto.dev opens: a process for each program,
    a thread for each role, times in microseconds from the first begin.  If ranks were aligned, the
    file says so under otherData.
    """
    origin = timeline.begin
    items: list[dict[str, object]] = []
    for rank, program, role in sorted({(e.rank, e.program, e.role) for e in timeline.events}):
        pid = _process(rank, program)
        if not items or items[-1]["pid"] != pid:
            name = f"rank {rank}, program {program}"
            items.append(_metadata("process_name", pid, 0, name=name))
            items.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        items.append(_metadata("thread_name", pid, role, name=ROLES[role]))
        items.append(_metadata("thread_sort_index", pid, role, sort_index=role))
    for s in spans(timeline):
        items.append(
            {
                "name": s.activity,
                "cat": "wait" if s.activity.startswith("wait") else "work",
                "ph": "X",
                "pid": _process(s.rank, s.program),
                "tid": s.role,
                "ts": round((s.begin - origin) / 1e3, 3),
                "dur": round((s.end - s.begin) / 1e3, 3),
                "args": {"block": s.block, "tile": s.tile},
            }
        )
    out: dict[str, object] = {"displayTimeUnit": "ns", "traceEvents": items}
    if timeline.aligned:
        out["otherData"] = {"alignment": "each rank's times begin at its own first event"}
    with path.open("w") as stream:
        json.dump(out, stream, separators=(",", ":"))


def _process(rank: int, program: int) -> int:
    return rank * 10_000 + program + 1


def _metadata(what: str, pid: int, tid: int, **arguments: object) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
