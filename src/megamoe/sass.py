"""Reading SASS, the machine code of an NVIDIA GPU as `cuobjdump --dump-sass` prints it.

What a kernel must not have cannot be seen in its source: a register spilled to local memory inside
a K loop or an expander's loop, a WGMMA that the assembler makes wait for the one before it, or a
stage that is given back while a load from it may still be on its way.  These are found here by
following the branches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

_LINE = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]{4,})\*/\s*(?:@(?P<predicate>!?U?P\w+)\s+)?"
    r"(?P<name>[A-Z][\w.]*)(?P<operands>[^;]*);"
)
_TARGET = re.compile(r"\b0x([0-9a-f]+)\s*$")
_WGMMA = ("QGMMA", "HGMMA")  # FP8, bf16
# BRX and JMX jump through a table that is not printed: to a role's code, never within a K loop
_NO_SUCCESSOR = ("EXIT", "RET", "BRX", "JMX")


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@predicate name operands`."""

    address: int
    predicate: str | None
    name: str
    operands: str

    @property
    def is_wgmma(self) -> bool:
        return self.name.startswith(_WGMMA)

    @property
    def starts_sum(self) -> bool:
        """A WGMMA whose accumulator starts from zero instead of adding to its old value."""
        return self.is_wgmma and bool(re.search(r"\bRZ\b", self.operands))

    @property
    def waits_for_all(self) -> bool:
        """Waits until no WGMMA of the warpgroup is under way."""
        return self.name.startswith("WARPGROUP.DEPBAR") and self.operands.strip().endswith(" 0x0")

    @property
    def loaded(self) -> set[int]:
        """Registers that a load from shared memory will write."""
        if not self.name.startswith(("LDS", "LDSM")):
            return set()
        last = self.name.rsplit(".", 1)[-1]
        if self.name.startswith("LDSM"):
            count = int(last) if last in ("2", "4") else 1
        else:
            count = {"64": 2, "128": 4}.get(last, 1)
        first = int(re.match(r"\s*R(\d+)", self.operands)[1])
        return set(range(first, first + count))

    @property
    def used(self) -> set[int]:
        """Registers that are named other than as the first operand."""
        _, _, rest = self.operands.partition(",")
        return {int(n) for n in re.findall(r"\bR(\d+)\b", rest)}

    @property
    def spilled_bytes(self) -> int:
        """Bytes a thread moves to or from local memory."""
        if not self.name.startswith(("STL", "LDL")):
            return 0
        width = re.search(r"\.(U8|S8|U16|S16|64|128)\b", self.name)
        return {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}[width[1]] if width else 4


@dataclass(frozen=True)
class Loop:
    """A loop that holds certain instructions, and no smaller loop that does."""

    instructions: tuple[Instruction, ...]  # by address, with the slow paths that the loop jumps to

    def count(self, *names: str) -> int:
        """Instructions whose name starts with one of `names`."""
        return sum(i.name.startswith(names) for i in self.instructions)

    @property
    def wgmma(self) -> int:
        return self.count(*_WGMMA)

    @property
    def spilled_bytes(self) -> int:
        return sum(i.spilled_bytes for i in self.instructions)

    @cached_property
    def early_releases(self) -> int:
        """Arrivals on an mbarrier while a load from shared memory has not been used.

        An instruction that uses the value is the only sign that the load is done.  A barrier is
        none, and TMA, which the arrival lets in, does not queue behind loads: on an H200 a K loop
        was seen to get scales of four steps later.
        """
        return _early_releases(self.instructions)

    @cached_property
    def serialised(self) -> int:
        """WGMMAs that add to a sum although everything before them had to finish first.

        The assembler does so when it cannot prove the accumulator untouched in between.  A wait
        between two sums is the promotion to fp32 and does not count.
        """
        found, waited, seen = 0, False, False
        # twice: the last wait of a turn comes before the first WGMMA of the next
        for turn in range(2):
            for i in self.instructions:
                if i.waits_for_all:
                    waited = seen
                elif i.is_wgmma:
                    found += turn == 1 and waited and not i.starts_sum
                    waited, seen = False, True
        return found


def _early_releases(instructions: tuple[Instruction, ...]) -> int:
    found, under_way = 0, set()
    # twice: what a turn loads may be used in the next
    for turn in range(2):
        for i in instructions:
            if i.name.startswith("SYNCS.ARRIVE"):
                found += turn == 1 and bool(under_way)
            under_way = (under_way - i.used) | i.loaded
    return found


