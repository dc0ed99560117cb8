"""Ranks that agree on something through a key-value store, with a deadline, naming who is missing.

Used before and after the symmetric buffer is made.  A store rather than collectives: a collective
that a rank never joins ends in a watchdog or not at all, and cannot say who it waits for.
"""

from __future__ import annotations

import logging
import pickle
import time
from typing import Protocol, TypeVar

T = TypeVar("T")
LOG = logging.getLogger("megamoe")
POLL_S = 0.01
PROGRESS_S = 5.0


class Store(Protocol):
    """The part of torch.distributed.Store that is used."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...


class MeetingError(RuntimeError):
    """The ranks did not all come, or one of them refused."""


class Meeting:
    """One object's way to its counterparts on the other ranks.

    The n-th meeting that a rank makes on a store is with the n-th ones of the other ranks, so all
    ranks must make them in the same order.  A meeting goes in rounds: after a failed one the ranks
    that are left begin the next.
    """

    def __init__(self, store: Store | None, *, rank: int, ranks: int, timeout_s: float) -> None:
        if store is None and ranks > 1:
            raise ValueError(f"{ranks} ranks need a store to meet on")
        self.rank, self.ranks, self.timeout_s = rank, ranks, timeout_s
        self._store = store
        self._round = 1
        self._steps = 0
        number = store.add(f"megamoe/made/{rank}", 1) if store else 1
        self._name = f"megamoe/{number}"

    def next_round(self) -> None:
        """Begin anew; what was said in the rounds before does not count."""
        self._round += 1
        self._steps = 0

    def gather(self, what: str, mine: T) -> list[T]:
        """Everybody's `mine`, by rank. `what` names the step in messages.

        Raises MeetingError: a rank did not come within timeout_s, or gave up.
        """
        if self._store is None:
            return [mine]
        self._steps += 1
        step = f"{self._name}/{self._round}/{self._steps}"
        self._store.set(f"{step}/{self.rank}", pickle.dumps((what, mine)))
        self._wait_for_all(step, what)
        answers = []
        for rank in range(self.ranks):
            theirs, value = pickle.loads(self._store.get(f"{step}/{rank}"))
            if theirs != what:
                raise MeetingError(
                    f"rank {self.rank} is at {what!r} and rank {rank} at {theirs!r}: all ranks "
                    "must call the same collective methods in the same order"
                )
            answers.append(value)
        return answers

    def barrier(self, what: str) -> None:
        self.gather(what, None)

    def give_up(self, reason: str, *, for_good: bool = False) -> None:
        """Tell the other ranks, without waiting for them, that this one will not come: in this
        round, or ever.
        """
        if self._store is not None:
            self._store.set(self._gave_up(self.rank)[for_good], reason.encode())

    def _gave_up(self, rank: int) -> tuple[str, str]:
        """Keys of a reason: for this round, and for good."""
        return (
            f"{self._name}/{self._round}/gave up/{rank}",
            f"{self._name}/gave up for good/{rank}",
        )

    def _refuse_if_gave_up(self, rank: int) -> None:
        for key in self._gave_up(rank):
            if self._store.check([key]):
                raise MeetingError(f"rank {rank} gave up: {self._store.get(key).decode()}")

    def _wait_for_all(self, step: str, what: str) -> None:
        begin = said = time.monotonic()
        missing = list(range(self.ranks))
        while True:
            missing = [r for r in missing if not self._store.check([f"{step}/{r}"])]
            if not missing:
                return
            for rank in missing:
                self._refuse_if_gave_up(rank)
            now = time.monotonic()
            names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            if now - begin > self.timeout_s:
                reason = f"waited {self.timeout_s:g} s at {what!r} for {names}"
                self.give_up(reason)
                raise MeetingError(
                    f"rank {self.rank} {reason}, which did not come: it ended, it hangs, or it "
                    "did not call the same method"
                )
            if now - said > PROGRESS_S:
                said = now
                LOG.info("rank %d: %s: waiting for %s", self.rank, what, names)
            time.sleep(POLL_S)
