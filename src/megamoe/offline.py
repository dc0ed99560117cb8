"""Compiling the kernels for sm_90a where there is no GPU, and reading what came out.

    python -m megamoe.offline      all that the tile policy can pick, into docs/compiled.md

Triton brings its assembler along, so all that a launch would compile can be compiled on any Linux
machine, with the same arguments and options.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from megamoe import sass
from megamoe.config import RECIPES, X_SCALES, MoEConfig
from megamoe.kernel import compat, mega
from megamoe.launch import CHAIN, FUSED, OPTIONS, Launch, Tile, shared_layout, tiles
from megamoe.plan import (
    BLOCK_MS,
    HALF_N,
    MATH_PARTITIONS,
    SHARED_BYTES,
    TILES,
    KernelSpec,
    Plan,
    TilePolicy,
    tile_policy,
)

CAPABILITY = 90  # Triton compiles for sm_90a then
WARP = 32
# the shape of one layer; other shapes give the same loops with other trip counts
SHAPE = {
    "hidden": 4096,
    "intermediate": 2048,
    "experts": 256,
    "topk": 6,
    "ranks": 8,
    "capacity": 8192,
}
CLAMP = 10.0
# kernel arguments that are neither descriptors nor constants, by Triton's names of types
SCALARS = {
    "buffer": "*i8",
    "peers": "*i64",
    "rank": "i32",
    "tokens": "i32",
    "y": "*bf16",
    "w1_codes": "*i8",
    "w2_codes": "*i8",
    "w1_offset": "*i32",
    "w2_offset": "*i32",
    "unpacked": "*fp8e4nv",
    "w1_scale": "*fp32",
    "w2_scale": "*fp32",
}
TYPE_NAMES = {
    "bfloat16": "bf16",
    "float8e4nv": "fp8e4nv",
    "int8": "i8",
    "int32": "i32",
    "float32": "fp32",
}


class OfflineError(RuntimeError):
    """A kernel that cannot be compiled here; the message says why."""


@dataclass(frozen=True)
class Case:
    """One kernel to compile: a configuration that fixes block_m, which launch of a forward, and the
    rows of an average expert, block_m if not given.
    """

    config: MoEConfig
    launch: Launch = FUSED[0]
    rows: float | None = None

    @property
    def policy(self) -> TilePolicy:
        return tile_policy(self.config, self.rows or self.config.block_m)

    @property
    def spec(self) -> KernelSpec:
        chain = self.launch not in FUSED
        return Plan(self.config, chain=chain).spec(self.policy, self.launch.phases)

    @property
    def name(self) -> str:
        """Short and unique among :func:`all_cases`."""
        c = self.config
        parts = [c.recipe, str(c.block_m)]
        if self.policy.block_n != HALF_N:
            parts.append(f"by-{self.policy.block_n}")
        if self.launch not in FUSED:
            parts.append(self.launch.phases)
        if c.x_scales != X_SCALES[c.recipe][0]:
            parts.append(c.x_scales)
        if c.clamp is not None:
            parts.append("clamp")
        return "-".join(parts)


@dataclass(frozen=True)
class Compiled:
    """What the assembler made of one kernel.

    registers: of a thread at launch, before the roles trade them. stack: bytes of local memory a
    thread has. shared: bytes a CTA needs. warps: of a CTA. seconds: to compile, near 0 from a
    cache. sass: the text of `cuobjdump --dump-sass`.
    """

    case: Case
    registers: int
    stack: int
    shared: int
    warps: int
    seconds: float
    sass: str


@dataclass(frozen=True)
class Report:
    """The counts of one compiled kernel; see :class:`Compiled` for the first ones.

    loops: its K loops, in each math partition one for each turn of L1 and one of L2. expanders: the
    loops over blocks of codes, one in the expander of MXFP4 if there is one. stl, ldl: spill stores
    and loads anywhere.
    reused_barriers: see :func:`megamoe.sass.reused_barriers`.
    """

    case: Case
    registers: int
    stack: int
    shared: int
    warps: int
    seconds: float
    instructions: int
    qgmma: int
    hgmma: int
    utmaldg: int
    usetmaxreg: int
    stl: int
    ldl: int
    loops: tuple[sass.Loop, ...]
    expanders: tuple[sass.Loop, ...]
    reused_barriers: tuple[int, ...]

    @property
    def loop_spills(self) -> tuple[int, int]:
        """Spill stores and loads inside K loops, per turn, over all of them."""
        return _spills(self.loops)

    @property
    def expander_spills(self) -> tuple[int, int]:
        """The same inside the loop of an expander."""
        return _spills(self.expanders)

    @property
    def serialised(self) -> int:
        return sum(loop.serialised for loop in self.loops)


def _spills(loops: Sequence[sass.Loop]) -> tuple[int, int]:
    return sum(loop.count("STL") for loop in loops), sum(loop.count("LDL") for loop in loops)


# --- what to compile ---------------------------------------------------------------------------


def policy_cases() -> list[Case]:
    """The fused kernel of every recipe in every tile the policy can pick."""
    cases = [_case(recipe, block_m, most) for recipe in RECIPES for most, block_m in TILES]
    return list({(case.config.recipe, case.policy): case for case in cases}.values())


def variant_cases() -> list[Case]:
    """The fused kernel with x scales other than the default, with a clamp: in the narrowest and the
    widest tile.
    """
    ends = [(block_m, most) for most, block_m in (TILES[0], TILES[-1])]
    scales = [
        _case(recipe, *tile, x_scales=name)
        for recipe in RECIPES
        for name in X_SCALES[recipe][1:]
        for tile in ends
    ]
    return scales + [_case(recipe, *tile, clamp=CLAMP) for recipe in RECIPES for tile in ends]


def chain_cases() -> list[Case]:
    """The launches of the unfused chain, once a recipe."""
    return [replace(_case(recipe, 64), launch=launch) for recipe in RECIPES for launch in CHAIN]


def all_cases() -> list[Case]:
    return policy_cases() + variant_cases() + chain_cases()


def _case(recipe: str, block_m: int, rows: float | None = None, **options: object) -> Case:
    return Case(MoEConfig(recipe=recipe, block_m=block_m, **SHAPE, **options), rows=rows)


# --- compiling ---------------------------------------------------------------------------------


def compile_kernel(case: Case) -> Compiled:
    """Compile one kernel as a launch on an H200 would, without a GPU.

    Raises ValueError: the configuration leaves block_m open. OfflineError: there is no Triton, or
    it refuses the kernel.
    """
    if case.config.block_m is None:
        raise ValueError("block_m is None: name the tile to compile, one of " + _names(BLOCK_MS))
    if compat.TRITON_VERSION is None:
        raise OfflineError("Triton is missing or hidden: pip install 'megamoe[gpu]', on Linux")
    import triton
    from triton.backends.compiler import GPUTarget

    source, target = _source(case), GPUTarget("cuda", CAPABILITY, WARP)
    started = time.perf_counter()
    try:
        kernel = triton.compile(source, target=target, options=dict(OPTIONS))
    except Exception as error:
        while error.__cause__ is not None:  # each function on the way wraps the first message
            error = error.__cause__
        version = f"Triton {compat.TRITON_VERSION}"
        raise OfflineError(f"{case.name} does not compile with {version}: {error}") from error
    seconds = time.perf_counter() - started
    usage, text = _disassemble(kernel.asm["cubin"])
    found = re.search(r"\bREG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise OfflineError(f"cuobjdump does not say how many registers the kernel uses: {usage!r}")
    return Compiled(
        case=case,
        registers=int(found[1]),
        stack=int(found[2]),
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        seconds=seconds,
        sass=text,
    )


def _source(case: Case) -> object:
    spec = case.spec
    types = SCALARS | {n: _descriptor_type(t) for n, t in tiles(case.config, spec).items()}
    function = getattr(mega, case.launch.kernel)
    missing = [n for n in function.arg_names if n not in types and n != "spec"]
    if missing:
        raise OfflineError(
            f"{case.launch.kernel} takes {_names(missing)}: name the type in SCALARS"
        )
    signature = {n: types.get(n, "constexpr") for n in function.arg_names}
    # tensors are aligned to 16 bytes, as a launch would find out
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    return compat.ast_source(function, signature, {"spec": spec}, aligned)


def _descriptor_type(tile: Tile) -> str:
    rows, columns = tile.box
    return f"tensordesc<{TYPE_NAMES[tile.dtype]}[{rows}, {columns}],{shared_layout(tile)!r}>"


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """(resource usage, SASS) as cuobjdump, which every Triton wheel brings, prints them."""
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, text = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True)
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    return usage.stdout, text.stdout


# --- reading -----------------------------------------------------------------------------------


def report(compiled: Compiled) -> Report:
    """Count what matters in the machine code."""
    code = sass.parse(compiled.sass)
    names = ("QGMMA", "HGMMA", "UTMALDG", "USETMAXREG", "STL", "LDL")
    counts = {n.lower(): sum(i.name.startswith(n) for i in code) for n in names}
    shared = ("case", "registers", "stack", "shared", "warps", "seconds")
    return Report(
        **{name: getattr(compiled, name) for name in shared},
        **counts,
        instructions=len(code),
        loops=tuple(sass.k_loops(code)),
        expanders=tuple(sass.expander_loops(code)),
        reused_barriers=tuple(sass.reused_barriers(code)),
    )


def faults(found: Report, *, known_spills: tuple[int, int] = (0, 0)) -> list[str]:
    """What is wrong with a kernel, in words; empty if nothing is.

    known_spills: so many spill stores and loads are accepted inside K loops. Inside the loops of
    expanders none is.
    """
    wrong = []
    if found.shared > SHARED_BYTES:
        wrong.append(f"{found.shared} bytes of shared memory, a CTA can have {SHARED_BYTES}")
    if found.case.launch.kernel != "moe_kernel":
        return wrong
    wgmma, other = ("hgmma", "qgmma") if found.case.config.recipe == "bf16" else ("qgmma", "hgmma")
    for name in (wgmma, "utmaldg", "usetmaxreg"):
        if not getattr(found, name):
            wrong.append(f"no {name.upper()}")
    if getattr(found, other):
        wrong.append(f"{getattr(found, other)} {other.upper()}, the recipe has none")
    turns = found.case.spec.l1_turns
    loops = (turns + 1) * MATH_PARTITIONS
    if len(found.loops) != loops:
        wrong.append(
            f"{len(found.loops)} K loops, expected {loops}: "
            f"in each partition {turns} of L1, 1 of L2"
        )
    expanders = found.case.policy.expanders
    if len(found.expanders) != expanders:
        wrong.append(f"{len(found.expanders)} loops of expanders, expected {expanders}")
    for name, spills, known in (
        ("K loops", found.loop_spills, known_spills),
        ("expanders", found.expander_spills, (0, 0)),
    ):
        if spills[0] > known[0] or spills[1] > known[1]:
            wrong.append(f"{name} spill: STL {spills[0]}, LDL {spills[1]}")
    if found.reused_barriers:
        places = _names([hex(offset) for offset in found.reused_barriers])
        wrong.append(f"memory of barriers is used for something else: {places}")
    early = sum(loop.early_releases for loop in found.loops + found.expanders)
    if early:
        wrong.append(f"{early} stages given back before what was loaded from them is used")
    if found.serialised:
        wrong.append(f"K loops wait between WGMMAs of one sum: {found.serialised}")
    return wrong


def compile_and_report(case: Case) -> Report:
    return report(compile_kernel(case))


# --- docs/compiled.md --------------------------------------------------------------------------

INTRODUCTION = f"""# What the kernels compile to

