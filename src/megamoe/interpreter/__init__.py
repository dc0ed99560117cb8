"""Runs Gluon kernels on the CPU, with any number of simulated ranks, and finds their faults.

`Machine` runs kernels.  Where Triton is not installed, kernel files import `gluon`, `gl`, `tma`,
`mbarrier`, `fence_async_shared`, `warpgroup_mma`, `warpgroup_mma_wait` and `warpgroup_mma_init`
from here.
"""

from .errors import (
    AsyncFault,
    BarrierFault,
    DataRace,
    Deadlock,
    DeviceAssert,
    KernelError,
    Livelock,
    Misaligned,
    OutOfBounds,
    Overflow,
    ProxyFault,
    SharedMemoryRace,
    UnsupportedOperation,
    UnwrittenRead,
)
from .hopper import (
    mbarrier,
    tma,
)
from .machine import Buffer, Machine
from .standin import gl, gluon
from .wgmma import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

__all__ = [
    "AsyncFault",
    "BarrierFault",
    "Buffer",
    "DataRace",
    "Deadlock",
    "DeviceAssert",
    "KernelError",
    "Livelock",
    "Machine",
    "Misaligned",
    "OutOfBounds",
    "Overflow",
    "ProxyFault",
    "SharedMemoryRace",
    "UnsupportedOperation",
    "UnwrittenRead",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]
