"""One call on several GPUs, made to be recorded: one process a GPU, all released together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megamoe.bench.cases import (
    BenchError,
    choose_experts,
    random_inputs,
    random_weights,
    shape_fields,
)
from megamoe.bench.run import TIMEOUT_S, free_port, join_ranks, require_gpus
from megamoe.bench.timing import DEVICE, DEVICE_HZ, FLUSH_BYTES, Ranks
from megamoe.config import MoEConfig
from megamoe.plan import Plan
from megamoe.symmetric import MegaMoEError
from megamoe.timeline.events import Timeline, align, read
from megamoe.timeline.trial import DEFAULT_SHAPE, places_for

CALLS = 3  # the last one is recorded
HIDDEN_S = 5e-3  # the device waits so long that the host has queued the call


@dataclass(frozen=True, kw_only=True)
class GpusTrial:
    """A call that is ready to be recorded on `gpus` GPUs, a rank each.

    tokens: of each rank. events: places for events of each role of a program. cold: whether L2 is
    overwritten before the call; otherwise the same call has just been made.
    """

    shape: str
    tokens: int
    gpus: int
    recipe: str
    routing: str
    events: int
    seed: int
    cold: bool

    @property
    def config(self) -> MoEConfig:
        return MoEConfig(
            **shape_fields(self.shape, ranks=self.gpus),
            recipe=self.recipe,
            ranks=self.gpus,
            capacity=self.tokens,
            timeout_s=TIMEOUT_S,
        )

    @property
    def idx(self) -> torch.Tensor:
        """Every process makes the same: int32 [ranks, tokens, topk]."""
        return choose_experts(self.config, tokens=self.tokens, routing=self.routing, seed=self.seed)

    @property
    def title(self) -> str:
        return (
            f"{self.shape}, {self.recipe}, {self.tokens} tokens a rank, {self.routing} routing, "
            f"{self.gpus} x {torch.cuda.get_device_name(0)}, {'cold' if self.cold else 'warm'} L2"
        )

    def record(self) -> Timeline:
        """Start the processes, make the calls, and put together what the ranks recorded.

        Raises MegaMoEError with what a rank says: the GPUs cannot work together, or a rank failed.
        """
        import torch.multiprocessing as multiprocessing

        with TemporaryDirectory() as folder:
            arguments = (self, Path(folder), free_port())
            try:
                multiprocessing.spawn(_rank_main, args=arguments, nprocs=self.gpus)
            except multiprocessing.ProcessRaisedException as error:
                # its text is the trace of the rank, which ends in the words of the error
                _, found, words = str(error).rpartition(f"{MegaMoEError.__name__}: ")
                if not found:
                    raise
                raise MegaMoEError(words.strip()) from error
            return put_together([_file(Path(folder), rank) for rank in range(self.gpus)])


def make(
    *,
    gpus: int,
    shape: str | None = None,
    tokens: int,
    recipe: str,
    routing: str = "balanced",
    events: int | None = None,
    seed: int = 0,
    cold: bool = True,
) -> GpusTrial:
    """Random weights and inputs for `tokens` tokens on each of `gpus` GPUs; nothing runs yet.

    events: None for as many as the call needs.
    Raises BenchError or MegaMoEConfigError for what cannot run here.
    """
    if gpus < 2:
        raise BenchError(f"--gpus must be at least 2, got {gpus}: leave it out to trace one GPU")
    for name, value in (("tokens", tokens), ("events", events)):
        if value is not None and value < 1:
            raise BenchError(f"{name} must be at least 1, got {value}")
    trial = GpusTrial(
        shape=shape or DEFAULT_SHAPE["gluon"],
        tokens=tokens,
        gpus=gpus,
        recipe=recipe,
        routing=routing,
        events=events or 0,
        seed=seed,
        cold=cold,
    )
    plan = Plan(trial.config, programs=_programs(trial.config))
    return trial if events else replace(trial, events=places_for(plan, trial.idx))


def _programs(config: MoEConfig) -> int:
    """Programs that every rank will have."""
    require_gpus(
        config.ranks,
        config=config,
        use="--gpus records",
        instead="--ranks N simulates the ranks in one process, with --backend interpreter on any "
        "CPU",
    )
    each = [torch.cuda.get_device_properties(n) for n in range(config.ranks)]
    return max(1, min(gpu.multi_processor_count for gpu in each) - config.reserve_sms)


def put_together(files: Sequence[Path]) -> Timeline:
    """One timeline of the files that the ranks wrote, in order of rank, aligned."""
    saved = [torch.load(file, weights_only=True) for file in files]
    # set-up has made the ranks agree on the number of programs
    return align(read([rank["trace"] for rank in saved], programs=saved[0]["programs"]))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pt"


# --- a rank --------------------------------------------------------------------------------------


def _rank_main(rank: int, trial: GpusTrial, folder: Path, port: int) -> None:
    ranks = join_ranks(rank=rank, ranks=trial.gpus, port=port)
    trace, programs = record_rank(trial, ranks)
    torch.save({"trace": trace, "programs": programs}, _file(folder, rank))
    ranks.close()


def record_rank(trial: GpusTrial, ranks: Ranks) -> tuple[torch.Tensor, int]:
    """What this rank records in the last of a few equal calls, and its number of programs."""
    from megamoe.distributed import SymmetricMoE

    config, tokens = trial.config, trial.tokens
    weights = random_weights(config, rank=ranks.rank, seed=trial.seed, device=DEVICE)
    inputs = random_inputs(
        config,
        idx=trial.idx[ranks.rank],
        seed=trial.seed * 1009 + ranks.rank,
        device=DEVICE,
    )
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    with SymmetricMoE(config=config, trace=trial.events) as moe:
        moe.setup()
        moe.warmup(weights, tokens=[tokens])
        given = {name: value for name, value in inputs._asdict().items() if value is not None}
        moe.forward(weights=weights, **given)  # leaves its inputs in the buffer
        moe.check()
        for n in range(CALLS):
            moe.take_trace()
            if trial.cold:
                flush.fill_(n)
            else:
                # the call to be recorded writes over all of its events: it has the same
                moe.forward(weights=weights, tokens=tokens)
            ranks.host_barrier()
            torch.cuda._sleep(int(HIDDEN_S * DEVICE_HZ))
            ranks.device_barrier()
            moe.forward(weights=weights, tokens=tokens)
        moe.check()
        trace = moe.take_trace()
        ranks.host_barrier()  # no rank's memory goes while another may read it
        return trace, moe.plan.programs
