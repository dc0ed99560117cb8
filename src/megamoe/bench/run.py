"""The benchmark: whole calls on this machine's GPUs, beside the limits of the same machine.

A sample is timed by two events around the call, with the device held back before the first one so
that the host's work is hidden, and all ranks released together by a barrier on the device.  Every
sample has another routing; weights and x are random.  A time is the maximum over the ranks of each
sample, then the median over the samples.

Of a case are timed, in this order: the fused call with its inputs in the buffer, with a cold L2
(`fused_us`, what the other figures come from) and just after the same call (`warm_us`); the call
that also takes its inputs from tensors (`call_us`); and the chain with its inputs in the buffer and
a cold L2 (`chain_us`).  TFLOPS counts 6 * hidden * intermediate * slots a rank.
"""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch

from megamoe.bench.cases import (
    ROUTINGS,
    BenchError,
    Limits,
    Work,
    choose_experts,
    random_inputs,
    random_weights,
    shape_fields,
    work_of,
)
from megamoe.bench.timing import (
    DEVICE,
    Alone,
    Engine,
    LocalEngine,
    Ranks,
    SymmetricEngine,
    Timer,
    Together,
    measure_limits,
)
from megamoe.config import RECIPES, MoEConfig, RankInputs
from megamoe.forward import why_not_gluon
from megamoe.plan import Plan
from megamoe.symmetric import MegaMoEError
from megamoe.weights import KernelWeights

APIS = ("local", "symmetric")
TIMEOUT_S = 10.0  # of a wait in the kernel


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to run.  shapes: see :func:`~megamoe.bench.cases.shape_fields`; tokens per rank.

    api: "symmetric" (megamoe.distributed.SymmetricMoE) or "local" (what megamoe.MegaMoE does, one
    GPU only).
    """

    shapes: tuple[str, ...] = ("flash",)
    tokens: tuple[int, ...] = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
    recipes: tuple[str, ...] = ("mxfp4", "fp8")
    routings: tuple[str, ...] = ("balanced",)
    gpus: int = 1
    samples: int = 20
    routings_per_case: int = 4
    chain: bool = True
    api: str = "symmetric"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("shapes", "tokens", "recipes", "routings"):
            if not getattr(self, name):
                raise BenchError(f"{name} is empty: nothing would be run")
        for name, least in (("gpus", 1), ("samples", 3), ("routings_per_case", 1)):
            if getattr(self, name) < least:
                raise BenchError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if min(self.tokens) < 1:
            raise BenchError(f"tokens must be at least 1, got {min(self.tokens)}")
        for name, allowed in (("recipes", RECIPES), ("routings", ROUTINGS)):
            for value in getattr(self, name):
                if value not in allowed:
                    raise BenchError(f"{name} can be {', '.join(allowed)}, got {value!r}")
        if self.api not in APIS or (self.api == "local" and self.gpus > 1):
            raise BenchError(
                f"api can be symmetric, or local with one GPU; got {self.api!r} and {self.gpus}"
            )
        for shape in self.shapes:
            shape_fields(shape, ranks=self.gpus)

    def config(self, shape: str, recipe: str) -> MoEConfig:
        return MoEConfig(
            **shape_fields(shape, ranks=self.gpus),
            recipe=recipe,
            ranks=self.gpus,
            capacity=max(self.tokens),
            timeout_s=TIMEOUT_S,
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one case.  Times in microseconds; None where it was not measured.

    spread_us: the 10th and 90th percentile of `fused_us`.  tflops, memory_gbs and link_gbs are per
    rank.  floor_of names the limit that sets floor_us.  equal: fused and chain gave the same bits.
    error: why there is no result.
    """

    shape: str
    recipe: str
    routing: str
    tokens: int
    ranks: int
    block_m: int
    fused_us: float | None = None
    spread_us: tuple[float, float] | None = None
    warm_us: float | None = None
    call_us: float | None = None
    chain_us: float | None = None
    tflops: float | None = None
    memory_gbs: float | None = None
    link_gbs: float | None = None
    floor_us: float | None = None
    floor_of: str | None = None
    floor_fraction: float | None = None
    times_chain: float | None = None
    equal: bool | None = None
    error: str | None = None

    @property
    def key(self) -> tuple[object, ...]:
        return self.shape, self.recipe, self.routing, self.tokens, self.ranks

    @property
    def failed(self) -> bool:
        return self.error is not None or self.equal is False


