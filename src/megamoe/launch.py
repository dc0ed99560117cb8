"""Launching the kernel: on the interpreter for simulated ranks, or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from megamoe.config import MoEConfig
from megamoe.kernel import compat, mega
from megamoe.plan import ITEMSIZE, KernelSpec, Plan, TilePolicy
from megamoe.symmetric import SymmetricBuffer
from megamoe.weights import KernelWeights


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a forward: which kernel, and which part of the forward it does."""

    kernel: str
    phases: str


FUSED = (Launch("moe_kernel", "fused"),)
CHAIN = (
    Launch("communicate_kernel", "dispatch"),
    Launch("moe_kernel", "linear1"),
    Launch("activation_kernel", "activation"),
    Launch("moe_kernel", "linear2"),
    Launch("communicate_kernel", "combine"),
)
KERNELS = tuple(dict.fromkeys(launch.kernel for launch in FUSED + CHAIN))

# floating-point fusion named: its default differs between Triton versions, and with it the bits
OPTIONS = {"num_warps": 4, "launch_cooperative_grid": True, "enable_fp_fusion": True}


@dataclass(frozen=True)
class Tile:
    """A TMA descriptor to be made: a row-major matrix and the box of one copy."""

    # a tensor of the weights, a region of the buffer, or "unpacked"; "" for an argument not used
    source: str
    rows: int
    columns: int
    dtype: str
    box: tuple[int, int]
    offset: int = 0  # bytes, from the beginning of the source