Written by `python -m megamoe.offline`, which compiles every kernel that the tile policy can pick
for sm_90a, without a GPU, and reads the machine code. One table for each Triton version that it
was run with.

The layer: {", ".join(f"{name} {value}" for name, value in SHAPE.items())}.
Clamp, where there is one: {CLAMP:g}.

- **registers**: of a thread at launch, then what the roles trade them for: math / dispatch /
  expanders / the single warps.
- **stack**: bytes of local memory a thread has, as many as the role that needs most of them; used
  outside the loops over stages only, unless the next two columns say otherwise.
- **K loops**: spill stores / spill loads per turn, over the K loops of all math partitions.
- **expanders**: the same in the loops that expand the codes of MXFP4.
- **WGMMA**: tensor core instructions of the whole kernel, QGMMA for FP8 and HGMMA for bf16.
- **s**: seconds to compile, on a machine that was doing other things too.
"""
HEADER = (
    "| kernel | recipe | x scales | clamp | block_m | block_n | family | registers | stack "
    "| K loops | expanders | WGMMA | UTMALDG | USETMAXREG | shared | warps | s |"
)


def table(reports: Sequence[Report]) -> str:
    """The Markdown table of one Triton version, with a list of what is wrong under it."""
    lines = [HEADER, "|---" * HEADER.count(" | ") + "|---|"]
    lines += [_row(r) for r in reports]
    wrong = [f"- {r.case.name}: {fault}" for r in reports for fault in faults(r)]
    return "\n".join([*lines, "", *(["Faults:", "", *wrong] if wrong else ["No faults."])])


def _row(r: Report) -> str:
    c, p = r.case.config, r.case.policy
    kernel = r.case.launch.kernel
    if r.case.launch not in FUSED:
        kernel += f" ({r.case.launch.phases})"
    roles = kind = loops = expanders = ""
    if r.usetmaxreg:
        expand = p.expand_registers if p.expanders else "-"
        roles = f" ({p.math_registers} / {p.dispatch_registers} / {expand} / {p.load_registers})"
    if r.loops:
        kind = f" {'QGMMA' if r.qgmma else 'HGMMA'}"
        loops = "{} / {}".format(*r.loop_spills)
    if r.expanders:
        expanders = "{} / {}".format(*r.expander_spills)
    cells = (
        kernel, c.recipe, c.x_scales, "" if c.clamp is None else "yes", c.block_m, p.block_n,
        p.family,
        f"{r.registers}{roles}", r.stack, loops, expanders, f"{r.qgmma + r.hgmma}{kind}",
        r.utmaldg, r.usetmaxreg, r.shared, r.warps, f"{r.seconds:.1f}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def update_page(page: str, version: str, body: str) -> str:
    """The page with the section of one Triton version put in or replaced, the sections in order."""
    parts = re.split(r"(?m)^## Triton (\S+)\n", page)
    sections = {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}
    sections[version] = body.strip()
    ordered = sorted(sections, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
    return INTRODUCTION + "".join(f"\n## Triton {v}\n\n{sections[v]}\n" for v in ordered)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m megamoe.offline`; returns 0, or 1 if nothing could be compiled or written."""
    parser = argparse.ArgumentParser(prog="python -m megamoe.offline", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/compiled.md"), metavar="FILE")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N")
    options = parser.parse_args(arguments)
    if compat.TRITON_VERSION is None:
        print("Triton is missing or hidden: pip install 'megamoe[gpu]', on Linux", file=sys.stderr)
        return 1
    if not options.output.parent.is_dir():
        print(f"no folder {options.output.parent}: name one with --output", file=sys.stderr)
        return 1
    reports = _compile_all(all_cases(), options.jobs)
    page = options.output.read_text() if options.output.exists() else ""
    options.output.write_text(update_page(page, compat.TRITON_VERSION, table(reports)))
    print(f"wrote {options.output}")
    return 0


def _compile_all(cases: Sequence[Case], jobs: int) -> list[Report]:
    reports = []
    with tempfile.TemporaryDirectory() as cache:
        # an empty cache, so that the seconds are those of compiling
        previous = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = cache
        try:
            with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
                for r in pool.map(compile_and_report, cases):
                    wrong = faults(r)
                    print(f"{r.case.name}: {r.seconds:.1f} s, {'; '.join(wrong) or 'no faults'}")
                    reports.append(r)
        finally:
            os.environ.pop("TRITON_CACHE_DIR")
            if previous is not None:
                os.environ["TRITON_CACHE_DIR"] = previous
    return reports


def _names(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


if __name__ == "__main__":
    sys.exit(main())
