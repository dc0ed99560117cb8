"""Every kernel that the tile policy can pick, compiled for sm_90a without a GPU.

Why the grid is enough: the cases are those of the policy itself, all recipes by all tiles, and a
test says that the policy picks nothing else; scales of x and the clamp change code outside the K
loops and come once a tile family; the launches of the chain once a recipe. The shape of the layer
changes trip counts and addresses only. What reads the machine code, K loops and the loops of
MXFP4's expanders, is tested on made-up code with each fault that it has to find, and on the same
code without it.
"""

import os
import re
from dataclasses import replace
from typing import NamedTuple

import pytest

from megamoe import offline, sass
from megamoe.config import RECIPES
from megamoe.kernel import compat
from megamoe.plan import BLOCK_MS, MATH_PARTITIONS, tile_policy

needs_triton = pytest.mark.skipif(
    compat.TRITON_VERSION is None,
    reason=(
        "Triton is hidden by MEGAMOE_HIDE_TRITON"
        if os.environ.get("MEGAMOE_HIDE_TRITON", "0") not in ("", "0")
        else "Triton is not installed"
    ),
)


class KnownSpill(NamedTuple):
    """Spill stores and loads inside the K loops of one case that are accepted, per turn of all."""

    triton: str  # the beginning of its version
    case: str
    stl: int
    ldl: int
    reason: str


