"""Small bar charts in plain text."""

from __future__ import annotations

from collections.abc import Sequence

MOST_BARS = 32
BAR_WIDTH = 40
LEVELS = "▁▂▃▄▅▆▇█"
NONE = "·"


def sparkline(counts: Sequence[int]) -> str:
    """One character per count (or per group of neighbours, at most 64); "·" marks an exact zero."""
    sums = [total for _, total in _grouped(counts, 2 * MOST_BARS)]
    most = max(sums, default=0)
    return "".join(LEVELS[(len(LEVELS) - 1) * n // most] if n else NONE for n in sums)


def bars(counts: Sequence[int]) -> list[str]:
    """One line per expert; more than `MOST_BARS` experts are summed in groups of neighbours."""
    groups = _grouped(counts, MOST_BARS)
    most = max((total for _, total in groups), default=0)
    labels = [str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g, _ in groups]
    width = max(map(len, labels), default=0)
    digits = len(str(most))
    return [
        f"{label:>{width}}  {total:>{digits}}  {'█' * _length(total, most)}".rstrip()
        for label, (_, total) in zip(labels, groups, strict=True)
    ]


def _length(total: int, most: int) -> int:
    return max(1, round(BAR_WIDTH * total / most)) if total else 0


def _grouped(counts: Sequence[int], most: int) -> list[tuple[range, int]]:
    size = max(1, -(-len(counts) // most))
    starts = range(0, len(counts), size)
    return [(range(s, min(s + size, len(counts))), sum(counts[s : s + size])) for s in starts]