# --- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to be measured, with all its routings: int32 [variants, ranks, tokens, topk]."""

    shape: str
    config: MoEConfig
    routing: str
    tokens: int
    idx: torch.Tensor

    def row(self, **results: object) -> Row:
        policy = Plan(self.config).policy(self.tokens)
        return Row(
            shape=self.shape,
            recipe=self.config.recipe,
            routing=self.routing,
            tokens=self.tokens,
            ranks=self.config.ranks,
            block_m=policy.block_m,
            **results,
        )

    def work(self) -> Work:
        """Mean over the routings."""
        each = [work_of(self.config, idx) for idx in self.idx]
        names = [field.name for field in fields(Work)]
        return Work(**{n: sum(getattr(w, n) for w in each) / len(each) for n in names})


def make_case(
    options: BenchOptions, shape: str, config: MoEConfig, routing: str, tokens: int
) -> Case:
    """All ranks make the same one."""
    idx = [
        choose_experts(config, tokens=tokens, routing=routing, seed=options.seed + variant)
        for variant in range(options.routings_per_case)
    ]
    return Case(shape=shape, config=config, routing=routing, tokens=tokens, idx=torch.stack(idx))


def measure_case(
    case: Case, *, engine: Engine, ranks: Ranks, options: BenchOptions, limits: Limits
) -> Row:
    """Run and time one case; raises what the kernel raises."""
    inputs = [
        random_inputs(
            case.config,
            idx=idx[ranks.rank],
            seed=(options.seed + variant) * 1009 + ranks.rank,
            device=DEVICE,
        )
        for variant, idx in enumerate(case.idx)
    ]

    def pick(i: int) -> RankInputs:
        return inputs[i % len(inputs)]

    tokens = case.tokens
    engine.write(inputs[0])
    y = engine.fused(tokens).clone()
    engine.check()
    equal = None
    if options.chain:
        equal = bool(torch.equal(y, engine.chain(tokens)))
        engine.check()
        equal = ranks.all_true(equal)
    timer = Timer(ranks, samples=options.samples)

    def write(i: int) -> None:
        engine.write(pick(i))

    fused = timer.measure(lambda i: engine.fused(tokens), before=write)
    warm = timer.measure(lambda i: engine.fused(tokens), before=write, cold=False)
    call = timer.measure(lambda i: engine.call(pick(i)))
    chain = None
    if options.chain:
        chain = timer.measure(lambda i: engine.chain(tokens), before=write)
    engine.check()
    return summarise(
        case, limits=limits, fused=fused, warm=warm, call=call, chain=chain, equal=equal
    )


def summarise(
    case: Case,
    *,
    limits: Limits,
    fused: list[float],
    warm: list[float],
    call: list[float],
    chain: list[float] | None,
    equal: bool | None,
) -> Row:
    """The row for these samples, in microseconds."""
    work = case.work()
    us = median(fused)
    floors = work.floor_us(limits, recipe=case.config.recipe)
    floor_of = max(floors, key=floors.__getitem__)
    tenths = quantiles(fused, n=10, method="inclusive")
    return case.row(
        fused_us=us,
        spread_us=(tenths[0], tenths[-1]),
        warm_us=median(warm),
        call_us=median(call),
        chain_us=None if chain is None else median(chain),
        tflops=work.flops / us / 1e6,
        memory_gbs=work.memory_bytes / us / 1e3,
        link_gbs=work.link_bytes / us / 1e3,
        floor_us=floors[floor_of],
        floor_of=floor_of,
        floor_fraction=floors[floor_of] / us,
        times_chain=None if chain is None else median(chain) / us,
        equal=equal,
    )


def _make_engine(
    options: BenchOptions, config: MoEConfig, ranks: Ranks, weights: KernelWeights
) -> Engine:
    if options.api == "local":
        return LocalEngine(config=config, weights=weights, chain=options.chain)
    return SymmetricEngine(
        config=config, weights=weights, chain=options.chain, tokens=options.tokens
    )