RELOADED = "addresses read again from local memory, which L1 holds: a step takes 1000 clocks"
KNOWN_SPILLS: list[KnownSpill] = [
    KnownSpill("3.9", f"mxfp4-128-by-256{variant}", 0, 3, RELOADED)
    for variant in ("", "-token", "-clamp")
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """An empty compiler cache: what is tested was compiled by this version from this source."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


# --- the kernels -------------------------------------------------------------------------------


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("case", offline.all_cases(), ids=lambda case: case.name)
def test_kernel_compiles_without_faults(case):
    found = offline.compile_and_report(case)
    version = compat.TRITON_VERSION
    known = [k for k in KNOWN_SPILLS if k.case == case.name and version.startswith(k.triton)]
    spills = (sum(k.stl for k in known), sum(k.ldl for k in known))
    assert offline.faults(found, known_spills=spills) == []
    # the registers that the roles trade add up to those of the launch, in whole warpgroups
    if found.usetmaxreg:
        p = case.policy
        traded = MATH_PARTITIONS * p.math_registers + p.dispatch_registers
        traded += p.expanders * p.expand_registers + p.load_registers
        assert 128 * traded <= 32 * found.warps * found.registers <= 65536
    else:
        assert 32 * found.warps * found.registers <= 65536


def test_known_spills_name_cases():
    names = {case.name for case in offline.all_cases()}
    assert {k.case for k in KNOWN_SPILLS} <= names
    assert all(k.reason and k.stl + k.ldl > 0 for k in KNOWN_SPILLS)


def test_the_policy_picks_nothing_else():
    compiled = {(case.config.recipe, case.policy) for case in offline.policy_cases()}
    picked = set()
    for case in offline.policy_cases():
        free = replace(case.config, block_m=None)
        picked |= {(free.recipe, tile_policy(free, rows / 4)) for rows in range(4 * 1000)}
    assert picked == compiled
    # fp8 and bf16 have two wide tiles, mxfp4 has one whose weights were unpacked
    assert len(compiled) == len(RECIPES) * len(BLOCK_MS) + 3
    names = [case.name for case in offline.all_cases()]
    assert len(set(names)) == len(names)


def test_refusals(monkeypatch):
    case = offline.policy_cases()[0]
    with pytest.raises(ValueError, match="block_m is None: .* one of 16, 32, 64, 128"):
        offline.compile_kernel(replace(case, config=replace(case.config, block_m=None)))
    monkeypatch.setattr(compat, "TRITON_VERSION", None)
    with pytest.raises(offline.OfflineError, match="Triton is missing or hidden: pip install"):
        offline.compile_kernel(case)


@needs_triton
def test_an_argument_without_a_type_is_named(monkeypatch):
    monkeypatch.setattr(offline, "SCALARS", {k: v for k, v in offline.SCALARS.items() if k != "y"})
    with pytest.raises(offline.OfflineError, match="moe_kernel takes y: name the type"):
        offline.compile_kernel(offline.policy_cases()[0])


@needs_triton
def test_a_kernel_that_triton_refuses_is_named(monkeypatch):
    monkeypatch.setattr(offline, "SCALARS", offline.SCALARS | {"tokens": "*fp32"})
    with pytest.raises(offline.OfflineError, match="^bf16-16 does not compile with Triton 3"):
        offline.compile_kernel(offline.policy_cases()[0])


# --- the reader of machine code ----------------------------------------------------------------


def assemble(text: str) -> str:
    """Made-up code as cuobjdump prints it; `name:` is a label and (name) its address."""
    lines, labels = [], {}
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.endswith(":"):
            labels[line[:-1]] = f"0x{16 * len(lines):x}"
        else:
            lines.append(line)
    dump = ["\t\tFunction : made_up", '\t.headerflags\t@"EF_CUDA_SM90"']
    for n, line in enumerate(lines):
        code = re.sub(r"\((\w+)\)", lambda m: labels[m[1]], line)
        dump.append(
            f"        /*{16 * n:04x}*/                   {code} ;  /* 0x0000000000007918 */"
        )
        dump.append("                                                     /* 0x000fe20000000000 */")
    return "\n".join(dump)


FIRST = "QGMMA.64x32x32.F32.E4M3.E4M3 R24, gdesc[UR12], RZ, !UPT"
NEXT = "QGMMA.64x32x32.F32.E4M3.E4M3 R24, gdesc[UR16], R24"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
# a tile loop around a K loop of two sums; the second wait for a stage is far away, as compilers do
CLEAN = f"""
    S2R R0, SR_TID.X
    tile:
    {{before}}
    LDG.E R9, desc[UR4][R2.64]
    k:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ+0x80], R2
    @!P0 BRA (slow)
    landed:
    WARPGROUP.ARRIVE
    {FIRST}
    {{between}}
    {NEXT}, gsb0
    {WAIT}
    FFMA R40, R24, R9, R40
    WARPGROUP.ARRIVE
    {FIRST}
    BSSY B0, (joined)
    @P2 BRA (skip)
    {NEXT}
    skip:
    BSYNC B0
    joined:
    {NEXT}, gsb0
    {{loop}}
    {WAIT}
    FFMA R40, R24, R9, R40
    @P1 BRA (k)
    STG.E desc[UR4][R2.64], R40
    {{after}}
    @P3 BRA (tile)
    EXIT
    slow:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ+0x80], R2
    {{slow}}
    @!P0 BRA (slow)
    BRA (landed)
    end:
    BRA (end)
"""
HOLES = dict.fromkeys(("before", "between", "loop", "after", "slow"), "NOP")


def loop_of(**holes: str) -> sass.Loop:
    (loop,) = sass.k_loops(sass.parse(assemble(CLEAN.format(**(HOLES | holes)))))
    return loop


def test_the_k_loop_is_found_with_its_slow_path():
    loop = loop_of()
    assert loop.wgmma == 5 and loop.count("SYNCS") == 2
    assert loop.count("LDG", "STG", "S2R", "EXIT") == 0
    assert (loop.count("STL", "LDL"), loop.spilled_bytes, loop.serialised) == (0, 0, 0)


@pytest.mark.parametrize("hole", ["between", "loop", "slow"])
@pytest.mark.parametrize(
    ("spill", "size"),
    [
        ("STL [R1+0x98], R85", 4),
        ("@P4 LDL.LU R85, [R1+0x98]", 4),
        ("@!UP1 STL.64 [R1], R4", 8),
        ("LDL.128 R4, [R1]", 16),
        ("STL.U8 [R1], R4", 1),
    ],
)
def test_spills_in_a_k_loop_are_found(hole, spill, size):
    loop = loop_of(**{hole: spill})
    assert loop.count("STL") + loop.count("LDL") == 1 and loop.spilled_bytes == size


def test_spills_around_a_k_loop_do_not_count():
    loop = loop_of(before="LDL R9, [R1]", after="STL [R1], R9")
    assert loop.count("STL", "LDL") == 0


BARRIERS = """
    @!UP5 SYNCS.EXCH.64 URZ, [UR54+0x2d000], UR56
    SYNCS.EXCH.64 URZ, [UR54+0x2e080], UR4
    {}
    SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x2e080], RZ
    EXIT
