"""Stored results of `megamoe bench --json` as the Markdown tables of docs/benchmarks.md.

python benchmarks/tables.py benchmarks/h200_x2.json benchmarks/h200_x1.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

HEAD = (
    "| tokens a rank | block_m | fused us | p10-p90 | warm | call | chain | chain / fused | TFLOPS "
    "| memory GB/s | NVLink GB/s | floor us | of floor |"
)
RULE = "|---" * 13 + "|"


def number(value: float | None) -> str:
    """Three digits, or all of a larger number."""
    if value is None:
        return ""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def line(row: dict) -> str:
    low, high = row["spread_us"]
    cells = [
        f"{row['tokens']}{' (bits differ from the chain)' if row['equal'] is False else ''}",
        row["block_m"],
        f"**{number(row['fused_us'])}**",
        f"{number(low)}-{number(high)}",
        *(number(row[name]) for name in ("warm_us", "call_us", "chain_us")),
        "" if row["times_chain"] is None else f"{row['times_chain']:.2f}",
        *(f"{row[name]:.0f}" for name in ("tflops", "memory_gbs", "link_gbs")),
        f"{number(row['floor_us'])} {row['floor_of']}",
        f"{row['floor_fraction']:.2f}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def lines(report: dict) -> Iterator[str]:
    """The limits, then a table for each shape, recipe and routing."""
    machine, limits = report["machine"], report["limits"]
    gpus = report["options"]["gpus"]
    yield f"## {gpus} x {machine['gpu']}"
    yield ""
    yield (
        f"torch {machine['torch']}, Triton {machine['triton']}. Limits measured in the same run: "
        f"memory {limits['memory_gbs']:.0f} GB/s, NVLink {limits['link_gbs'] or 0:.0f} GB/s into a "
        f"GPU, cuBLAS {limits['fp8_tflops']:.0f} TFLOPS (e4m3), {limits['bf16_tflops']:.0f} (bf16)."
    )

    def case(row: dict) -> tuple:
        return row["shape"], row["recipe"], row["routing"]

    for (shape, recipe, routing), rows in groupby(report["rows"], case):
        yield from ("", f"### {shape}, `{recipe}`, {routing}, {gpus} GPU(s)", "", HEAD, RULE)
        for row in rows:
            yield line(row) if row["error"] is None else f"| {row['tokens']} | {row['error']} |"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        print("\n".join(lines(json.loads(Path(path).read_text()))), end="\n\n")
