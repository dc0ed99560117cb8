"""What a wait that expired on a GPU means, in words: pure functions of a few words of a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamoe.config import MoEConfig
from megamoe.kernel.sync import PHASE_NAMES
from megamoe.plan import STATUS_REPORTED
from megamoe.symmetric import MegaMoEError, SymmetricBuffer

COUNTS, PARTIALS, BAD_EXPERT, UNPACKED = 1, 5, 6, 7


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A report of the kernel. index: of a rank, block, token, slot or local expert: see phase."""

    rank: int
    call: int
    phase: int
    index: int
    wanted: int
    seen: int

    def say(self, config: MoEConfig) -> str:
        where = f"rank {self.rank}, call {self.call}"
        if self.phase == BAD_EXPERT:
            return (
                f"{where}: slot {self.index} of topk_idx holds expert {self.seen}, allowed are -1 "
                f"and 0 to {config.experts - 1}"
            )
        kinds = {COUNTS: "rank", PARTIALS: "token", UNPACKED: "local expert"}
        kind = kinds.get(self.phase, "block")
        return (
            f"{where}: waited {config.timeout_s:g} s for {PHASE_NAMES[self.phase]} "
            f"(phase {self.phase}, {kind} {self.index}): expected {self.wanted}, saw {self.seen}"
        )


def failure_of(status: Sequence[int], *, rank: int, call: int) -> Failure | None:
    """The report in a `status` region, if there is a complete one."""
    if not status[STATUS_REPORTED]:
        return None
    phase, index, wanted, seen = status[2:6]
    return Failure(rank=rank, call=call, phase=phase, index=index, wanted=wanted, seen=seen)


def missing_ranks(failure: Failure, buffer: SymmetricBuffer) -> list[int]:
    """The ranks whose counts for this call had not come.  `buffer` is that of the reporting rank,
    read once it is idle: a rank that came after the report is missing only if the report names it.
    """
    if failure.phase == BAD_EXPERT:
        return []
    call = buffer.epoch()
    ready = buffer.view("counts_ready")[: buffer.plan.config.ranks].tolist()
    late = {rank for rank, epoch in enumerate(ready) if (epoch - call) & 0x80000000}
    return sorted(late | ({failure.index} if failure.phase == COUNTS else set()))


def awaited_ranks(failure: Failure, buffer: SymmetricBuffer) -> list[int]:
    """The owners of the experts of a token whose partials have not all come."""
    config = buffer.plan.config
    if failure.phase != PARTIALS:
        return []
    experts = buffer.view("topk_idx")[failure.index].tolist()
    return sorted({e // config.experts_per_rank for e in experts if 0 <= e < config.experts})


def _blame(failure: Failure, buffer: SymmetricBuffer) -> str | None:
    missing, awaited = missing_ranks(failure, buffer), awaited_ranks(failure, buffer)
    if missing:
        return f"{_names(missing)} did not arrive"
    if awaited:
        return f"rows were awaited from {_names(awaited)}"
    return None


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def explain(mine: Failure | None, others: Sequence[Failure], buffer: SymmetricBuffer) -> str | None:
    """The message of an error, or None where no rank has reported anything.

    mine: the report of this rank, whose buffer is `buffer`; others: those of the other ranks.
    """
    config = buffer.plan.config
    if mine is None and not others:
        return None
    parts = [failure.say(config) for failure in others]
    if mine:
        parts = [part for part in (mine.say(config), _blame(mine, buffer)) if part] + parts
    else:
        reported = {failure.rank for failure in others}
        rest = [rank for rank in range(config.ranks) if rank not in reported]
        parts.append(f"results of {_names(rest)} cannot be trusted either")
    return "; ".join(parts) + ". The object must be set up again, on all ranks."


def check(buffer: SymmetricBuffer, *, rank: int) -> None:
    """Raise MegaMoEError if the kernel gave up: a wait expired, or an id was out of range.

    buffer: of `rank`, whose calls have ended.
    """
    failure = failure_of(buffer.view("status").tolist(), rank=rank, call=buffer.epoch())
    if failure:
        raise MegaMoEError(explain(failure, [], buffer))