"""


@pytest.mark.parametrize(("store", "reused"), [
    ("STSM.16.MT88.4 [R36+0x2d000], R24", [0x2D000]),
    ("@!P5 STS.64 [UR50+0x2e080], R2", [0x2E080]),
    ("STS.128 [R4+UR10+0x2d000], R12", [0x2D000]),
    ("STS.128 [R4+UR10+0x2d800], R12", []),
    ("LDS.128 R8, [R38+0x2d000]", []),
    ("STG.E.128 desc[UR30][R4.64+0x2d000], R8", []),
])  # fmt: skip
def test_stores_over_a_barrier_are_found(store, reused):
    """As when a role's barrier was initialised where the recipe has no use for it."""
    assert sass.reused_barriers(sass.parse(assemble(BARRIERS.format(store)))) == reused


def test_waits_between_the_products_of_a_sum_are_found():
    assert loop_of(between=f"{WAIT}\nWARPGROUP.ARRIVE").serialised == 1
    # one product in the wait is what overlaps two sums
    assert loop_of(between="WARPGROUP.DEPBAR.LE gsb0, 0x1").serialised == 0


def test_a_sum_over_all_of_k_must_not_wait_for_its_last_product():
    text = """
        k:
        WARPGROUP.ARRIVE
        HGMMA.64x16x16.F32.BF16 R24, gdesc[UR20], R24
        HGMMA.64x16x16.F32.BF16 R24, gdesc[UR24], R24, gsb0
        WARPGROUP.DEPBAR.LE gsb0, {left}
        @P1 BRA (k)
        WARPGROUP.DEPBAR.LE gsb0, 0x0
        EXIT
    """
    for left, expected in (("0x1", 0), ("0x0", 1)):
        (loop,) = sass.k_loops(sass.parse(assemble(text.format(left=left))))
        assert loop.serialised == expected and loop.wgmma == 2


@pytest.mark.parametrize(
    "load", ["LDS R20, [R15]", "LDS.64 R19, [R15]", "LDSM.16.M88.4 R17, [R15]"]
)
def test_a_stage_given_back_before_a_load_from_it_is_used_is_found(load):
    """Only the use shows that the load is done; it may come in the next turn."""
    text = """
        k:
        {top}
        {load}
        QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ, !UPT, gsb0
        WARPGROUP.DEPBAR.LE gsb0, 0x0
        BAR.SYNC.DEFER_BLOCKING 0x2, 0x80
        {middle}
        IADD3 R101, R17, R18, R19
        FFMA R100, R24, {use}, R100
        @P1 BRA (k)
        EXIT
    """
    release = "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR25+0x37800], RZ"

    def early(**holes: str) -> int:
        code = text.format(**({"top": "", "middle": "", "use": "R20", "load": load} | holes))
        (loop,) = sass.k_loops(sass.parse(assemble(code)))
        return loop.early_releases

    assert early() == 0 == early(top=release)
    assert early(middle=release) == 1 == early(top=release, use="R10")


# two loops, and a slow path as in a K loop
EXPANDER = """
    roles:
    {before}
    e1:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ], R2
    @!P0 BRA (waiting)
    codes:
    LDS.128 R4, [R12]
    PRMT R8, R20, R4, R21
    {loop}
    STS.128 [R13], R8
    @P1 BRA (e1)
    @P5 BRA (joint)
    e2:
    PRMT R8, R20, R4, R21
    STS.128 [R13], R8
    @P1 BRA (e2)
    joint:
    {after}
    @P3 BRA (roles)
    EXIT
    waiting:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3+URZ], R2
    {slow}
    @!P0 BRA (waiting)
    BRA (codes)
"""

