"""Inline PTX: parses a block once, and runs it over the lanes.

Blocks without branches run on all lanes at once; registers are int64 arrays that hold 32-bit values
as 0 to 2^32 - 1. Blocks with branches run once for every different set of operands, on Python
integers.  A backward branch is a spin: the task sleeps until one of the addresses that it has read
since the label changes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from greenlet import getcurrent

from . import dtypes as dt
from .access import fence, load_flag, store_flag, update_flag
from .dtypes import DType
from .errors import KernelError, UnsupportedOperation
from .faults import where
from .ptx_ops import comparison, evaluator, width_of
from .values import Pointer, Scalar, Tensor, as_tensor, wrap

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


class Instruction:
    """One instruction: guard predicate, dotted opcode, operand texts."""

    __slots__ = (
        "constants",
        "guard",
        "name",
        "negated",
        "operands",
        "parts",
        "run",
        "text",
        "width",
    )

    def __init__(self, text: str):
        found = re.fullmatch(r"(?:@(!?)([%\w$]+)\s+)?([\w.:]+)\s*(.*)", text, re.S)
        if found is None:
            raise UnsupportedOperation(f"inline PTX: cannot read {text!r}")
        self.text = text
        self.negated, self.guard = found[1] == "!", found[2]
        self.name = found[3]
        self.parts = self.name.split(".")
        self.operands = _operands(found[4])
        self.width = width_of(self.parts)
        self.run = evaluator(self.name)
        # Source operands that are numbers, trimmed to the width; None for the others.
        mask = (1 << max(self.width, 32)) - 1
        numbers = [_immediate(o) for o in self.operands[1:]]
        self.constants = [n if n is None else n & mask for n in numbers]


class Block:
    """A parsed asm string."""

    def __init__(self, asm: str):
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        asm = re.sub(r"//[^\n]*|/\*.*?\*/", "", asm, flags=re.S)
        for piece in re.split(r"[;{}]", asm):
            piece = piece.strip()
            while found := re.match(r"([A-Za-z_$%][\w$]*)\s*:(?!:)\s*", piece):
                self.labels[found[1]] = len(self.code)
                piece = piece[found.end() :]
            if piece and not piece.startswith(".reg") and not piece.startswith(".loc"):
                self.code.append(Instruction(piece))
        self.branches = any(i.parts[0] == "bra" for i in self.code)
        self.reads_timer = any("%globaltimer" in i.operands for i in self.code)
        # What must happen once for every thread, also where all have the same operands.
        self.counts = any(
            i.parts[0] in ("red", "atom") and {"add", "xor"} & set(i.parts) for i in self.code
        )


_BLOCKS: dict[str, Block] = {}
_MEMORY = ("ld", "st", "red", "atom")
_NOTHING = ("nanosleep", "bar", "barrier", "pragma", "prefetch", "prefetchu", "griddepcontrol")


def _operands(text: str) -> list[str]:
    out, depth, piece = [], 0, ""
    for c in text:
        depth += (c in "[(") - (c in "])")
        if c == "," and depth == 0:
            out.append(piece.strip())
            piece = ""
        else:
            piece += c
    return [*out, piece.strip()] if piece.strip() else out


def _immediate(text: str) -> int | None:
    if text.startswith(("0f", "0F")):
        return int(text[2:], 16)
    try:
        return int(text.rstrip("U"), 0)
    except ValueError:
        return None


class Lanes:
    """Registers of one evaluation: Python ints (scalar) or int64 arrays (all lanes)."""

    def __init__(self, block: Block, names: dict[str, object], place: tuple):
        self.block, self.registers, self.place = block, names, place
        self.task = getcurrent()
        self.polled: list[tuple[int, DType]] = []
        self.flags: dict[str, int] = {}  # registers that hold what was read from memory
        self.distances: dict[str, tuple[int, int]] = {}  # differences of one, and its operands
        self.last_test = ("", 0, 0, False)

    def value(self, text: str) -> object:
        got = self.registers.get(text)
        if got is not None:
            return got
        if text.startswith("-") and text[1:] in self.registers:
            return -self.registers[text[1:]]
        if text.startswith("!"):
            v = self.value(text[1:])
            return ~v if isinstance(v, np.ndarray) else not v
        number = _immediate(text)
        if number is not None:
            return number & M64 if number < 0 else number
        if text.startswith("%"):
            return self._special(text)
        raise KernelError(f"inline PTX: {text} is read before anything was written to it")

    def _special(self, name: str) -> int:
        task = self.task
        if name == "%globaltimer":
            return task.machine.timer(task)
        if name == "%globaltimer_lo":
            return task.machine.timer(task) & M32
        if name in ("%clock64", "%clock"):
            return task.machine.steps
        if name in ("%ctaid.x", "%smid"):
            return task.program
        if name in ("%nctaid.x", "%nsmid"):
            return task.launch.grid
        raise UnsupportedOperation(f"inline PTX: special register {name}")

    def address(self, text: str) -> object:
        base, _, offset = text.strip("[] ").partition("+")
        value = self.value(base.strip())
        return value + int(offset, 0) if offset else value

    def write(self, name: str, value: object) -> None:
        if name != "_":
            self.registers[name] = value

    # --- running ----------------------------------------------------------------------------------

    def run_straight(self) -> None:
        for i in self.block.code:
            mask = None
            if i.guard is not None:
                mask = self.registers[i.guard]
                mask = np.logical_not(mask) if i.negated else mask
                if not np.any(mask):
                    continue
                if np.all(mask):
                    mask = None
            self.execute(i, mask)

    def run_branching(self) -> None:
        pc, code, labels = 0, self.block.code, self.block.labels
        while pc < len(code):
            i = code[pc]
            pc += 1
            if i.guard is not None and bool(self.registers[i.guard]) == i.negated:
                continue
            if i.parts[0] == "bra":
                target = labels.get(i.operands[0])
                if target is None:
                    raise KernelError(f"inline PTX: no label {i.operands[0]}")
                if target < pc:
                    self._spin(i)
                pc = target
            elif i.parts[0] in ("ret", "exit"):
                return
            else:
                self.execute(i, None)

    def _spin(self, i: Instruction) -> None:
        """The loop goes round again: sleep until what it polls changes."""
        task = self.task
        if not self.polled:
            task.pause()
            return
        places = []
        for address, dtype in self.polled:
            alloc = task.machine.memory.at(address, address + dtype.itemsize)
            places.append((alloc, address - alloc.base))
        compare, seen, wanted, holds = self.last_test
        task.timed = self.block.reads_timer
        names = ", ".join(a.describe(o) for a, o in dict.fromkeys(places))
        until = "it is no longer" if holds else "it is"
        task.watch(
            places, lambda: f"polls {names}: it is {seen}; goes on when {until} {compare} {wanted}"
        )
        self.polled.clear()

    def execute(self, i: Instruction, mask: object) -> None:
        op = i.parts[0]
        if op in _MEMORY:
            self._memory(i, mask)
        elif op in ("fence", "membar"):
            self._fence(i)
        elif op == "setp":
            self._setp(i, mask)
        elif op in _NOTHING or i.name.startswith("cp.async.bulk.prefetch"):
            return
        elif op == "trap":
            raise KernelError("inline PTX: trap")
        elif i.run is None:
            raise UnsupportedOperation(f"inline PTX: {i.name}")
        else:
            values = [
                self.value(o) if c is None else c
                for o, c in zip(i.operands[1:], i.constants, strict=True)
            ]
            if op in ("sub", "mov") and i.operands[1] in self.flags:
                self._follow_flag(i, values)
            self._assign(i.operands[0], i.run(i, values), mask)

    def _follow_flag(self, i: Instruction, values: list) -> None:
        """A flag's value, or its distance from another number, goes to one more register."""
        name = i.operands[0]
        self.flags[name] = self.flags[i.operands[1]]
        if len(values) == 2:
            self.distances[name] = tuple(_signed(v, dt.int32) for v in values)

    def _assign(self, name: str, value: object, mask: object) -> None:
        if mask is not None and name in self.registers:
            value = np.where(mask, value, self.registers[name])
        self.write(name, value)

    def _setp(self, i: Instruction, mask: object) -> None:
        a, b = self.value(i.operands[1]), self.value(i.operands[2])
        word, value, a, b = comparison(i, a, b)
        if len(i.operands) > 3:
            other = self.value(i.operands[3])
            joined = i.parts[2]
            value = (
                value & other
                if joined == "and"
                else value | other
                if joined == "or"
                else value ^ other
            )
        elif i.operands[1] in self.flags:
            if b == 0:
                a, b = self.distances.get(i.operands[1], (a, b))
            self.last_test = (word, a, b, bool(value))
        names = i.operands[0].split("|")
        self._assign(names[0], value, mask)
        if len(names) > 1:
            self._assign(names[1], np.logical_not(value), mask)

    def _fence(self, i: Instruction) -> None:
        parts = i.parts
        clock = self.task.clock
        if "proxy" in parts:
            if parts[1] != "proxy" or parts[2] != "async":
                raise UnsupportedOperation(f"inline PTX: {i.name}")
            clock.proxy_fence(
                "shared::cta" not in i.name and "shared::cluster" not in i.name,
                "global" not in parts,
            )
            return
        if parts[0] == "membar":
            scope = {"cta": "cta", "gl": "gpu", "sys": "sys"}[parts[1]]
        else:
            scope = next((p for p in parts if p in ("cta", "gpu", "sys", "cluster")), "sys")
            if "mbarrier_init" in parts:
                return
        fence(self.task, "acq_rel", scope)

    def _memory(self, i: Instruction, mask: object) -> None:
        if any(p.startswith("shared") or p in ("local", "const", "param") for p in i.parts) or any(
            p in ("v2", "v4", "v8") for p in i.parts
        ):
            raise UnsupportedOperation(f"inline PTX: {i.name}")
        sem = next((p for p in i.parts if p in ("relaxed", "acquire", "release", "acq_rel")), None)
        scope = next((p for p in i.parts if p in ("cta", "gpu", "sys")), None)
        if "volatile" in i.parts:
            sem, scope = "relaxed", "sys"
        if sem is None and i.parts[0] in ("ld", "st"):
            raise UnsupportedOperation(
                f"inline PTX: {i.name}; use gl.load and gl.store for ordinary accesses"
            )
        self.task.pause()
        run = {"ld": self._load, "st": self._store, "red": self._update, "atom": self._update}[
            i.parts[0]
        ]
        run(i, mask, sem or "relaxed", scope or "gpu")

    def _each_lane(self, operands: Sequence[object], mask: object) -> list[tuple[int, ...]]:
        """Operand values of every active lane (one row if all are scalars)."""
        if not any(isinstance(o, np.ndarray) for o in operands):
            return [tuple(int(o) for o in operands)]
        arrays = np.broadcast_arrays(*operands)
        if mask is not None:
            arrays = [a[np.broadcast_to(mask, a.shape)] for a in arrays]
        return list(zip(*[a.ravel().tolist() for a in arrays], strict=True))

    def _load(self, i: Instruction, mask: object, sem: str, scope: str) -> None:
        dtype = _register_type(i)
        address = self.address(i.operands[1])
        got: dict[int, int] = {}
        for (a,) in self._each_lane([address], mask):
            if a not in got:
                got[a] = load_flag(self.task, a, dtype, sem, scope, self.place) & (
                    M32 if dtype.bits <= 32 else M64
                )
                self.polled.append((a, dtype))
        if isinstance(address, np.ndarray):
            value = np.zeros(address.shape, np.int64)
            active = (
                np.ones(address.shape, bool)
                if mask is None
                else np.broadcast_to(mask, address.shape)
            )
            value[active] = [got[a] for a in address[active].tolist()]
        else:
            value = got[int(address)]
            self.flags[i.operands[0]] = int(address)
            self.distances.pop(i.operands[0], None)
        self._assign(i.operands[0], value, mask)

    def _store(self, i: Instruction, mask: object, sem: str, scope: str) -> None:
        dtype = _register_type(i)
        rows = self._each_lane([self.address(i.operands[0]), self.value(i.operands[1])], mask)
        for address, value in dict.fromkeys(rows):
            store_flag(self.task, address, dtype, _signed(value, dtype), sem, scope, self.place)

    def _update(self, i: Instruction, mask: object, sem: str, scope: str) -> None:
        dtype = _register_type(i)
        update = next(
            (
                p
                for p in i.parts
                if p in ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc")
            ),
            None,
        )
        if update in (None, "inc") or dtype.kind == "f":
            raise UnsupportedOperation(f"inline PTX: {i.name}")
        operands = i.operands if i.parts[0] == "red" else i.operands[1:]
        address = self.address(operands[0])
        values = [self.value(o) for o in operands[1:]]
        olds = []
        for a, *rest in self._each_lane([address, *values], mask):
            rest = [_signed(v, dtype) for v in rest]
            value, compare = (rest[1], rest[0]) if update == "cas" else (rest[0], None)
            word = "xchg" if update == "exch" else update
            olds.append(
                update_flag(self.task, a, dtype, word, value, compare, sem, scope, self.place)
                & (M32 if dtype.bits == 32 else M64)
            )
            self.polled.append((a, dtype))
        if i.parts[0] == "atom":
            shape = np.broadcast_shapes(*[np.shape(v) for v in (address, *values)])
            if not shape:
                self.flags[i.operands[0]] = int(address)
                self._assign(i.operands[0], olds[0], mask)
                return
            out = np.zeros(shape, np.int64)
            out[np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)] = olds
            self._assign(i.operands[0], out, mask)