def _measure_all(options: BenchOptions, ranks: Ranks, limits: Limits) -> Iterator[Row]:
    """Every case in turn.  With one rank a case that fails becomes a row with an error; with
    several, the others would wait for it, so it ends the run.
    """
    for shape in options.shapes:
        for recipe in options.recipes:
            config = options.config(shape, recipe)
            weights = random_weights(config, rank=ranks.rank, seed=options.seed, device=DEVICE)
            engine = None
            for routing in options.routings:
                for tokens in options.tokens:
                    case = make_case(options, shape, config, routing, tokens)
                    try:
                        engine = engine or _make_engine(options, config, ranks, weights)
                        row = measure_case(
                            case, engine=engine, ranks=ranks, options=options, limits=limits
                        )
                    except Exception as error:
                        if ranks.ranks > 1:
                            raise
                        row = case.row(error=f"{type(error).__name__}: {error}")
                        if isinstance(error, MegaMoEError) and engine is not None:
                            engine.close()  # its buffers cannot be used again
                            engine = None
                    yield row
            if engine is not None:
                engine.close()
            del engine, weights
            gc.collect()
            torch.cuda.empty_cache()


# --- running -----------------------------------------------------------------------------------


def require_gpus(
    gpus: int,
    *,
    config: MoEConfig | None = None,
    use: str = "bench times",
    instead: str = "megamoe trace --backend interpreter shows a timeline with simulated time",
) -> None:
    """Raise BenchError if this machine cannot run the compiled kernel on so many GPUs.

    config: of the kernel; None for the smallest. use, instead: for the message.
    """
    config = config or MoEConfig(
        hidden=256, intermediate=256, experts=1, topk=1, capacity=1, recipe="bf16"
    )
    reason = why_not_gluon(config)
    if reason is not None:
        raise BenchError(f"{use} the compiled kernel, which cannot run here: {reason}. ({instead})")
    found = torch.cuda.device_count()
    if gpus > found:
        raise BenchError(f"--gpus {gpus}, but {found} GPUs are visible")


def machine() -> dict[str, object]:
    from megamoe.kernel.compat import TRITON_VERSION

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": str(TRITON_VERSION),
        "cuda": torch.version.cuda,
    }


def run_bench(options: BenchOptions, *, report: Callable[[Limits | Row], None]) -> None:
    """Measure everything, one process a GPU; `report` gets the limits, then each row as it comes.

    Raises BenchError where the benchmark cannot run.
    """
    require_gpus(options.gpus)
    if options.gpus == 1:
        limits = measure_limits(Alone())
        report(limits)
        for row in _measure_all(options, Alone(), limits):
            report(row)
        return
    import torch.multiprocessing as multiprocessing

    with TemporaryDirectory() as folder:
        results = Path(folder, "results")
        results.touch()
        context = multiprocessing.spawn(
            _rank_main, args=(options, results, free_port()), nprocs=options.gpus, join=False
        )
        with results.open() as lines:
            ended = False
            while not ended:
                try:
                    ended = context.join(timeout=1.0)
                finally:
                    # also those before a rank failed
                    for line in _whole_lines(lines):
                        report(_decode(json.loads(line)))


def free_port() -> int:
    """A TCP port of this host where the ranks can meet."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _whole_lines(stream: Any) -> Iterator[str]:
    """The lines that are complete; a rank may be writing the next one."""
    while True:
        place = stream.tell()
        line = stream.readline()
        if not line.endswith("\n"):
            stream.seek(place)
            return
        yield line


def _decode(line: dict[str, Any]) -> Limits | Row:
    if "memory_gbs" in line and "shape" not in line:
        return Limits(**line)
    if line["spread_us"] is not None:
        line["spread_us"] = tuple(line["spread_us"])
    return Row(**line)


def join_ranks(*, rank: int, ranks: int, port: int) -> Together:
    """Make this process one of several ranks, each with the GPU of its number."""
    # one host: no network is needed; nothing here uses NVLink multicast, so none is set up
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    torch.cuda.set_device(rank)
    return Together(rank=rank, ranks=ranks, port=port)


def _rank_main(rank: int, options: BenchOptions, results: Path, port: int) -> None:
    ranks = join_ranks(rank=rank, ranks=options.gpus, port=port)

    def report(result: Limits | Row) -> None:
        if rank == 0:
            with results.open("a") as stream:
                stream.write(json.dumps(asdict(result)) + "\n")

    # times are the slowest rank's, so all ranks find the same limits
    limits = measure_limits(ranks)
    report(limits)
    for row in _measure_all(options, ranks, limits):
        report(row)
    ranks.close()