ONE_EXPANDER = EXPANDER.replace("STS.128 [R13], R8\n    @P1 BRA (e2)", "@P1 BRA (e2)")


def expanders_of(**holes: str) -> list[sass.Loop]:
    return sass.expander_loops(sass.parse(assemble(EXPANDER.format(**(HOLES | holes)))))


def test_loops_of_an_expander_are_found():
    first, second = expanders_of()
    assert (first.count("SYNCS"), first.count("LDS"), second.count("SYNCS")) == (2, 1, 0)
    assert first.count("EXIT", "STL") == second.count("EXIT", "STL") == 0


@pytest.mark.parametrize("hole", ["loop", "slow"])
def test_spills_in_an_expander_are_found(hole):
    first, second = expanders_of(**{hole: "STL [R1], R4"})
    assert (first.count("STL"), second.count("STL")) == (1, 0)
    around = expanders_of(before="STL [R1], R4", after="LDL R4, [R1]")
    assert [loop.count("STL", "LDL") for loop in around] == [0, 0]


def test_other_loops_are_no_expanders():
    """A copy that looks nothing up, a sum that stores nothing wide, a tile's loop around WGMMA."""
    assert expanders_of() and not sass.expander_loops(sass.parse(assemble("""
        k:
        PRMT R8, R20, R4, R21
        STS.64 [R13], R8
        @P1 BRA (k)
        EXIT
    """)))  # fmt: skip
    stores = {"after": "PRMT R8, R20, R4, R21\nSTS.128 [R13], R8"}
    assert not sass.expander_loops(sass.parse(assemble(CLEAN.format(**(HOLES | stores)))))
    copy = EXPANDER.replace("PRMT", "MOV")
    assert not sass.expander_loops(sass.parse(assemble(copy.format(**HOLES))))


def test_code_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="no instruction found"):
        sass.parse("cuobjdump info : File contains no code")
    with pytest.raises(ValueError, match="the target of BRA 0x500 at 0x10 is missing"):
        sass.k_loops(sass.parse(assemble("NOP\nBRA 0x500")))


def made_up_report(text: str, *, shared: int = 1000, case: offline.Case | None = None):
    case = case or next(c for c in offline.policy_cases() if c.name == "fp8-128-by-256")
    compiled = offline.Compiled(
        case=case, registers=128, stack=0, shared=shared, warps=16, seconds=1.0, sass=assemble(text)
    )
    return offline.report(compiled)


def whole_kernel(
    *, count: int = 4, bad_loop: dict[str, str] | None = None, extra: str = "UTMALDG.2D [UR8]"
) -> str:
    """`count` K loops: two partitions with one or two of L1 and one of L2.  The last one has
    `bad_loop` in its holes.
    """
    holes = [HOLES] * (count - 1) + [HOLES | (bad_loop or {})]
    loops = [
        re.sub(r"\b(tile|k|landed|skip|joined|slow|end)(?=[:)])", rf"\g<1>{n}", CLEAN.format(**h))
        for n, h in enumerate(holes)
    ]
    return f"USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xd0\n{extra}\n" + "\n".join(loops)


