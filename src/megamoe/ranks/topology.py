"""Whether a group of ranks can run the kernel together: facts of each rank's GPU, and a verdict.

The facts are gathered by :class:`Probe`, the only part that asks CUDA; the verdicts are pure.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from megamoe.config import MoEConfig
from megamoe.doctor import KERNEL_CAPABILITY, OTHER_GENERATIONS

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One rank's GPU. host: the same for all processes of one machine; uuid: of the GPU."""

    host: str
    host_name: str
    uuid: str
    name: str
    capability: tuple[int, int]
    sms: int

    @property
    def title(self) -> str:
        return f"{self.name} on {self.host_name}"


class Probe:
    """What CUDA and the operating system say."""

    def gpu(self, device: torch.device) -> Gpu:
        properties = torch.cuda.get_device_properties(device)
        name = platform.node()
        return Gpu(
            host=BOOT_ID.read_text().strip() if BOOT_ID.exists() else name,
            host_name=name,
            uuid=str(properties.uuid),
            name=properties.name,
            capability=(properties.major, properties.minor),
            sms=properties.multi_processor_count,
        )

    def peer_access(self, device: torch.device, peer: Gpu) -> bool | None:
        """Whether `device` can read the memory of a GPU of this machine; None if this process
        cannot see that GPU and so cannot ask.
        """
        for index in range(torch.cuda.device_count()):
            if str(torch.cuda.get_device_properties(index).uuid) == peer.uuid:
                return torch.cuda.can_device_access_peer(device, index)
        return None

    def missing(self) -> str | None:
        """What the process lacks to run a compiled kernel at all."""
        from megamoe.kernel.compat import TRITON_VERSION

        if not torch.cuda.is_available():
            return "no CUDA device is visible"
        if TRITON_VERSION is None:
            return "Triton is not installed, or hidden by MEGAMOE_HIDE_TRITON"
        return None


def why_not_gpu(gpu: Gpu) -> str | None:
    """Why the kernel cannot run on this GPU, or None."""
    if gpu.capability == KERNEL_CAPABILITY:
        return None
    major, minor = gpu.capability
    why = OTHER_GENERATIONS.get(major, "it has no WGMMA")
    return (
        f"{gpu.title} has compute capability {major}.{minor}, and the kernel needs WGMMA, which is "
        f"in {KERNEL_CAPABILITY[0]}.{KERNEL_CAPABILITY[1]} only (H100, H200): {why}"
    )


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a rank tells the others before anything is allocated.

    trace: events of a timeline that a role of a program can record, a part of the buffer.
    """

    config: MoEConfig
    gpu: Gpu
    torch: str
    triton: str
    trace: int = 0


def why_not_together(members: Sequence[Member]) -> str | None:
    """Why these ranks cannot share a buffer, or None. The same answer on every rank."""
    first = members[0]
    for rank, member in enumerate(members):
        reason = why_not_gpu(member.gpu)
        if reason:
            return f"rank {rank}: {reason}"
    for rank, member in enumerate(members):
        difference = _difference(first, member)
        if difference:
            return f"ranks 0 and {rank} were given different configurations: {difference}"
        for package in ("torch", "triton"):
            mine, theirs = getattr(first, package), getattr(member, package)
            if mine != theirs:
                return f"ranks 0 and {rank} run different versions of {package}: {mine}, {theirs}"
    owners: dict[str, int] = {}
    for rank, member in enumerate(members):
        if member.gpu.host != first.gpu.host:
            return (
                f"rank 0 is on {first.gpu.host_name} and rank {rank} on {member.gpu.host_name}: "
                "the ranks of a layer must be on one machine, where GPUs reach each other's memory"
            )
        owner = owners.setdefault(member.gpu.uuid, rank)
        if owner != rank:
            return (
                f"ranks {owner} and {rank} are on the same GPU ({member.gpu.uuid}): give each "
                "process a GPU of its own with torch.cuda.set_device"
            )
    return None


def _difference(a: Member, b: Member) -> str:
    names = [field.name for field in fields(MoEConfig)]
    pairs = [(name, getattr(a.config, name), getattr(b.config, name)) for name in names]
    pairs.append(("trace", a.trace, b.trace))
    return ", ".join(f"{name} is {x!r} and {y!r}" for name, x, y in pairs if x != y)


def unreachable(
    probe: Probe, device: torch.device, members: Sequence[Member], rank: int
) -> list[int]:
    """Ranks whose memory this rank's GPU cannot read."""
    others = [(r, m) for r, m in enumerate(members) if r != rank]
    return [r for r, m in others if probe.peer_access(device, m.gpu) is False]


def why_no_access(unreachable_by_rank: Sequence[Sequence[int]]) -> str | None:
    """As :func:`why_not_together`, for the lists of :func:`unreachable` of all ranks."""
    pairs = sorted({tuple(sorted((a, b))) for a, bs in enumerate(unreachable_by_rank) for b in bs})
    if not pairs:
        return None
    names = ", ".join(f"{a} and {b}" for a, b in pairs)
    return (
        f"no peer access between the GPUs of ranks {names}: the kernel reads and writes the memory "
        "of the other ranks, over NVLink or PCIe; `nvidia-smi topo -p2p r` shows which can"
    )