def tiles(config: MoEConfig, spec: KernelSpec) -> dict[str, Tile]:
    """The matrices that TMA reads, by kernel argument."""
    w_dtype = {"bf16": "bfloat16", "mxfp4": "int8"}.get(spec.weights, "float8e4nv")
    x_dtype = "bfloat16" if config.recipe == "bf16" else "float8e4nv"
    packed = 2 if spec.weights == "mxfp4" else 1
    experts, hidden, intermediate = (
        config.experts_per_rank,
        config.padded_hidden,
        config.padded_intermediate,
    )
    w_box = (spec.block_n, spec.packed_k // packed)
    x_box = (spec.box_m, spec.block_k)

    def scales(region: str, rows: int, k: int) -> Tile:
        """Scales of K groups; where a recipe has none in the K loop, one box that nobody loads."""
        box = (rows or spec.stage_scale_rows, spec.block_m)
        if rows == 0:
            return Tile("", *box, "float32", box)
        return Tile(region, k // (spec.block_k // rows), spec.ring_rows, "float32", box)

    def factors(matrix: str, k: int, rows: int) -> Tile:
        """Scales or exponent offsets, a word for each row and 128 of K."""
        if not spec.factor_rows:
            return Tile("", 1, spec.block_n, "int32", (1, spec.block_n))
        kind, dtype = ("offset", "int32") if config.recipe == "mxfp4" else ("scale", "float32")
        box = (spec.factor_rows, spec.block_n)
        return Tile(f"{matrix}_{kind}", experts * k // 128, rows, dtype, box)

    def matrix(name: str, rows: int, k: int, offset: int) -> Tile:
        """Weights as the tiles read them."""
        if spec.unpacks:
            return Tile("unpacked", experts * rows, k, w_dtype, w_box, offset)
        return Tile(name, experts * rows, k // packed, w_dtype, w_box)

    w1_bytes = 2 * experts * intermediate * hidden  # unpacked
    return {
        "w1": matrix("w1", 2 * intermediate, hidden, 0),
        "w2": matrix("w2", hidden, intermediate, w1_bytes),
        "pool_x": Tile("pool_x", spec.ring_rows, hidden, x_dtype, x_box),
        "pool_h": Tile("pool_h", spec.ring_rows, intermediate, x_dtype, x_box),
        "pool_x_scale": scales("pool_x_scale", spec.l1_scale_rows, hidden),
        "pool_h_scale": scales("pool_h_scale", spec.l2_scale_rows, intermediate),
        "w1_factor": factors("w1", hidden, 2 * intermediate),
        "w2_factor": factors("w2", intermediate, hidden),
    }


# arguments beside the descriptors: the weights that dispatch unpacks
UNPACKED = (("w1", "int8"), ("w2", "int8"), ("w1_offset", "int32"), ("w2_offset", "int32"))


def shared_layout(tile: Tile) -> object:
    """Shared memory layout of a box: swizzled for WGMMA, plain for scales and offsets, which are
    read a row at a time.
    """
    if tile.dtype in ("float32", "int32"):
        return compat.gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return compat.gl.NVMMASharedLayout.get_default_for(
        list(tile.box), getattr(compat.gl, tile.dtype)
    )


class InterpreterBackend:
    """Every rank in this process, on the CPU; each rank's buffer is ordinary memory the others can
    address.
    """

    name = "interpreter"

    def __init__(
        self,
        *,
        plan: Plan,
        weights: Sequence[KernelWeights],
        seed: int = 0,
        expire_deadlines: bool = False,
    ) -> None:
        from megamoe.interpreter import Machine

        self.plan = plan
        config = plan.config
        self.machine = Machine(ranks=config.ranks, seed=seed, expire_deadlines=expire_deadlines)
        self.buffers = [SymmetricBuffer.allocate(plan=plan) for _ in range(config.ranks)]
        self.y = [
            torch.zeros(config.capacity, config.hidden, dtype=torch.bfloat16)
            for _ in range(config.ranks)
        ]
        m = self.machine
        self._buffer = [m.register(r, b.memory, name="buffer") for r, b in enumerate(self.buffers)]
        self._y = [m.register(r, y.view(torch.int16), name="y") for r, y in enumerate(self.y)]
        for registered in self._buffer:
            for region in plan.regions:
                if region.nbytes:
                    m.label(
                        registered,
                        region.offset,
                        region.nbytes,
                        region.name,
                        ITEMSIZE[region.dtype],
                    )
        base = [registered.address for registered in self._buffer]
        distance = [
            torch.tensor([b - base[r] for b in base], dtype=torch.int64)
            for r in range(config.ranks)
        ]
        self._peers = [
            m.register(r, d, name="peers", readonly=True) for r, d in enumerate(distance)
        ]
        self._weights = [self._register(r, w) for r, w in enumerate(weights)]
        # where nothing is unpacked, nobody looks at the argument
        self._unpacked = [
            m.register(r, b.unpacked, name="unpacked") if plan.unpacked_bytes else self._buffer[r]
            for r, b in enumerate(self.buffers)
        ]

    def _register(self, rank: int, weights: KernelWeights) -> dict[str, object]:
        """The interpreter knows NumPy's dtypes: pass the bytes, the descriptor names the type."""
        return {
            name: self.machine.register(
                rank, tensor.contiguous().view(torch.uint8), name=name, readonly=True
            )
            for name, tensor in weights.tensors.items()
        }

    def run(
        self, launches: Sequence[Launch], policies: Sequence[TilePolicy], tokens: Sequence[int]
    ) -> list[torch.Tensor]:
        """Run the launches on every rank; ranks may drift apart.  Returns y [tokens, hidden] for
        each rank.
        """
        for rank, buffer in enumerate(self.buffers):
            self._poison(rank, buffer)
        for rank, policy in enumerate(policies):
            for launch in launches:
                spec = self.plan.spec(policy, launch.phases)
                self.machine.enqueue(
                    rank,
                    getattr(mega, launch.kernel),
                    grid=self.plan.programs,
                    args=self._arguments(rank, spec, tokens[rank]),
                    kwargs={"spec": spec},
                    num_warps=4,
                )
        self.machine.run()
        return [y[:n].clone() for y, n in zip(self.y, tokens, strict=True)]

    def _poison(self, rank: int, buffer: SymmetricBuffer) -> None:
        self.y[rank].fill_(float("nan"))
        for region in buffer.poison():
            self.machine.mark_unwritten(self._buffer[rank], region.offset, region.nbytes)
        if buffer.unpacked.nbytes:
            self.machine.mark_unwritten(self._unpacked[rank], 0, buffer.unpacked.nbytes)

    def _arguments(self, rank: int, spec: KernelSpec, tokens: int) -> list[object]:
        m, buffer, weights = self.machine, self._buffer[rank], self._weights[rank]

        def where(tile: Tile) -> tuple[object, int]:
            if tile.source == "unpacked":
                return self._unpacked[rank], tile.offset
            if tile.source in weights:
                return weights[tile.source], 0
            return buffer, getattr(spec.offset, tile.source) if tile.source else 0

        descriptors = [
            m.descriptor(
                *where(t), shape=[t.rows, t.columns], dtype=t.dtype, block_shape=list(t.box)
            )
            for t in tiles(self.plan.config, spec).values()
        ]
        scales = [
            m.pointer(weights[name], dtype=dtype)
            if name in weights
            else m.pointer(buffer, dtype=dtype)
            for name, dtype in (("w1_scale", "float32"), ("w2_scale", "float32"))
        ]
        return [
            m.pointer(buffer, dtype="int8"),
            m.pointer(self._peers[rank], dtype="int64"),
            rank,
            tokens,
            m.pointer(self._y[rank], dtype="bfloat16"),
            *descriptors,
            *(
                m.pointer(weights[name] if spec.unpacks else buffer, dtype=dtype)
                for name, dtype in UNPACKED
            ),
            m.pointer(self._unpacked[rank], dtype="float8e4nv"),
            *scales,
        ]


class GluonBackend:
    """Compiled, on this process's GPU.

    One rank has the whole GPU.  Several ranks are simulated on it: each gets its share of the SMs,
    a stream and a buffer of its own, and runs at the same time as the others.
    """

    name = "gluon"

    def __init__(
        self, *, plan: Plan, weights: Sequence[KernelWeights], device: torch.device
    ) -> None:
        self.plan = plan
        self.device = device
        ranks, config = range(plan.config.ranks), plan.config
        self.buffers = [SymmetricBuffer.allocate(plan=plan, device=str(device)) for _ in ranks]
        self.y = [
            torch.empty(config.capacity, config.hidden, dtype=torch.bfloat16, device=device)
            for _ in ranks
        ]
        base = [buffer.memory.data_ptr() for buffer in self.buffers]
        self._peers = [
            torch.tensor([b - mine for b in base], dtype=torch.int64, device=device)
            for mine in base
        ]
        self._weights = [
            {name: tensor.to(device) for name, tensor in w.tensors.items()} for w in weights
        ]
        self._streams = [torch.cuda.Stream(device) for _ in ranks] if len(ranks) > 1 else []
        self._arguments: dict[tuple[int, KernelSpec], list[object]] = {}
        self._compiled: set[KernelSpec] = set()

    def run(
        self, launches: Sequence[Launch], policies: Sequence[TilePolicy], tokens: Sequence[int]
    ) -> list[torch.Tensor]:
        """As :meth:`InterpreterBackend.run`; does not wait for the device."""
        specs = [
            [self.plan.spec(policy, launch.phases) for launch in launches] for policy in policies
        ]
        for rank_specs in specs:
            for launch, spec in zip(launches, rank_specs, strict=True):
                self._compile(launch, spec)
        current = torch.cuda.current_stream(self.device)
        for rank, rank_specs in enumerate(specs):
            stream = self._streams[rank] if self._streams else current
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for launch, spec in zip(launches, rank_specs, strict=True):
                    self._launch(rank, launch, spec, tokens[rank])
        for stream in self._streams:
            current.wait_stream(stream)
        return [y[:n] for y, n in zip(self.y, tokens, strict=True)]

    def _compile(self, launch: Launch, spec: KernelSpec) -> None:
        """Compile and load before anything is launched: a rank that does so while its peers wait
        would look missing.
        """
        if spec not in self._compiled:
            compile_launch(launch, self._kernel_arguments(0, spec, 0), self.plan.programs)
            self._compiled.add(spec)

    def _launch(self, rank: int, launch: Launch, spec: KernelSpec, tokens: int) -> None:
        arguments = self._kernel_arguments(rank, spec, tokens)
        compiled_kernels()[launch.kernel][(self.plan.programs,)](*arguments, **OPTIONS)

    def _kernel_arguments(self, rank: int, spec: KernelSpec, tokens: int) -> list[object]:
        key = (rank, spec)
        if key not in self._arguments:
            self._arguments[key] = fixed_arguments(
                spec, self.buffers[rank], self._peers[rank], self._weights[rank]
            )
        buffer, peers, *rest = self._arguments[key]
        return [buffer, peers, rank, tokens, self.y[rank], *rest, spec]


def fixed_arguments(
    spec: KernelSpec,
    buffer: SymmetricBuffer,
    peers: torch.Tensor,
    weights: dict[str, torch.Tensor],
) -> list[object]:
    """The arguments of a compiled kernel that no call changes: buffer, peers, descriptors, scales.

    weights: :attr:`~megamoe.weights.KernelWeights.tensors` on the device of the buffer.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    device = buffer.memory.device
    descriptors = []
    for t in tiles(buffer.plan.config, spec).values():
        if t.source == "unpacked":
            matrix = buffer.unpacked[t.offset :].view(torch.float8_e4m3fn)
        elif not t.source:
            matrix = torch.zeros(t.rows, t.columns, dtype=getattr(torch, t.dtype), device=device)
        else:
            matrix = weights[t.source] if t.source in weights else buffer.view(t.source)
        if t.dtype == "int8":
            matrix = matrix.view(torch.int8)
        matrix = matrix.flatten()[: t.rows * t.columns].view(t.rows, t.columns)
        descriptors.append(TensorDescriptor.from_tensor(matrix, list(t.box), shared_layout(t)))
    unpacked = buffer.unpacked if buffer.unpacked.numel() else buffer.memory  # not used then
    unused = torch.zeros(4, dtype=torch.float32, device=device)
    scales = [weights.get(name, unused) for name in ("w1_scale", "w2_scale")]
    return [
        buffer.memory.view(torch.int8),
        peers,
        *descriptors,
        *((weights[n] if spec.unpacks else unpacked).view(getattr(torch, d)) for n, d in UNPACKED),
        unpacked.view(torch.float8_e4m3fn),
        *scales,
    ]


@lru_cache(maxsize=1)
def compiled_kernels() -> dict[str, Any]:
    """The kernels by name, as a GPU launches them.

    Triton's key of a function depends on which functions were hashed before it: hashed in one
    order, a kernel has the same key in every process, and finds what another has compiled.
    """
    kernels = {name: getattr(mega, name) for name in KERNELS}
    for kernel in kernels.values():
        kernel.cache_key  # noqa: B018
    return kernels


def compile_launch(launch: Launch, arguments: list[object], programs: int) -> None:
    """Compile one kernel and load it onto the current device; launches nothing."""
    kernel = compiled_kernels()[launch.kernel]
    compiled = kernel.warmup(*arguments, grid=(programs,), **OPTIONS)
    compat.load_module(compiled)