def test_faults_are_found_and_only_faults():
    assert offline.faults(made_up_report(whole_kernel())) == []
    spilling = made_up_report(whole_kernel(bad_loop={"loop": "STL [R1], R4\nLDL R4, [R1]"}))
    assert offline.faults(spilling) == ["K loops spill: STL 1, LDL 1"]
    assert offline.faults(spilling, known_spills=(1, 1)) == []
    assert offline.faults(spilling, known_spills=(1, 0)) != []
    assert offline.faults(spilling, known_spills=(0, 1)) != []
    serialised = made_up_report(whole_kernel(bad_loop={"between": WAIT}))
    assert offline.faults(serialised) == ["K loops wait between WGMMAs of one sum: 1"]
    loaded = "LDS R20, [R15]\nSYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR25+0x37800], RZ\nFADD R21, R20, R20"
    early = made_up_report(whole_kernel(bad_loop={"loop": loaded}))
    assert offline.faults(early) == ["1 stages given back before what was loaded from them is used"]
    assert offline.faults(made_up_report(whole_kernel(extra="NOP"))) == ["no UTMALDG"]
    quiet = whole_kernel().replace("USETMAXREG", "NOP")
    assert offline.faults(made_up_report(quiet)) == ["no USETMAXREG"]
    large = made_up_report(whole_kernel(), shared=232449)
    assert offline.faults(large) == ["232449 bytes of shared memory, a CTA can have 232448"]
    wrong = offline.faults(made_up_report(whole_kernel().replace("QGMMA", "HGMMA")))
    assert wrong == ["no QGMMA", "20 HGMMA, the recipe has none"]
    few = offline.faults(
        made_up_report("USETMAXREG 0xd0\nUTMALDG.2D [UR8]\n" + CLEAN.format(**HOLES))
    )
    assert few == ["1 K loops, expected 4: in each partition 1 of L1, 1 of L2"]
    dispatch = offline.chain_cases()[0]
    assert offline.faults(made_up_report("NOP\nEXIT", case=dispatch)) == []


def test_faults_of_expanders_are_found():
    case = next(c for c in offline.policy_cases() if c.name == "mxfp4-128")
    assert (case.policy.expanders, case.spec.l1_turns) == (1, 2)
    right = whole_kernel(count=6) + ONE_EXPANDER.format(**HOLES)
    assert offline.faults(made_up_report(right, case=case)) == []
    spilling = whole_kernel(count=6) + ONE_EXPANDER.format(**(HOLES | {"slow": "LDL R4, [R1]"}))
    found = made_up_report(spilling, case=case)
    assert (found.loop_spills, found.expander_spills) == ((0, 0), (0, 1))
    assert offline.faults(found) == ["expanders spill: STL 0, LDL 1"]
    assert offline.faults(found, known_spills=(9, 9)) == ["expanders spill: STL 0, LDL 1"]
    none = offline.faults(made_up_report(whole_kernel(count=6), case=case))
    assert none == ["0 loops of expanders, expected 1"]
    some = offline.faults(made_up_report(whole_kernel() + EXPANDER.format(**HOLES)))
    assert some == ["2 loops of expanders, expected 0"]


def test_a_page_keeps_the_tables_of_other_versions():
    good = made_up_report(whole_kernel())
    bad = made_up_report(whole_kernel(bad_loop={"loop": "STL [R1], R4"}))
    page = offline.update_page("", "3.10.0", offline.table([good]))
    page = offline.update_page(page, "3.6.0", offline.table([bad]))
    again = offline.update_page(page, "3.10.0", offline.table([good]))
    assert again == page
    assert re.findall(r"(?m)^## Triton (\S+)$", page) == ["3.6.0", "3.10.0"]
    old, new = page.split("## Triton 3.10.0")
    assert "- fp8-128-by-256: K loops spill: STL 1, LDL 0" in old and "No faults." in new
    row = "| moe_kernel | fp8 | ue8m0_32 |  | 128 | 256 | prefill | 128 ({}) | 0 | 0 / 0 |  |"
    p = good.case.policy
    roles = f"{p.math_registers} / {p.dispatch_registers} / - / {p.load_registers}"
    assert row.format(roles) in new
    header, rule, first = new.strip().splitlines()[:3]
    assert header.count("|") == rule.count("|") == first.count("|") == 18


def test_a_row_of_mxfp4_names_its_expanders():
    case = next(c for c in offline.policy_cases() if c.name == "mxfp4-128")
    text = whole_kernel(count=6) + ONE_EXPANDER.format(**(HOLES | {"loop": "STL [R1], R4"}))
    (row,) = offline.table([made_up_report(text, case=case)]).splitlines()[2:3]
    p = case.policy
    registers = f"({p.math_registers} / {p.dispatch_registers} / {p.expand_registers} /"
    assert registers in row and "| 0 / 0 | 1 / 0 |" in row
