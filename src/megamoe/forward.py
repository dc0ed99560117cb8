"""The public call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe import diagnosis, formats
from megamoe.chain import CHAIN, chain_plan
from megamoe.config import MoEConfig, RankInputs, validate_inputs
from megamoe.launch import FUSED, GluonBackend, InterpreterBackend, Launch
from megamoe.plan import Plan
from megamoe.weights import KernelWeights

BACKENDS = ("auto", "gluon", "interpreter")
Tensors = torch.Tensor | Sequence[torch.Tensor]


class MegaMoE:
    """One MoE layer: `y = moe(x=..., topk_idx=..., topk_weights=...)` in one kernel launch a rank.

    config: shapes and number formats.
    weights: :func:`~megamoe.weights.pack_weights` of every rank; all ranks are computed in this
    process.
    backend: "interpreter" (simulated ranks on the CPU), "gluon" (compiled, the ranks share this
    process's GPU), or
        "auto": a GPU with WGMMA if there is one, else the interpreter; the attribute `backend`
        says which it is.
    programs: programs (CTAs) of the grid on each rank; None for an equal share of the GPU's SMs
    less
        `config.reserve_sms`, or 2 on the interpreter.
    seed: of the interpreter's scheduler; the same seed is the same run.
    trace_events: events of a timeline that each role of a program can record in a fused call; 0
    for none.

    A call takes and returns one tensor a rank, in lists, or bare tensors where there is one rank.
    x [t, hidden] is bf16, or e4m3 with `x_scale`; topk_idx [t, topk] int32 or int64, -1 skips a
    slot; topk_weights [t, topk] fp32.
    Inputs that do not fit raise :class:`~megamoe.config.MegaMoEInputError` before anything is
    written.
    """

    def __init__(
        self,
        *,
        config: MoEConfig,
        weights: Sequence[KernelWeights] | KernelWeights,
        backend: str = "auto",
        programs: int | None = None,
        seed: int = 0,
        trace_events: int = 0,
    ) -> None:
        weights = [weights] if isinstance(weights, KernelWeights) else list(weights)
        if len(weights) != config.ranks:
            raise ValueError(
                f"the weights of all {config.ranks} ranks are needed, got {len(weights)}"
            )
        for rank, w in enumerate(weights):
            if w.rank != rank or w.config != config:
                raise ValueError(
                    f"weights[{rank}] was packed for rank {w.rank} of {w.config}, not of {config}"
                )
        self.config = config
        self.backend = choose_backend(backend, config)
        self.launches: list[list[str]] = []
        self._weights = weights
        self._seed = seed
        if programs is not None and programs < 1:
            raise ValueError(f"programs must be at least 1, got {programs}")
        self._programs = programs or default_programs(self.backend, config)
        self._fused = self._make_backend(Plan(config, programs=self._programs, trace=trace_events))
        self._chain: InterpreterBackend | GluonBackend | None = None

    def __call__(
        self,
        *,
        x: Tensors,
        topk_idx: Tensors,
        topk_weights: Tensors,
        x_scale: Tensors | None = None,
    ) -> Tensors:
        """The forward in one launch a rank; y is bf16 [t, hidden]."""
        return self._run(self._fused, FUSED, x, topk_idx, topk_weights, x_scale)

    def chain(
        self,
        *,
        x: Tensors,
        topk_idx: Tensors,
        topk_weights: Tensors,
        x_scale: Tensors | None = None,
    ) -> Tensors:
        """The same forward as five launches a rank, bit-equal to the fused one."""
        if self._chain is None:
            self._chain = self._make_backend(chain_plan(self.config, programs=self._programs))
        return self._run(self._chain, CHAIN, x, topk_idx, topk_weights, x_scale)

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x bf16 [t, hidden] in the format of the wire: (values, scales)."""
        return formats.quantise_x(x, x_scales=self.config.x_scales)

    def dequantised_x(self, x: torch.Tensor) -> torch.Tensor:
        """x as the kernel multiplies it, fp32: what a reference should be fed with."""
        values, scale = self.quantise(x)
        return formats.dequantise_x(values, scale, x_scales=self.config.x_scales)

    def check(self) -> None:
        """Raise :class:`~megamoe.symmetric.MegaMoEError` if the kernel gave up.  Waits for a GPU
        to finish.
        """
        for backend in (self._fused, self._chain):
            for rank, buffer in enumerate(backend.buffers if backend else ()):
                diagnosis.check(buffer, rank=rank)

    @property
    def plan(self) -> Plan:
        return self._fused.plan

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """Rows each expert received in the last fused call, masked slots not counted: int64
        [experts].
        """
        return torch.cat([buffer.received().sum(dim=0) for buffer in self._fused.buffers]).cpu()

    @property
    def inexact(self) -> dict[str, int]:
        """Values that one scale a row could not hold exactly: of the weights, and of x over all
        fused calls.
        """
        return {
            "weights": sum(w.inexact for w in self._weights),
            "x": sum(buffer.inexact() for buffer in self._fused.buffers),
        }

    def _make_backend(self, plan: Plan) -> InterpreterBackend | GluonBackend:
        if self.backend == "gluon":
            return GluonBackend(
                plan=plan,
                weights=self._weights,
                device=torch.device("cuda", torch.cuda.current_device()),
            )
        return InterpreterBackend(plan=plan, weights=self._weights, seed=self._seed)

    def _run(
        self,
        backend: InterpreterBackend | GluonBackend,
        launches: Sequence[Launch],
        x: Tensors,
        topk_idx: Tensors,
        topk_weights: Tensors,
        x_scale: Tensors | None,
    ) -> Tensors:
        bare = isinstance(x, torch.Tensor)
        inputs = self._inputs(x, topk_idx, topk_weights, x_scale)
        for buffer, rank_inputs in zip(backend.buffers, inputs, strict=True):
            buffer.write_inputs(rank_inputs)
        tokens = [i.x.shape[0] for i in inputs]
        policies = [backend.plan.policy(n) for n in tokens]
        y = backend.run(launches, policies, tokens)
        if self.backend == "interpreter":
            self.check()
        self.launches = [
            [f"{launch.kernel}[{launch.phases}]" for launch in launches] for _ in inputs
        ]
        return y[0] if bare else y

    def _inputs(
        self, x: Tensors, topk_idx: Tensors, topk_weights: Tensors, x_scale: Tensors | None
    ) -> list[RankInputs]:
        """Check every rank's inputs before any is written, and quantise x where it is bf16."""
        given = {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}
        if x_scale is not None:
            given["x_scale"] = x_scale
        lists = {name: [v] if isinstance(v, torch.Tensor) else list(v) for name, v in given.items()}
        for name, values in lists.items():
            if len(values) != self.config.ranks:
                raise ValueError(
                    f"{name}: one tensor for each of {self.config.ranks} ranks, got {len(values)}"
                )
        # on a GPU the kernel itself looks at the ids: reading them here would wait for the device
        check_ids = self.backend == "interpreter"
        checked = [
            validate_inputs(
                self.config,
                rank=rank,
                check_ids=check_ids,
                **{n: v[rank] for n, v in lists.items()},
            )
            for rank in range(self.config.ranks)
        ]
        return [i if i.x_scale is not None else self._quantised(i) for i in checked]

    def _quantised(self, inputs: RankInputs) -> RankInputs:
        values, scale = self.quantise(inputs.x)
        return inputs._replace(x=values, x_scale=scale)


def choose_backend(backend: str, config: MoEConfig) -> str:
    """The backend to use; asking for one that cannot run here is an error."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "interpreter":
        return backend
    reason = why_not_gluon(config)
    if reason is None:
        return "gluon"
    if backend == "gluon":
        raise RuntimeError(f"backend 'gluon' cannot run here: {reason}. Backend 'interpreter' can.")
    return "interpreter"


def why_not_gluon(config: MoEConfig) -> str | None:
    """Why the compiled kernel cannot run in this process, or None if it can."""
    from megamoe.kernel.compat import TRITON_VERSION

    if TRITON_VERSION is None:
        return "Triton is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        return f"the kernel needs WGMMA (compute capability 9.0), this GPU has {major}.{minor}"
    return None


def default_programs(backend: str, config: MoEConfig) -> int:
    if backend == "interpreter":
        return 2
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return max(1, (sms - config.reserve_sms) // config.ranks)
