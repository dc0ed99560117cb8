"""What operations cost in simulated time: enough for a plausible timeline, not a prediction.

Each task has a clock of its own.  It moves on by what the task does, and to the signaller's time
where the task waits.  The TMA unit and the tensor cores of a program are queues; memory and links
are shared out evenly, as if all SMs of the GPU were busy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CostTable:
    """Rates are per SM.  `load_ns` and `remote_load_ns` are what a load adds to a warp's time where
    neighbouring loads overlap, not a latency alone.
    """

    tma_ns: float  # from issue to landing of an empty queue
    memory_bytes_per_ns: float
    link_bytes_per_ns: float
    flops_per_ns: float  # of 8-bit operands; half of it for 16 bits
    load_ns: float
    remote_load_ns: float
    store_ns: float
    atomic_ns: float
    remote_ns: float  # added to atomics and flags of system scope
    flag_ns: float

    def load(self, task: object, nbytes: int, rank: int) -> None:
        remote = rank != task.rank
        rate = self.link_bytes_per_ns if remote else self.memory_bytes_per_ns
        task.clock.ns += (self.remote_load_ns if remote else self.load_ns) + nbytes / rate

    def store(self, task: object, nbytes: int, rank: int) -> None:
        remote = rank != task.rank
        rate = self.link_bytes_per_ns if remote else self.memory_bytes_per_ns
        task.clock.ns += self.store_ns + nbytes / rate

    def atomic(self, task: object, scope: str) -> None:
        task.clock.ns += self.atomic_ns + (self.remote_ns if scope == "sys" else 0.0)

    def flag(self, task: object, scope: str) -> None:
        """One look at, or write of, a flag."""
        task.clock.ns += self.flag_ns + (self.remote_ns if scope == "sys" else 0.0)

    def tma(self, task: object, nbytes: int) -> float:
        """When a copy that is issued now lands."""
        cta = task.cta
        cta.tma_ns = max(cta.tma_ns, task.clock.ns) + nbytes / self.memory_bytes_per_ns
        return cta.tma_ns + self.tma_ns

    def mma(self, task: object, shape: tuple[int, int, int], itemsize: int) -> float:
        """When a product m x n x k that is issued now is done."""
        m, n, k = shape
        cta = task.cta
        flops = 2.0 * m * n * k * itemsize
        cta.mma_ns = max(cta.mma_ns, task.clock.ns) + flops / self.flops_per_ns
        return cta.mma_ns


# One SM of 132 of an H200: 4300 GB/s of reads, 335 GB/s by loads from a peer, 1330 TFLOPS e4m3, as
# measured; latencies are round figures of the same machine.
H200 = CostTable(
    tma_ns=800.0,
    memory_bytes_per_ns=4300 / 132,
    link_bytes_per_ns=335 / 132,
    flops_per_ns=1330e3 / 132,
    load_ns=150.0,
    remote_load_ns=500.0,
    store_ns=30.0,
    atomic_ns=300.0,
    remote_ns=500.0,
    flag_ns=100.0,
)