def _register_type(i: Instruction) -> DType:
    kind, bits = i.parts[-1][0], int(i.parts[-1][1:])
    if kind == "f" or bits not in (8, 16, 32, 64):
        raise UnsupportedOperation(f"inline PTX: {i.name}")
    return dt.BY_NAME[("u" if kind in "ub" else "i") + str(bits)]


def _signed(value: int, dtype: DType) -> int:
    value &= (1 << dtype.bits) - 1
    return value - (1 << dtype.bits) if dtype.kind == "i" and value > dtype.hi else value


# --- between tensors and registers ----------------------------------------------------------------


def _bits(x: Tensor) -> np.ndarray:
    """The elements' bits as non-negative int64 (64-bit elements: as they are)."""
    if x.dtype.kind == "p":
        return np.asarray(x.v, np.int64)
    raw = np.ascontiguousarray(dt.encode(np.asarray(x.v, x.dtype.calc), x.dtype)).reshape(x.shape)
    if x.dtype.bits == 64:
        return raw.view(np.int64)
    return raw.view(f"u{raw.dtype.itemsize}").astype(np.int64)


def _to_registers(x: Tensor, pack: int, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Register arrays (one element a group of `pack`) of a tensor broadcast to `shape`."""
    width = x.dtype.itemsize * 8
    if pack == 1:
        return [_bits(x)]
    groups = (*shape[:-1], shape[-1] // pack)
    if width < 32 and pack * width % 32 == 0:
        raw = dt.encode(np.broadcast_to(x.v, shape), x.dtype)
        words = np.ascontiguousarray(raw).view(np.uint32).astype(np.int64)
        words = words.reshape(*groups, pack * width // 32)
        return [words[..., k] for k in range(words.shape[-1])]
    lanes = np.broadcast_to(_bits(x), shape).reshape(*groups, pack)
    if width >= 32:
        return [lanes[..., k] for k in range(pack)]
    word = lanes[..., 0]
    for k in range(1, pack):
        word = word | lanes[..., k] << (width * k)
    return [word]


def _from_registers(words: list[object], dtype: DType, pack: int, shape: tuple[int, ...]) -> Tensor:
    """The tensor of `shape` whose groups of `pack` elements these registers hold."""
    width = dtype.itemsize * 8
    if pack == 1 and not isinstance(words[0], np.ndarray) and dtype.kind in "iu":
        value = _signed(int(words[0]), dtype)
        if not shape:
            return Scalar(value, dtype)
        return Tensor(np.full(shape, value, dtype.calc), dtype, value, value)
    arrays = [w if isinstance(w, np.ndarray) else np.int64(_as_int64(w)) for w in words]
    grouped = shape if pack == 1 else (*shape[:-1], shape[-1] // pack)
    if width < 32 and pack * width % 32 == 0:
        out = np.empty((*grouped, len(arrays)), np.uint32)
        for k, word in enumerate(arrays):
            out[..., k] = word
        raw = out.reshape(-1).view(dtype.store).reshape(shape)
    else:
        out = np.empty((*grouped, pack), np.int64)
        for k in range(pack):
            out[..., k] = arrays[k] if width >= 32 else arrays[0] >> (width * k)
        store = np.dtype(np.int64) if dtype.kind == "p" else dtype.store
        raw = out.reshape(shape).astype(f"u{width // 8}").view(store)
    return wrap(dt.decode(raw, dtype), dtype)


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence, dtype: object, is_pure: bool, pack: int
) -> object:
    """Run `asm` for every group of `pack` elements of the (broadcast) arguments."""
    block = _BLOCKS.get(asm)
    if block is None:
        block = _BLOCKS[asm] = Block(asm)
    single = not isinstance(dtype, (tuple, list))
    results = [dt.as_dtype(d) for d in ([dtype] if single else dtype)]
    inputs = [as_tensor(a) for a in args]
    shape = np.broadcast_shapes(*[a.shape for a in inputs])
    outputs, letters = _count(constraints)
    task = getcurrent()
    if block.counts and int(np.prod(shape)) != 32 * task.warps:
        raise KernelError(
            f"inline PTX: {asm.strip()!r} counts, and every one of {32 * task.warps} threads runs "
            f"it, but the shape is {list(shape)}: give it one element a thread"
        )
    registers = None if block.counts else _same_registers(inputs, pack)
    if registers is None:
        registers = _input_registers(inputs, shape, pack)
    if outputs + len(registers) != letters:
        raise KernelError(
            f"inline PTX: constraints {constraints!r} name {letters} registers; results and "
            f"arguments have {outputs} and {len(registers)}"
        )
    names = {f"${outputs + j}": r for j, r in enumerate(registers)}
    grouped = shape if pack == 1 else (*shape[:-1], shape[-1] // pack)
    run = _run_unique if block.branches else _run_all
    words = run(block, names, outputs, grouped, where())
    out, at = [], 0
    for d in results:
        width = 8 if d.kind == "b" else d.bits
        count = -(-pack * width // 32) if width < 32 else pack
        out.append(_from_registers(words[at : at + count], d, pack, shape))
        at += count
    return out[0] if single else tuple(out)


@lru_cache(maxsize=256)
def _count(constraints: str) -> tuple[int, int]:
    """How many results, and how many registers in all, a constraint string names."""
    letters = [c.strip() for c in constraints.split(",") if not c.strip().startswith("~")]
    return sum(c.startswith("=") for c in letters), len(letters)


def _same_registers(inputs: list[Tensor], pack: int) -> list[int] | None:
    """The registers as plain numbers, if every argument is known to be the same in all lanes."""
    if pack > 1:
        return None
    out = []
    for x in inputs:
        if type(x) is Pointer:
            if x.terms:
                return None
            out.append(x.base)
        elif x.dtype.kind in "iu" and type(x) is Scalar or x.lo is not None and x.lo == x.hi:
            value = x.v if type(x) is Scalar else x.lo
            out.append(value if x.dtype.bits == 64 else value & ((1 << x.dtype.bits) - 1))
        else:
            return None
    return out


def _input_registers(inputs: list[Tensor], shape: tuple[int, ...], pack: int) -> list[np.ndarray]:
    if pack > 1 and (not shape or shape[-1] % pack):
        raise KernelError(
            f"inline PTX: pack = {pack} does not divide the last dimension of shape {list(shape)}"
        )
    out = []
    for x in inputs:
        out += _to_registers(x, pack, shape)
    return out


def _run_all(
    block: Block, names: dict, outputs: int, shape: tuple[int, ...], place: tuple
) -> list[object]:
    lanes = Lanes(block, {k: _collapsed(v) for k, v in names.items()}, place)
    lanes.run_straight()
    return [lanes.value(f"${j}") for j in range(outputs)]


def _collapsed(v: object) -> object:
    """A Python int if all lanes are the same scalar."""
    return v if type(v) is int or v.ndim else int(v)


def _run_unique(
    block: Block, names: dict, outputs: int, shape: tuple[int, ...], place: tuple
) -> list[object]:
    if all(type(v) is int for v in names.values()):
        lanes = Lanes(block, dict(names), place)
        lanes.run_branching()
        return [lanes.value(f"${j}") for j in range(outputs)]
    arrays = [np.broadcast_to(v, shape).ravel() for v in names.values()]
    if block.counts:
        rows = list(zip(*[a.tolist() for a in arrays], strict=True))
        inverse = np.arange(len(rows))
    else:
        rows, inverse = _unique_rows(arrays)
    columns: list[list[int]] = [[] for _ in range(outputs)]
    for row in rows:
        lanes = Lanes(block, dict(zip(names, row, strict=True)), place)
        lanes.run_branching()
        for j in range(outputs):
            columns[j].append(_as_int64(lanes.value(f"${j}")))
    return [np.array(c, np.int64)[inverse].reshape(shape) for c in columns]


def _as_int64(value: object) -> int:
    value = int(value) & M64
    return value - (1 << 64) if value >> 63 else value


def _unique_rows(arrays: list[np.ndarray]) -> tuple[list[tuple[int, ...]], np.ndarray]:
    if all(a.size and (a[0] == a).all() for a in arrays):
        return [tuple(int(a[0]) for a in arrays)], np.zeros(
            arrays[0].size if arrays else 1, np.int64
        )
    table: dict[tuple[int, ...], int] = {}
    inverse = [
        table.setdefault(row, len(table)) for row in zip(*[a.tolist() for a in arrays], strict=True)
    ]
    return list(table), np.array(inverse, np.int64)
