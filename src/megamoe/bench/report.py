"""What the benchmark hands over: a table, JSON, a plot, and a comparison with a stored run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megamoe.bench.cases import BenchError
from megamoe.bench.run import BenchOptions, Limits, Row

FORMAT = "megamoe-bench-1"
ALLOWED_LOSS = 0.08  # of the fraction of the floor, before a check fails
COLUMNS = (
    # title, width
    ("shape", 10),
    ("recipe", 9),
    ("routing", 8),
    ("tokens", 6),
    ("fused us", 9),
    ("p10-p90", 15),
    ("warm us", 9),
    ("call us", 9),
    ("chain us", 9),
    ("TFLOPS", 6),
    ("mem GB/s", 8),
    ("link GB/s", 9),
    ("floor us", 14),
    ("of floor", 8),
    ("x chain", 7),
)


@dataclass(kw_only=True)
class Report:
    """A whole run; `machine` says where, `limits` what that machine reached."""

    machine: dict[str, object]
    options: BenchOptions
    limits: Limits | None = None
    rows: list[Row] = field(default_factory=list)

    def add(self, result: Limits | Row) -> None:
        if isinstance(result, Limits):
            self.limits = result
        else:
            self.rows.append(result)

    @property
    def failed(self) -> bool:
        return any(row.failed for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "machine": self.machine,
            "options": asdict(self.options),
            "limits": None if self.limits is None else asdict(self.limits),
            "rows": [asdict(row) for row in self.rows],
        }


def limits_line(limits: Limits) -> str:
    link = f", NVLink {limits.link_gbs:.0f} GB/s into a GPU" if limits.link_gbs else ""
    return (
        f"limits measured now: memory {limits.memory_gbs:.0f} GB/s{link}, cuBLAS "
        f"{limits.fp8_tflops:.0f} TFLOPS e4m3, {limits.bf16_tflops:.0f} bf16"
    )


def header_line() -> str:
    return "  ".join(title.rjust(width) for title, width in COLUMNS)


def row_line(row: Row) -> str:
    """One line of the table, under :func:`header_line`."""
    head = (row.shape, row.recipe, row.routing, str(row.tokens))
    if row.error is not None:
        cells = [c.rjust(w) for c, (_, w) in zip(head, COLUMNS, strict=False)]
        return "  ".join(cells) + f"  FAILED {row.error.splitlines()[0]}"
    cells = (
        *head,
        _number(row.fused_us),
        "-".join(_number(us) for us in row.spread_us),
        _number(row.warm_us),
        _number(row.call_us),
        _number(row.chain_us),
        _number(row.tflops),
        _number(row.memory_gbs),
        _number(row.link_gbs) if row.ranks > 1 else "",
        f"{_number(row.floor_us)} {row.floor_of}",
        f"{row.floor_fraction:.2f}",
        "" if row.times_chain is None else f"{row.times_chain:.2f}",
    )
    line = "  ".join(cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))
    return line + ("  FAILED fused and chain differ" if row.equal is False else "")


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


# --- comparison ---------------------------------------------------------------------------------


def load_rows(path: Path) -> dict[tuple[object, ...], float]:
    """Fraction of the floor by case, of a stored report.  Raises BenchError."""
    try:
        stored = json.loads(path.read_text())
        rows = stored["rows"] if stored.get("format") == FORMAT else None
    except (ValueError, AttributeError):
        rows = None
    if rows is None:
        raise BenchError(f"{path} is not a report of this program (format {FORMAT})")
    keys = ("shape", "recipe", "routing", "tokens", "ranks")
    return {
        tuple(row[key] for key in keys): row["floor_fraction"]
        for row in rows
        if row["floor_fraction"] is not None
    }


def regressions(rows: Iterable[Row], stored: dict[tuple[object, ...], float]) -> list[str]:
    """A line for each case that is further from its floor than `ALLOWED_LOSS` permits, or failed.

    Only cases that `stored` has are compared; none in common raises BenchError.
    """
    lines, compared = [], 0
    for row in rows:
        before = stored.get(row.key)
        if before is None:
            continue
        compared += 1
        name = f"{row.shape} {row.recipe} {row.routing}, {row.tokens} tokens, {row.ranks} ranks"
        if row.floor_fraction is None:
            lines.append(f"{name}: failed, was at {before:.3f} of its floor")
        elif row.floor_fraction < before * (1 - ALLOWED_LOSS):
            lines.append(
                f"{name}: {row.floor_fraction:.3f} of its floor, was {before:.3f} "
                f"({100 * (row.floor_fraction / before - 1):+.1f} %, allowed "
                f"-{100 * ALLOWED_LOSS:.0f} %)"
            )
    if not compared:
        raise BenchError("the stored report has none of the cases that were run")
    return lines


# --- plot ----------------------------------------------------------------------------------------


def require_matplotlib() -> Any:
    """matplotlib.pyplot without a display; raises BenchError that says how to get it."""
    try:
        import matplotlib
    except ImportError:
        raise BenchError(
            "a picture needs matplotlib, which is not installed: pip install 'megamoe[plot]'"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def plot(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Time against tokens with the floor, one panel for each shape and routing."""
    pyplot = require_matplotlib()
    rows = [row for row in rows if row.error is None]
    if not rows:
        raise BenchError("no case has a result: there is nothing to plot")
    panels = list(dict.fromkeys((row.shape, row.routing, row.ranks) for row in rows))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6.4 * len(panels), 5.2), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes[0], panels, strict=True):
        mine = [row for row in rows if (row.shape, row.routing, row.ranks) == panel]
        _plot_panel(axis, mine)
        shape, routing, ranks = panel
        axis.set_title(f"{shape}, {routing} routing, {ranks} rank{'s' if ranks > 1 else ''}")
    figure.suptitle(title)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _plot_panel(axis: Any, rows: Sequence[Row]) -> None:
    for number, recipe in enumerate(dict.fromkeys(row.recipe for row in rows)):
        mine = sorted((row for row in rows if row.recipe == recipe), key=lambda row: row.tokens)
        tokens = [row.tokens for row in mine]
        colour = f"C{number}"
        axis.plot(tokens, [r.fused_us for r in mine], "o-", color=colour, label=f"{recipe} fused")
        low, high = ([row.spread_us[i] for row in mine] for i in (0, 1))
        axis.fill_between(tokens, low, high, color=colour, alpha=0.2, linewidth=0)
        chain = [(row.tokens, row.chain_us) for row in mine if row.chain_us is not None]
        if chain:
            axis.plot(*zip(*chain, strict=True), "x:", color=colour, label=f"{recipe} chain")
        axis.plot(
            tokens, [row.floor_us for row in mine], "--", color=colour, label=f"{recipe} floor"
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({row.tokens for row in rows})
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.minorticks_off()
    axis.set_xlabel("tokens per rank")
    axis.set_ylabel("microseconds per call")
    axis.grid(alpha=0.3)
    axis.legend()
