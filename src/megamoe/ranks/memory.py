"""The ranks of a process group, and their memory: torch symmetric memory, or one rank's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megamoe.config import MoEConfig
from megamoe.plan import STATUS_WORDS, Plan
from megamoe.ranks.meeting import Store
from megamoe.symmetric import MegaMoEError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MULTICAST_OFF = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


class Party(NamedTuple):
    """This process's place among the ranks. group, store: None for one rank alone."""

    rank: int
    ranks: int
    group: ProcessGroup | None
    store: Store | None


def find_party(config: MoEConfig, group: ProcessGroup | None) -> Party:
    """The place of this process in `group`; None is the default group, or for one rank no group.

    Raises MegaMoEError where there is no process group.
    """
    import torch.distributed as dist

    if group is None and config.ranks == 1:
        return Party(0, 1, None, None)
    if not (dist.is_available() and dist.is_initialized()):
        raise MegaMoEError(
            f"{config.ranks} ranks need a process group: call "
            "torch.distributed.init_process_group first, in one process a GPU"
        )
    group = group or dist.group.WORLD
    store = dist.distributed_c10d._get_process_group_store(group)
    return Party(dist.get_rank(group), dist.get_world_size(group), group, store)


# --- memory ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """A rank's buffer and where the others' are.

    memory: uint8 on the device, zeroed. distances: bytes from this rank's buffer to each rank's.
    status_of: the status words of another rank, as a tensor that reads its memory. handle: keeps
    the mappings alive.
    """

    memory: torch.Tensor
    distances: tuple[int, ...]
    status_of: Callable[[int], torch.Tensor] | None = None
    handle: Any = None


def allocate_alone(plan: Plan, device: torch.device) -> SharedMemory:
    memory = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
    return SharedMemory(memory=memory, distances=(0,))


@contextmanager
def _without_multicast() -> Iterator[None]:
    """Keep torch from making a multicast object of the buffer: the kernel uses none."""
    before = os.environ.get(MULTICAST_OFF)
    os.environ[MULTICAST_OFF] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[MULTICAST_OFF]
        else:
            os.environ[MULTICAST_OFF] = before


def allocate_local(plan: Plan, device: torch.device) -> torch.Tensor:
    """This rank's part of a symmetric buffer, not yet known to the others; not collective."""
    from torch.distributed import _symmetric_memory as symm_mem

    with _without_multicast():
        return symm_mem.empty(plan.nbytes, dtype=torch.uint8, device=device)


def join_memory(memory: torch.Tensor, plan: Plan, party: Party, timeout_s: float) -> SharedMemory:
    """Exchange the ranks' parts.  Collective; a rank that does not come ends it by an error."""
    from torch.distributed import _symmetric_memory as symm_mem

    with _without_multicast(), _store_timeout(party.store, timeout_s):
        handle = symm_mem.rendezvous(memory, party.group)
    base = list(handle.buffer_ptrs)
    status = plan.region["status"].offset
    # where the buffer begins within its allocation; the same on every rank, which setup checks
    inside = memory.data_ptr() - base[party.rank]
    own = handle.get_buffer(party.rank, (STATUS_WORDS,), torch.int32, 0).data_ptr()
    words = (memory.data_ptr() + status - own) // 4
    return SharedMemory(
        memory=memory,
        distances=tuple(b - base[party.rank] for b in base),
        status_of=lambda rank: handle.get_buffer(rank, (STATUS_WORDS,), torch.int32, words),
        handle=(handle, inside),
    )


@contextmanager
def _store_timeout(store: Any, seconds: float) -> Iterator[None]:
    before = store.timeout
    store.set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        store.set_timeout(before)
