"""Faults that the interpreter finds in a kernel.

Every fault is a `KernelError`.  Its message starts with where it happened: rank, program and role
(the partition function) of the task, and file and line of the kernel.
"""


class KernelError(RuntimeError):
    """A fault in a kernel, or in how it was launched."""


class DataRace(KernelError):
    """Two accesses to the same bytes, at least one a write, without an order between them."""


class ProxyFault(KernelError):
    """Ordinary stores read by TMA or WGMMA (the async proxy) without the proxy fences that this
    needs.
    """


class UnwrittenRead(KernelError):
    """A read of memory that nobody has written, or whose TMA copy has not been waited for."""


class OutOfBounds(KernelError):
    """An address outside every registered buffer, or a slice outside its shared memory."""


class Misaligned(KernelError):
    """An address or size that the hardware does not accept."""


class Overflow(KernelError):
    """A signed 32-bit or 64-bit sum, difference or product that does not fit its type."""


class SharedMemoryRace(DataRace):
    """A shared memory tile that is read or overwritten without waiting for its other user."""


class BarrierFault(KernelError):
    """Wrong arrival count, byte count or life cycle of an mbarrier."""


class AsyncFault(KernelError):
    """The result of an asynchronous operation used before it was waited for, or one left
    outstanding.
    """


class Deadlock(KernelError):
    """Every task waits and nothing is under way that could wake one."""


class Livelock(KernelError):
    """The step limit was reached."""


class DeviceAssert(KernelError):
    """`gl.device_assert` failed."""


class UnsupportedOperation(KernelError, NotImplementedError):
    """An operation that the interpreter does not know."""


class UnknownName(UnsupportedOperation, AttributeError):
    """A name of `gl` that the interpreter does not have."""