def parse(sass: str) -> list[Instruction]:
    """The instructions of a dump of one function.  Raises ValueError if there are none."""
    found = []
    for line in sass.splitlines():
        match = _LINE.match(line)
        if match:
            address, predicate, name, operands = match.groups()
            found.append(Instruction(int(address, 16), predicate, name, operands.rstrip()))
    if not found:
        raise ValueError("no instruction found: this is not the output of cuobjdump --dump-sass")
    return found


def k_loops(instructions: list[Instruction]) -> list[Loop]:
    """The innermost loops that hold WGMMA, in the order of the code."""
    return _loops_with(instructions, _WGMMA)


def expander_loops(instructions: list[Instruction]) -> list[Loop]:
    """The innermost loops that look bytes up and store 16 of them at a time to shared memory, in
    the order of the code; those around a K loop, which may do both too, are none.
    """
    loops = _loops_with(instructions, ("STS.128",))
    return [loop for loop in loops if loop.count("PRMT") and not loop.wgmma]


def reused_barriers(instructions: list[Instruction]) -> list[int]:
    """Offsets in shared memory at which an mbarrier is initialised and something else is stored.

    Memory of a barrier that was not invalidated must not be used again: the hardware may write the
    barrier's state there at any time.
    """
    barriers = _offsets(instructions, "SYNCS.EXCH")
    return sorted(barriers & _offsets(instructions, "STS"))


def _offsets(instructions: list[Instruction], name: str) -> set[int]:
    """Constant offsets of the addresses in shared memory that these instructions name."""
    found = (re.search(r"\[[^]]*?(0x[0-9a-f]+)\]", i.operands) for i in instructions
             if i.name.startswith(name))  # fmt: skip
    return {int(match[1], 16) for match in found if match}


def _loops_with(instructions: list[Instruction], names: tuple[str, ...]) -> list[Loop]:
    graph = _successors(instructions)
    wanted = {n for n, i in enumerate(instructions) if i.name.startswith(names)}
    loops = [
        Loop(tuple(instructions[n] for n in sorted(nodes))) for nodes in _innermost(graph, wanted)
    ]
    return sorted(loops, key=lambda loop: loop.instructions[0].address)


def _successors(instructions: list[Instruction]) -> list[list[int]]:
    """For each instruction the indices of those that may come next."""
    index = {i.address: n for n, i in enumerate(instructions)}
    graph: list[list[int]] = []
    for n, i in enumerate(instructions):
        following = [n + 1] if n + 1 < len(instructions) else []
        base = i.name.split(".")[0]
        if base == "BRA":
            target = _TARGET.search(i.operands)
            if target is None or int(target[1], 16) not in index:
                raise ValueError(f"the target of {i.name}{i.operands} at {i.address:#x} is missing")
            # BRA.DIV and the like are conditions of their own
            always = i.name == "BRA" and i.predicate is None
            graph.append([index[int(target[1], 16)]] + ([] if always else following))
        elif base in _NO_SUCCESSOR and i.predicate is None:
            graph.append([])
        else:
            graph.append(following)
    return graph


def _innermost(graph: list[list[int]], wanted: set[int]) -> Iterable[set[int]]:
    """The loops that hold a wanted node and no smaller loop that does."""
    pending = _loops(graph, set(range(len(graph))), wanted)
    while pending:
        loop = pending.pop()
        # a loop inside does not pass through the entry of the one around it
        smaller = _loops(graph, loop - _entries(graph, loop), wanted)
        if smaller:
            pending += smaller
        else:
            yield loop


def _loops(graph: list[list[int]], region: set[int], wanted: set[int]) -> list[set[int]]:
    """The largest loops within `region` that hold a wanted node."""
    return [
        part
        for part in _components(graph, region)
        if part & wanted and (len(part) > 1 or any(n in graph[n] for n in part))
    ]


def _entries(graph: list[list[int]], part: set[int]) -> set[int]:
    """Where a loop is entered from outside; its first instruction if nothing jumps in."""
    entries = {m for n, after in enumerate(graph) if n not in part for m in after if m in part}
    return entries or {min(part)}


def _components(graph: list[list[int]], region: set[int]) -> list[set[int]]:
    """Strongly connected components of the graph within `region`: Tarjan, without recursion."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found = []
    for root in region:
        if root in order:
            continue
        work = [(root, iter(graph[root]))]
        order[root] = low[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, after = work[-1]
            for m in after:
                if m not in region:
                    continue
                if m not in order:
                    order[m] = low[m] = len(order)
                    stack.append(m)
                    on_stack.add(m)
                    work.append((m, iter(graph[m])))
                    break
                if m in on_stack:
                    low[node] = min(low[node], order[m])
            else:
                work.pop()
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
                if low[node] == order[node]:
                    component = set()
                    while node not in component:
                        component.add(stack.pop())
                    on_stack -= component
                    found.append(component)
    return found
