"""One rank's buffer of one plan, the kernels launched on it, and a look at its status words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megamoe.config import MegaMoEInputError
from megamoe.launch import OPTIONS, Launch, compile_launch, compiled_kernels, fixed_arguments
from megamoe.plan import STATUS_REPORTED, TILES, UNPACK_ROWS, KernelSpec, Plan, TilePolicy
from megamoe.ranks.memory import SharedMemory
from megamoe.symmetric import MegaMoEError, SymmetricBuffer


class Lane:
    """The launches of one plan on one rank's buffer; many layers use it in turn."""

    def __init__(
        self,
        *,
        plan: Plan,
        launches: Sequence[Launch],
        rank: int,
        shared: SharedMemory,
        unpacked: torch.Tensor,
    ) -> None:
        self.plan, self.launches, self.rank, self.shared = plan, launches, rank, shared
        self.buffer = SymmetricBuffer(plan=plan, memory=shared.memory, unpacked=unpacked)
        device = shared.memory.device
        self._peers = torch.tensor(shared.distances, dtype=torch.int64, device=device)
        # stands in for y where a rank has no tokens: an empty tensor has no address
        self.spare = torch.empty(8, dtype=torch.bfloat16, device=device)
        self._fixed: dict[tuple, list[object]] = {}
        self._compiled: set[KernelSpec] = set()
        self._specs: dict[TilePolicy, list[KernelSpec]] = {}

    def specs(self, policy: TilePolicy) -> list[KernelSpec]:
        if policy not in self._specs:
            self._specs[policy] = [self.plan.spec(policy, x.phases) for x in self.launches]
        return self._specs[policy]

    def compile(self, weights: dict[str, torch.Tensor], policy: TilePolicy) -> None:
        for launch, spec in zip(self.launches, self.specs(policy), strict=True):
            if spec not in self._compiled:
                arguments = self._arguments(weights, spec, 0, self.spare)
                compile_launch(launch, arguments, self.plan.programs)
                self._compiled.add(spec)

    def prepare(
        self,
        weights: dict[str, torch.Tensor],
        tokens: int,
        y: torch.Tensor,
        policy: TilePolicy | None = None,
    ) -> list[Callable[[], None]]:
        """The launches of a call, checked but not made; with the tiles for `tokens`, or others."""
        specs = self.specs(policy or self.plan.policy(tokens))
        if any(spec not in self._compiled for spec in specs):
            # compiled now, this rank would look missing to the others
            raise MegaMoEError(
                f"rank {self.rank}: no kernel was compiled for {tokens} tokens: call "
                f"warmup(weights, tokens=[..., {tokens}]) on all ranks, or warmup(weights) for all"
            )
        y = y if tokens else self.spare
        return [
            partial(
                compiled_kernels()[launch.kernel][(self.plan.programs,)],
                *self._arguments(weights, spec, tokens, y),
                **OPTIONS,
            )
            for launch, spec in zip(self.launches, specs, strict=True)
        ]

    def forget(self, weights: dict[str, torch.Tensor]) -> None:
        key = _address(weights)
        self._fixed = {k: v for k, v in self._fixed.items() if k[0] != key}

    def _arguments(
        self, weights: dict[str, torch.Tensor], spec: KernelSpec, tokens: int, y: torch.Tensor
    ) -> list[object]:
        key = (_address(weights), spec)
        if key not in self._fixed:
            self._check_weights(weights)
            self._fixed[key] = fixed_arguments(spec, self.buffer, self._peers, weights)
        buffer, peers, *rest = self._fixed[key]
        return [buffer, peers, self.rank, tokens, y, *rest, spec]

    def _check_weights(self, weights: dict[str, torch.Tensor]) -> None:
        device = self.shared.memory.device
        for name, tensor in weights.items():
            if tensor.device != device:
                raise MegaMoEInputError(f"weights.{name} is on {tensor.device}, not on {device}")
            if tensor.data_ptr() % 16 or not tensor.is_contiguous():
                raise MegaMoEInputError(
                    f"weights.{name} must be contiguous and begin at a multiple of 16 bytes"
                )


def _address(weights: dict[str, torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in weights.values())


class StatusWatch:
    """Copies of the status words in host memory, made beside the calls and read without waiting."""

    def __init__(self, status: torch.Tensor) -> None:
        self._status = status
        self._copy = torch.zeros(status.shape, dtype=status.dtype, pin_memory=True)
        self._words = self._copy.numpy()
        self._stream = torch.cuda.Stream(status.device)
        self._done = torch.cuda.Event()

    @property
    def failed(self) -> bool:
        """Whether the kernel is known to have given up: as of the last copy that ended."""
        return bool(self._words[STATUS_REPORTED])

    def refresh(self) -> None:
        """Begin another copy, unless one is still under way."""
        if self._done.query():
            with torch.cuda.stream(self._stream):
                self._copy.copy_(self._status, non_blocking=True)
                self._done.record(self._stream)


def tile_policies(plan: Plan, tokens: Sequence[int] | None) -> list[TilePolicy]:
    """The different tile policies of calls with these numbers of tokens; None for all numbers."""
    config = plan.config
    if tokens is None:
        finite = [most for most, _ in TILES if most != float("inf")] + [UNPACK_ROWS]
        last = [most * config.experts // (config.ranks * config.topk) for most in finite]
        edges = {0, config.capacity} | set(last) | {n + 1 for n in last}
        tokens = sorted(n for n in edges if n <= config.capacity)
    return list(dict.fromkeys(plan.policy(n) for n in tokens))
