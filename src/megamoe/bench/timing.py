"""How the benchmark times: ranks that start together, samples by events, and the limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from megamoe import diagnosis
from megamoe.bench.cases import Limits
from megamoe.chain import chain_plan
from megamoe.config import MoEConfig, RankInputs
from megamoe.forward import default_programs
from megamoe.launch import CHAIN, FUSED, GluonBackend, Launch
from megamoe.plan import Plan
from megamoe.weights import KernelWeights

DEVICE = "cuda"
FLUSH_BYTES = 256 << 20  # several times the L2 cache
READ_BYTES = 2 << 30
LINK_BYTES = 256 << 20
MATRIX = (12288, 4096, 4096)  # M, N, K of the cuBLAS limits
LIMIT_SAMPLES = 10
UNTIMED = 2  # calls before the samples
DEVICE_HZ = 2.0e9  # at least the SM clock: torch.cuda._sleep counts its cycles


# --- ranks --------------------------------------------------------------------------------------


class Alone:
    """One rank in this process: nobody to wait for."""

    rank, ranks = 0, 1

    def host_barrier(self) -> None:
        torch.cuda.synchronize()

    def device_barrier(self) -> None:
        pass

    def slowest(self, times: list[float]) -> list[float]:
        """The maximum over the ranks of each sample."""
        return times

    def all_true(self, value: bool) -> bool:
        return value

    def link_gbs(self) -> float:
        return 0.0


class Together:
    """One rank of several, one process a GPU, which meet at a TCP port of this host."""

    def __init__(self, *, rank: int, ranks: int, port: int) -> None:
        import torch.distributed as dist
        from torch.distributed import _symmetric_memory as symmetric_memory

        self.rank, self.ranks = rank, ranks
        self._dist = dist
        dist.init_process_group(
            "cpu:gloo,cuda:nccl",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=ranks,
        )
        self._memory = symmetric_memory.empty(
            LINK_BYTES, dtype=torch.uint8, device=torch.device("cuda", rank)
        )
        self._memory.random_(0, 256)
        self._handle = symmetric_memory.rendezvous(self._memory, dist.group.WORLD)

    def host_barrier(self) -> None:
        torch.cuda.synchronize()
        self._dist.all_reduce(torch.zeros(1))

    def device_barrier(self) -> None:
        self._handle.barrier(channel=0)

    def slowest(self, times: list[float]) -> list[float]:
        worst = torch.tensor(times, dtype=torch.float64)
        self._dist.all_reduce(worst, op=self._dist.ReduceOp.MAX)
        return worst.tolist()

    def all_true(self, value: bool) -> bool:
        return min(self.slowest([0.0 if value else 1.0])) == 0.0

    def link_gbs(self) -> float:
        """GB/s that arrive at a GPU while every rank copies from the next one."""
        peer = self._handle.get_buffer((self.rank + 1) % self.ranks, (LINK_BYTES,), torch.uint8)
        target = torch.empty_like(peer)
        times = Timer(self, samples=LIMIT_SAMPLES).measure(lambda i: target.copy_(peer))
        return LINK_BYTES / median(times) / 1e3

    def close(self) -> None:
        self._handle = self._memory = None
        self._dist.destroy_process_group()


Ranks = Alone | Together


class Timer:
    """Times calls by events; every rank of `ranks` measures the same calls in the same order."""

    def __init__(self, ranks: Ranks, *, samples: int) -> None:
        self._ranks, self._samples = ranks, samples
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)

    def measure(
        self,
        call: Callable[[int], object],
        *,
        before: Callable[[int], object] | None = None,
        cold: bool = True,
    ) -> list[float]:
        """Microseconds of `call(i)` for each sample i, the slowest rank's.

        before(i) is not timed.  cold: L2 is overwritten before the call; otherwise `call(i)` has
        just been made.
        """
        times, hidden_s = [], 1e-3
        for i in range(self._samples + UNTIMED):
            if before is not None:
                before(i)
            if cold:
                self._flush.fill_(i & 0x7F)
            else:
                call(i)
            self._ranks.host_barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # the device waits until the host has queued the call, so that its work is not timed
            torch.cuda._sleep(int(hidden_s * DEVICE_HZ))
            self._ranks.device_barrier()
            start.record()
            began = time.perf_counter()
            call(i)
            host_s = time.perf_counter() - began
            end.record()
            torch.cuda.synchronize()
            hidden_s = min(0.1, max(1e-3, 2.0 * host_s))
            times.append(start.elapsed_time(end) * 1e3)
        return self._ranks.slowest(times[UNTIMED:])


# --- the two ways to run a rank ----------------------------------------------------------------


class LocalEngine:
    """One rank that has this process's GPU to itself."""

    def __init__(self, *, config: MoEConfig, weights: KernelWeights, chain: bool) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        programs = default_programs("gluon", config)
        self._fused = GluonBackend(
            plan=Plan(config, programs=programs), weights=[weights], device=device
        )
        self._chain = None
        if chain:
            plan = chain_plan(config, programs=programs)
            self._chain = GluonBackend(plan=plan, weights=[weights], device=device)

    def write(self, inputs: RankInputs) -> None:
        """Put the inputs into the buffers, for `fused` and `chain`."""
        for backend in (self._fused, self._chain):
            if backend is not None:
                backend.buffers[0].write_inputs(inputs)

    def fused(self, tokens: int) -> torch.Tensor:
        return self._run(self._fused, FUSED, tokens)

    def chain(self, tokens: int) -> torch.Tensor:
        return self._run(self._chain, CHAIN, tokens)

    def call(self, inputs: RankInputs) -> torch.Tensor:
        self._fused.buffers[0].write_inputs(inputs)
        return self.fused(inputs.x.shape[0])

    def _run(self, backend: GluonBackend, launches: Sequence[Launch], tokens: int) -> torch.Tensor:
        return backend.run(launches, [backend.plan.policy(tokens)], [tokens])[0]

    def check(self) -> None:
        for backend in (self._fused, self._chain):
            if backend is not None:
                diagnosis.check(backend.buffers[0], rank=0)

    def close(self) -> None:
        self._fused = self._chain = None


