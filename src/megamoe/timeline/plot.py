"""A picture of a timeline: what every SM did over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megamoe.bench.report import require_matplotlib
from megamoe.plan import ROLES
from megamoe.timeline.events import (
    COMMUNICATE,
    LOAD_TOKENS,
    LOAD_WEIGHTS,
    MATH,
    Figures,
    Span,
    Timeline,
    family,
    spans,
    union,
)

COLOURS = {
    "route": "#7f6a93",
    "unpack": "#4d5fa3",
    "pull": "#2a78b5",
    "rehearsal": "#c9b8a3",
    "load weights": "#8fa3ad",
    "load tokens": "#5bb0a8",
    "expand": "#b5739d",
    "L1": "#2f8f4e",
    "L2": "#8cc152",
    "activation": "#e2b93b",
    "push": "#e07b39",
    "combine": "#c0392b",
    "signal": "#444444",
    "wait": "#ececec",
}
MATH_WORK = ("rehearsal", "L1", "L2", "activation")
CURVES = ("L1", "L2", "pull", "push", "combine")
CURVE_POINTS = 600
OTHER = "#bbbbbb"  # an activity without a colour of its own
Row = tuple[int, int]


def plot(timeline: Timeline, figures: Figures, path: Path, *, title: str) -> None:
    """Write a PNG: the share of SMs busy with each activity; a panel each for dispatch and combine,
    loads, and math, whose lines are the programs; and all roles of one program.

    Raises BenchError where matplotlib is missing.
    """
    pyplot = require_matplotlib()
    parts = spans(timeline)
    origin = timeline.begin
    programs = sorted({(s.rank, s.program) for s in parts})
    place = {program: line for line, program in enumerate(programs)}
    panels: list[tuple[str, Callable[[Span], bool]]] = [
        ("dispatch", lambda s: s.role == COMMUNICATE and s.activity != "combine"),
        ("load weights", lambda s: s.role == LOAD_WEIGHTS),
        ("load tokens", lambda s: s.role == LOAD_TOKENS),
        ("math", lambda s: s.role in MATH and s.activity in MATH_WORK),
        ("push", lambda s: s.activity == "push"),
        ("combine", lambda s: s.activity == "combine"),
    ]
    if any(family(s.role) == "expand" for s in parts):
        panels.insert(3, ("expand", lambda s: s.activity == "expand"))
    figure, axes = pyplot.subplots(
        len(panels) + 2,
        1,
        figsize=(15, 20),
        sharex=True,
        layout="constrained",
        height_ratios=[1.6, *[2] * len(panels), 1.8],
    )
    _curves(axes[0], parts, origin, timeline.end, len(programs))
    for axis, (name, shows) in zip(axes[1:-1], panels, strict=True):
        chosen = [s for s in parts if shows(s) and not s.activity.startswith("wait")]
        _rectangles(axis, chosen, origin, lambda s: place[s.rank, s.program])
        axis.set_ylim(len(programs) - 0.5, -0.5)
        axis.set_ylabel(f"{name}\nprogram")
        _mark_ranks(axis, programs)
    sample = programs[len(programs) // 2]
    mine = [s for s in parts if (s.rank, s.program) == sample]
    roles = sorted({s.role for s in mine})
    _rectangles(axes[-1], mine, origin, lambda s: roles.index(s.role))
    axes[-1].set_yticks(range(len(roles)), [ROLES[role] for role in roles])
    axes[-1].set_ylim(len(roles) - 0.5, -0.5)
    axes[-1].set_ylabel(f"rank {sample[0]}, program {sample[1]}")
    axes[-1].set_xlabel("microseconds")
    axes[-1].set_xlim(0, figures.span_us)
    used = {_colour_name(s.activity) for s in parts}
    named = [name for name in COLOURS if name in used] + sorted(used - set(COLOURS))
    handles = [
        pyplot.Rectangle((0, 0), 1, 1, color=COLOURS.get(name, OTHER), label=name) for name in named
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.suptitle("\n".join([title, *figures.lines()]), ha="left", x=0.02, family="monospace")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _mark_ranks(axis: Any, programs: Sequence[Row]) -> None:
    """With several ranks, whose programs follow each other: where each begins."""
    ranks = [rank for rank, _ in programs]
    first = [ranks.index(rank) for rank in sorted(set(ranks))]
    if len(first) > 1:
        axis.set_yticks(first, [f"rank {ranks[line]}" for line in first])
        for line in first[1:]:
            axis.axhline(line - 0.5, color="black", linewidth=0.6)


def _colour_name(activity: str) -> str:
    return "wait" if activity.startswith("wait") else activity


def _curves(axis: Any, parts: Sequence[Span], origin: int, end: int, programs: int) -> None:
    """Share of the programs in which some role is at each activity, at evenly spaced times."""
    step = (end - origin) / CURVE_POINTS
    times = [(i + 0.5) * step for i in range(CURVE_POINTS)]
    for name in CURVES:
        by_program: dict[Row, list[tuple[int, int]]] = defaultdict(list)
        for s in parts:
            if s.activity == name:
                by_program[s.rank, s.program].append((s.begin - origin, s.end - origin))
        change = [0] * (CURVE_POINTS + 1)
        for intervals in by_program.values():
            for begin, stop in union(intervals):
                first = min(CURVE_POINTS, max(0, round(begin / step)))
                last = min(CURVE_POINTS, max(0, round(stop / step)))
                change[first] += 1
                change[last] -= 1
        busy, share = 0, []
        for i in range(CURVE_POINTS):
            busy += change[i]
            share.append(100 * busy / programs)
        axis.plot([t / 1e3 for t in times], share, color=COLOURS[name], label=name, linewidth=1.2)
    axis.set_ylim(0, 102)
    axis.set_ylabel("% of programs\nbusy with")
    axis.grid(alpha=0.3)


def _rectangles(axis: Any, parts: Sequence[Span], origin: int, line: Callable[[Span], int]) -> None:
    from matplotlib.collections import PolyCollection

    by_colour: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for s in parts:
        left, right, y = (s.begin - origin) / 1e3, (s.end - origin) / 1e3, line(s)
        corners = [(left, y - 0.45), (right, y - 0.45), (right, y + 0.45), (left, y + 0.45)]
        by_colour[COLOURS.get(_colour_name(s.activity), OTHER)].append(corners)
    for colour, polygons in by_colour.items():
        axis.add_collection(PolyCollection(polygons, facecolors=colour, linewidths=0))
