"""One process a GPU: an object that owns the symmetric buffer and makes the calls of one rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from megamoe import diagnosis
from megamoe.chain import chain_plan
from megamoe.config import MegaMoEInputError, MoEConfig, RankInputs, validate_inputs
from megamoe.launch import CHAIN, FUSED, Launch
from megamoe.plan import Plan, TilePolicy
from megamoe.ranks import ops, staging
from megamoe.ranks.compile_lock import compile_lock
from megamoe.ranks.lane import Lane, StatusWatch, tile_policies
from megamoe.ranks.meeting import Meeting, MeetingError
from megamoe.ranks.memory import allocate_alone, allocate_local, find_party, join_memory
from megamoe.ranks.topology import (
    Member,
    Probe,
    unreachable,
    why_no_access,
    why_not_gpu,
    why_not_together,
)
from megamoe.symmetric import MegaMoEError, allocate_unpacked
from megamoe.weights import KernelWeights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOG = logging.getLogger("megamoe")


class SymmetricMoE:
    """One rank of MoE layers under expert parallelism: one process a GPU, one kernel a forward.

        moe = SymmetricMoE(config=config)       # refuses a GPU that cannot run the kernel
        moe.setup()                             # collective: meets the others, makes the buffer
        moe.warmup(weights)                     # collective: compiles
        y = moe.forward(weights=weights, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
        moe.check()                             # waits for the GPU; raises if a rank was missing
        moe.close()

    config: shapes and number formats, the same on every rank; `ranks` is the size of the group.
    group: None for the default process group; with one rank none is needed.
    device: None for the current CUDA device.
    trace: events of a timeline that each role of a program can record in a call of :meth:`forward`,
    the same on every rank; 0 for none.
    setup_timeout_s: how long a collective method waits for a rank before it names it.
    probe: asks about GPUs; only tests pass another.

    One object serves all layers of the same configuration, one call after another on one stream.
    Objects must be made in the same order on all ranks.  Every forward must happen on all ranks,
    with any number of tokens on each, 0 included.

    Raises MegaMoEError: this process has no GPU that can run the kernel; the other ranks are told,
    and their `setup` refuses too.
    """

    def __init__(
        self,
        *,
        config: MoEConfig,
        group: ProcessGroup | None = None,
        device: torch.device | str | int | None = None,
        trace: int = 0,
        setup_timeout_s: float = 300.0,
        probe: Probe | None = None,
    ) -> None:
        self.config = config
        self.trace = trace
        self.poisoned: str | None = None
        self._probe = probe or Probe()
        self._setup_timeout_s = setup_timeout_s
        self._party = find_party(config, group)
        self._meeting = Meeting(
            self._party.store,
            rank=self._party.rank,
            ranks=self._party.ranks,
            timeout_s=setup_timeout_s,
        )
        problem = self._find_device(device)
        if problem:
            self._meeting.give_up(problem, for_good=True)
            raise MegaMoEError(f"rank {self.rank}: {problem}")
        self._programs = 0
        self._fused: Lane | None = None
        self._chain: Lane | None = None
        self._watch: StatusWatch | None = None
        self._order: torch.Tensor | None = None
        self._number = ops.register(self)

    def _find_device(self, device: torch.device | str | int | None) -> str | None:
        """Set `device` and its facts; what is wrong with them or with `trace`, or None."""
        if self.trace < 0:
            return f"trace must be at least 0, got {self.trace}"
        if self.config.ranks != self._party.ranks:
            return (
                f"the configuration has {self.config.ranks} ranks, the process group "
                f"{self._party.ranks}"
            )
        missing = self._probe.missing()
        if missing:
            return f"the compiled kernel cannot run here: {missing}"
        if device is None:
            device = torch.cuda.current_device()
        self.device = torch.device(device) if isinstance(device, str) else device
        if isinstance(device, int):
            self.device = torch.device("cuda", device)
        if self.device.type != "cuda":
            return f"the device must be a CUDA device, got {self.device}"
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._gpu = self._probe.gpu(self.device)
        return why_not_gpu(self._gpu)

    @property
    def rank(self) -> int:
        return self._party.rank

    @property
    def plan(self) -> Plan:
        """Regions and bytes of the buffer; known once it is set up."""
        return self._lane(chain=False).plan

    # --- set-up: collective ---

    def setup(self) -> None:
        """Meet the other ranks, make or clear the buffer, and forget that the object was poisoned.

        Collective and eager.  Raises MegaMoEError on every rank: a GPU without WGMMA, GPUs that
        cannot reach each other, two ranks on one GPU or on two machines, different
        configurations, no memory on one of them, a rank that does not come within
        `setup_timeout_s`.
        """
        self._meeting.next_round()
        with self._collective("set-up"):
            self._say("meeting %d ranks", self._party.ranks)
            members = self._meeting.gather("configuration", self._member())
            self._refuse(why_not_together(members))
            mine = unreachable(self._probe, self.device, members, self.rank)
            self._refuse(why_no_access(self._meeting.gather("peer access", mine)))
            sms = min(member.gpu.sms for member in members)
            self._programs = max(1, sms - self.config.reserve_sms)
            held = self._meeting.gather("buffers held", [lane.plan for lane in self._lanes()])
            again = self._fused is not None and all(plans == held[0] for plans in held)
            if again:
                self._clear()
            else:
                self._fused = self._chain = self._watch = None
                plan = Plan(self.config, programs=self._programs, trace=self.trace)
                self._fused = self._make_lane(plan, FUSED)
                self._order = self._fused.buffer.memory.new_zeros(1, dtype=torch.int32)
            self._watch = self._make_watch()
            self._meeting.barrier("buffer is ready")
            self.poisoned = None
            self._say("buffer is %s", "cleared" if again else "ready")

    def setup_chain(self) -> None:
        """Make the buffer of :meth:`chain`, which is larger.  Collective; nothing if it exists."""
        self._lane(chain=False)
        with self._collective("set-up of the chain"):
            if self._chain is None:
                plan = chain_plan(self.config, programs=self._programs)
                self._chain = self._make_lane(plan, CHAIN)
            self._meeting.barrier("buffer of the chain is ready")

    def warmup(self, weights: KernelWeights, *, tokens: Sequence[int] | None = None) -> None:
        """Compile and load every kernel that calls with these numbers of tokens need, for
        :meth:`chain` too if it is set up, then launch each of them without tokens (which counts in
        the numbers of calls that errors name), after which nothing is done for the first time any
        more.  Collective.

        tokens: None for all numbers up to the capacity (at most five tile policies); 0 is always
        among them. Processes that share Triton's cache compile one at a time, so each kernel is
        compiled once.
        """
        self._lane(chain=False)
        tokens = None if tokens is None else [*tokens, 0]
        work = [(lane, p) for lane in self._lanes() for p in tile_policies(lane.plan, tokens)]
        given = self._weights(weights)
        with self._collective("warm-up"), torch.cuda.device(self.device):
            for n, (lane, policy) in enumerate(work, start=1):
                begin = time.monotonic()
                with compile_lock(timeout_s=self._setup_timeout_s):
                    lane.compile(given, policy)
                seconds = time.monotonic() - begin
                self._say(
                    "compiled %d of %d: block_m %d, %.1f s",
                    n, len(work), policy.block_m, seconds,
                )  # fmt: skip
            with compile_lock(timeout_s=self._setup_timeout_s):
                for each in self._lanes():
                    for spec in staging.stage_specs(each.plan):
                        staging.compile_stage(each.buffer, spec)
            self._meeting.barrier("warm-up")
            self._call_without_tokens(weights, work)

    def close(self) -> None:
        """Wait for this GPU and free the buffers.  Not collective; may be called twice."""
        if self._fused is not None:
            torch.cuda.synchronize(self.device)
        self._fused = self._chain = self._watch = None
        self.poisoned = "it was closed"

    def __enter__(self) -> SymmetricMoE:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- calls ---

    def forward(
        self,
        *,
        weights: KernelWeights,
        x: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        tokens: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """y bf16 [t, hidden] of this rank's tokens.  Does not wait for the device.

        weights: of this rank, on this device. x [t, hidden]: bf16, or e4m3 with x_scale; topk_idx
        [t, topk]: int32 or int64, -1 skips a slot; topk_weights [t, topk]: fp32. A launch that
        writes the inputs into the buffer goes before the kernel. x=None takes what the caller has
        written into :meth:`inputs`, `tokens` rows, in one launch. out: bf16 [t, hidden],
        contiguous, written and returned.

        Each CUDA stream order is respected; a CUDA graph captures it once :meth:`warmup` was
        called, and torch.compile(fullgraph=True) takes it as one custom op.

        Raises MegaMoEInputError for inputs that do not fit (ids out of range are found by the
        kernel: see :meth:`check`), MegaMoEError if the object is poisoned.
        """
        return self._call(
            weights, x, x_scale, topk_idx, topk_weights, tokens=tokens, out=out, chain=False
        )

    def chain(
        self,
        *,
        weights: KernelWeights,
        x: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        x_scale: torch.Tensor | None = None,
        tokens: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :meth:`forward`, in five launches over the buffer of :meth:`setup_chain`."""
        return self._call(
            weights, x, x_scale, topk_idx, topk_weights, tokens=tokens, out=out, chain=True
        )

    def inputs(self, tokens: int, *, chain: bool = False) -> dict[str, torch.Tensor]:
        """Views of the buffer for `forward(x=None, tokens=tokens)`: x [t, hidden], topk_idx int32
        [t, topk], topk_weights fp32 [t, topk], and for recipes with scales x_scale: uint8 UE8M0
        codes [t, hidden / 32] (0 for a block of zeros), fp32 [t], or fp32 [t, ceil(hidden / 128)].
        """
        config, buffer = self.config, self._lane(chain=chain).buffer
        self._check_tokens(tokens)
        views = {
            "x": buffer.view("x")[:tokens, : config.hidden],
            "topk_idx": buffer.view("topk_idx")[:tokens],
            "topk_weights": buffer.view("topk_weights")[:tokens],
        }
        if config.x_scales == "ue8m0_32":
            views["x_scale"] = buffer.view("x_scale")[:tokens, : config.hidden // 32]
        elif config.x_scales == "block128":
            views["x_scale"] = buffer.view("x_scale")[:tokens, : config.x_scale_columns]
        elif config.x_scales == "token":
            views["x_scale"] = buffer.view("x_scale")[:tokens]
        return views

    def check(self) -> None:
        """Wait for the device, and raise MegaMoEError if a wait expired or an id was out of range,
        here or on a rank that this one works with.  The object is poisoned then.
        """
        torch.cuda.synchronize(self.device)
        for lane in self._lanes():
            self._check_lane(lane)

    def take_trace(self) -> torch.Tensor:
        """Wait for the device, and take away what this rank has recorded since the last time: the
        rows that :func:`megamoe.timeline.events.read` reads, int32 [programs * roles * trace, 4],
        on the CPU.  A call writes over what the call before has recorded.
        """
        if not self.trace:
            raise MegaMoEError("nothing is recorded: make the object with trace=N on all ranks")
        view = self._lane(chain=False).buffer.view("trace")
        torch.cuda.synchronize(self.device)
        taken = view.to("cpu", copy=True)
        view.zero_()
        torch.cuda.synchronize(self.device)
        return taken

    def forget(self, weights: KernelWeights) -> None:
        """Drop the references to weights that calls have kept."""
        for lane in self._lanes():
            lane.forget(weights.tensors)

    # --- inside ---

    def _call(
        self,
        weights: KernelWeights,
        x: torch.Tensor | None,
        x_scale: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        *,
        tokens: int | None,
        out: torch.Tensor | None,
        chain: bool,
    ) -> torch.Tensor:
        if self._order is None:
            raise MegaMoEError("call setup() on all ranks first")
        if x is not None:
            tokens = x.shape[0]
        elif tokens is None:
            raise MegaMoEInputError("without x, pass tokens: the rows written by the caller")
        if torch.compiler.is_compiling():
            given = [getattr(weights, name) for name in ops.NAMES]
            rest = (x, x_scale, topk_idx, topk_weights, tokens, *given, chain, self._number)
            if out is None:
                return torch.ops.megamoe.forward(self._order, self.config.hidden, *rest)
            torch.ops.megamoe.forward_out(self._order, out, *rest)
            return out
        given = self._weights(weights)
        if out is None:
            out = self._order.new_empty((tokens, self.config.hidden), dtype=torch.bfloat16)
        self.run(given, x, x_scale, topk_idx, topk_weights, tokens=tokens, out=out, chain=chain)
        return out

    def run(
        self,
        weights: dict[str, torch.Tensor],
        x: torch.Tensor | None,
        x_scale: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        *,
        tokens: int,
        out: torch.Tensor,
        chain: bool,
    ) -> None:
        """The call itself, for :mod:`megamoe.ranks.ops`; everything is checked before anything is
        written.
        """
        lane = self._lane(chain=chain)
        self._check_tokens(tokens)
        self._check_out(out, tokens)
        inputs = None
        if x is not None:
            inputs = self._checked(x, x_scale, topk_idx, topk_weights)
        elif x_scale is not None or topk_idx is not None or topk_weights is not None:
            raise MegaMoEInputError("without x all inputs are taken from the buffer: pass none")
        watch = None if torch.cuda.is_current_stream_capturing() else self._watch
        if watch is not None and watch.failed:
            self.check()
        with torch.cuda.device(self.device):
            launches = lane.prepare(weights, tokens, out)
            if inputs is not None:
                staging.stage(lane.buffer, inputs, sms=self._gpu.sms)
            for launch in launches:
                launch()
        if watch is not None:
            watch.refresh()

    def _call_without_tokens(
        self, weights: KernelWeights, work: Sequence[tuple[Lane, TilePolicy]]
    ) -> None:
        """A kernel's first launch takes about half a millisecond longer than the next ones, and the
        first call of a process as much again.
        """
        config, device = self.config, self._fused.shared.memory.device
        given, y = self._weights(weights), self._fused.spare
        for lane, policy in work:
            for launch in lane.prepare(given, 0, y, policy):
                launch()
        self.forward(
            weights=weights,
            x=torch.empty(0, config.hidden, dtype=torch.bfloat16, device=device),
            topk_idx=torch.empty(0, config.topk, dtype=torch.int32, device=device),
            topk_weights=torch.empty(0, config.topk, device=device),
        )
        self.check()

    def _checked(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
    ) -> RankInputs:
        inputs = validate_inputs(
            self.config,
            x=x,
            x_scale=x_scale,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            rank=self.rank,
            check_ids=False,  # reading them would wait for the device
        )
        if x.device != self.device:
            raise MegaMoEInputError(
                f"rank {self.rank}: x is on {x.device}, but the buffer is on {self.device}"
            )
        return inputs

    def _check_tokens(self, tokens: int) -> None:
        if not 0 <= tokens <= self.config.capacity:
            raise MegaMoEInputError(
                f"rank {self.rank}: tokens must be between 0 and the capacity "
                f"{self.config.capacity}, got {tokens}"
            )

    def _check_out(self, out: torch.Tensor, tokens: int) -> None:
        wanted = (tokens, self.config.hidden)
        fits = tuple(out.shape) == wanted and out.dtype == torch.bfloat16
        if not fits or out.device != self.device or not out.is_contiguous() or out.data_ptr() % 16:
            raise MegaMoEInputError(
                f"rank {self.rank}: out must be bfloat16 {list(wanted)} on {self.device}, "
                f"contiguous, at a multiple of 16 bytes; got {out.dtype} {list(out.shape)} on "
                f"{out.device}"
            )

    def _weights(self, weights: KernelWeights) -> dict[str, torch.Tensor]:
        if weights.rank != self.rank or weights.config != self.config:
            raise MegaMoEInputError(
                f"the weights were packed for rank {weights.rank} of {weights.config}, this is "
                f"rank {self.rank} of {self.config}"
            )
        return weights.tensors

    def _lane(self, *, chain: bool) -> Lane:
        """The lane of a call, if one can be made."""
        if self.poisoned:
            raise MegaMoEError(
                f"rank {self.rank}: this object cannot be used until setup() is called on all "
                f"ranks: {self.poisoned}"
            )
        lane = self._chain if chain else self._fused
        if lane is None:
            method = "setup_chain" if chain else "setup"
            raise MegaMoEError(f"rank {self.rank}: call {method}() on all ranks first")
        return lane

    def _lanes(self) -> list[Lane]:
        return [lane for lane in (self._fused, self._chain) if lane is not None]

    def _member(self) -> Member:
        return Member(
            config=self.config,
            gpu=self._gpu,
            torch=str(torch.__version__),
            triton=_version("triton"),
            trace=self.trace,
        )

    def _refuse(self, reason: str | None) -> None:
        if reason:
            raise MegaMoEError(f"rank {self.rank} refuses: {reason}")

    @contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        """An error of this rank is told to the others, which would wait for it."""
        try:
            yield
        except BaseException as error:
            self.poisoned = f"its {what} failed: {error}"
            self._meeting.give_up(f"{what}: {type(error).__name__}: {error}")
            if isinstance(error, MeetingError):
                raise MegaMoEError(f"rank {self.rank}, {what}: {error}") from error
            raise

    def _make_lane(self, plan: Plan, launches: Sequence[Launch]) -> Lane:
        needed = plan.nbytes + plan.unpacked_bytes
        self._say("allocating %.1f MiB", needed / 2**20)
        alone = self._party.ranks == 1
        with torch.cuda.device(self.device):
            shared, problem = None, None
            try:
                unpacked = allocate_unpacked(plan, self.device)
                if alone:
                    shared = allocate_alone(plan, self.device)
                else:
                    memory = allocate_local(plan, self.device)
            except RuntimeError as error:  # out of memory, most likely
                problem = str(error)
            problems = self._meeting.gather("allocation", problem)
            for rank, said in enumerate(problems):
                self._refuse(said and f"rank {rank} cannot allocate {needed} bytes: {said}")
            if not alone:
                shared = join_memory(memory, plan, self._party, self._setup_timeout_s)
                inside = self._meeting.gather("place in the allocation", shared.handle[1])
                self._refuse(
                    None if len(set(inside)) == 1
                    else f"the buffers begin at different places of their allocations: {inside}"
                )  # fmt: skip
            shared.memory.zero_()
            torch.cuda.synchronize(self.device)
            return Lane(
                plan=plan, launches=launches, rank=self.rank, shared=shared, unpacked=unpacked
            )

    def _make_watch(self) -> StatusWatch:
        return StatusWatch(self._fused.buffer.view("status"))

    def _clear(self) -> None:
        """Zero the buffers when no rank can be writing into them any more."""
        torch.cuda.synchronize(self.device)
        self._meeting.barrier("all ranks are idle")
        for lane in self._lanes():
            lane.shared.memory.zero_()
        torch.cuda.synchronize(self.device)

    def _check_lane(self, lane: Lane) -> None:
        buffer, call = lane.buffer, lane.buffer.epoch()
        mine = diagnosis.failure_of(buffer.view("status").tolist(), rank=self.rank, call=call)
        # the memory of a rank that is missing may be gone
        skipped = {self.rank} | set(diagnosis.missing_ranks(mine, buffer) if mine else ())
        others = []
        for rank in set(range(self._party.ranks)) - skipped:
            words = lane.shared.status_of(rank).tolist()
            others.append(diagnosis.failure_of(words, rank=rank, call=call))
        message = diagnosis.explain(mine, [o for o in others if o], buffer)
        if message:
            self.poisoned = message
            raise MegaMoEError(message)

    def _say(self, message: str, *values: object) -> None:
        LOG.info("rank %d: " + message, self.rank, *values)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