class SymmetricEngine:
    """One rank of one or several, through the public object; its inputs are written into the buffer
    by one launch.
    """

    def __init__(
        self, *, config: MoEConfig, weights: KernelWeights, chain: bool, tokens: Sequence[int]
    ) -> None:
        from megamoe.distributed import SymmetricMoE

        self._weights = weights
        self._has_chain = chain
        self._moe = SymmetricMoE(config=config)
        self._moe.setup()
        if chain:
            self._moe.setup_chain()
        self._moe.warmup(weights, tokens=list(tokens))

    def write(self, inputs: RankInputs) -> None:
        """Put the inputs into the buffers by making the calls once; collective."""
        self.call(inputs)
        if self._has_chain:
            self._moe.chain(weights=self._weights, **_arguments(inputs))

    def fused(self, tokens: int) -> torch.Tensor:
        return self._moe.forward(weights=self._weights, tokens=tokens)

    def chain(self, tokens: int) -> torch.Tensor:
        return self._moe.chain(weights=self._weights, tokens=tokens)

    def call(self, inputs: RankInputs) -> torch.Tensor:
        return self._moe.forward(weights=self._weights, **_arguments(inputs))

    def check(self) -> None:
        self._moe.check()

    def close(self) -> None:
        self._moe.close()


def _arguments(inputs: RankInputs) -> dict[str, torch.Tensor]:
    given = inputs._asdict()
    return {name: value for name, value in given.items() if value is not None}


Engine = LocalEngine | SymmetricEngine


# --- limits -------------------------------------------------------------------------------------


def measure_limits(ranks: Ranks) -> Limits:
    """The limits of this machine, as far as torch's own kernels reach them."""
    timer = Timer(ranks, samples=LIMIT_SAMPLES)
    fp8, bf16 = _matrix_tflops(timer)
    limits = Limits(
        memory_gbs=_memory_gbs(timer),
        link_gbs=ranks.link_gbs(),
        fp8_tflops=fp8,
        bf16_tflops=bf16,
    )
    torch.cuda.empty_cache()
    return limits


def _memory_gbs(timer: Timer) -> float:
    """Of a sum, or of a copy that reads and writes: whichever is more."""
    source = torch.randn(READ_BYTES // 4, device=DEVICE)
    target = torch.empty_like(source)
    read = READ_BYTES / median(timer.measure(lambda i: source.sum()))
    copy = 2 * READ_BYTES / median(timer.measure(lambda i: target.copy_(source)))
    return max(read, copy) / 1e3


def _matrix_tflops(timer: Timer) -> tuple[float, float]:
    """cuBLAS with e4m3 operands (accurate accumulation), and with bf16."""
    m, n, k = MATRIX
    a, b = (torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16) for rows in (m, n))
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=DEVICE)

    def multiply(_: int) -> torch.Tensor:
        return torch._scaled_mm(
            a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=False
        )

    flops = 2.0 * m * n * k
    fp8 = flops / median(timer.measure(multiply))
    bf16 = flops / median(timer.measure(lambda i: a @ b.t()))
    return fp8 / 1e6, bf16 / 1e6
