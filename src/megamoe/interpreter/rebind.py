"""The kernel's own Python functions, with Gluon's names bound to the interpreter's.

A JIT function becomes a new function of the same code whose globals are translated: Gluon modules,
builtins, types and constants to the interpreter's, other JIT functions to their own translations.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType, SimpleNamespace

from . import dtypes as dt
from . import language
from .errors import UnsupportedOperation
from .faults import MARK
from .hopper import (
    Descriptor,
    mbarrier,
    tma,
)
from .shared import SharedMemory
from .values import Layout, Scalar, Tensor, as_tensor
from .wgmma import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

_HOPPER = {
    "fence_async_shared": fence_async_shared,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
    "warpgroup_mma_init": warpgroup_mma_init,
    "mbarrier": mbarrier,
    "tma": tma,
}
_FUNCTIONS: dict[object, FunctionType] = {}
_CLASSES: dict[object, type] = {}


# --- Python builtins as a kernel means them -------------------------------------------------------


def _range(*args: object) -> Iterator[Tensor]:
    """A loop counter is an int32 scalar (int64 if a bound is)."""
    bounds = [as_tensor(a) for a in args]
    dtype = dt.int64 if any(b.dtype is dt.int64 for b in bounds) else dt.int32
    return (Scalar(i, dtype) for i in builtins.range(*[int(b.v) for b in bounds]))


def _min(*args: object) -> object:
    return (
        language.minimum(*args) if any(isinstance(a, Tensor) for a in args) else builtins.min(*args)
    )


def _max(*args: object) -> object:
    return (
        language.maximum(*args) if any(isinstance(a, Tensor) for a in args) else builtins.max(*args)
    )


_BUILTINS = {"range": _range, "min": _min, "max": _max}


# --- stand-ins for modules ------------------------------------------------------------------------


class _Module:
    """A module whose attributes are translated when they are read."""

    def __init__(self, module: ModuleType):
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> object:
        value = to_interpreter(getattr(self._module, name))
        self.__dict__[name] = value
        return value


_HOPPER_MODULE = SimpleNamespace(**_HOPPER)
_GLUON_MODULE = SimpleNamespace(language=language, nvidia=SimpleNamespace(hopper=_HOPPER_MODULE))
language.nvidia = SimpleNamespace(hopper=_HOPPER_MODULE)


def _triton_module(name: str) -> object | None:
    if name in (
        "triton.language",
        "triton.experimental.gluon.language",
        "triton.experimental.gluon.language._core",
    ):
        return language
    if name == "triton.experimental.gluon":
        return _GLUON_MODULE
    tail = name.rsplit(".", 1)[1] if "." in name else name
    if ".nvidia." in name and tail in ("tma", "mbarrier"):
        return _HOPPER[tail]
    if tail in ("hopper", "blackwell") and ".language.nvidia" in name:
        return _HOPPER_MODULE
    return None


def _unknown(name: str) -> Callable:
    def fail(*_: object, **__: object) -> None:
        raise UnsupportedOperation(f"{name} is not known to the interpreter")

    fail.__name__ = name
    return fail


def _known(name: str, module: str) -> object:
    """The interpreter's thing for the Triton function or class `name` of `module`."""
    tail = module.rsplit(".", 1)[-1]
    if tail in ("tma", "mbarrier") and hasattr(_HOPPER[tail], name):
        return getattr(_HOPPER[tail], name)
    if name in _HOPPER:
        return _HOPPER[name]
    if name == "tensor_descriptor":
        return Descriptor
    if name == "shared_memory_descriptor":
        return SharedMemory
    if name in vars(language):
        return getattr(language, name)
    if name.endswith("Layout"):
        return lambda *args, **kwargs: Layout(name, args, kwargs)
    return _unknown(name)


# --- translation ----------------------------------------------------------------------------------


def is_jit(value: object) -> bool:
    """A JIT or constexpr function of Triton or of the stand-ins."""
    return isinstance(getattr(value, "fn", None), FunctionType) and not isinstance(value, type)


def _is_constexpr_function(value: object) -> bool:
    return "constexpr" in type(value).__name__.lower()


def to_interpreter(value: object) -> object:
    """What a kernel should see instead of `value`."""
    if value is None or isinstance(
        value, (int, float, str, Tensor, SharedMemory, dt.DType, Layout)
    ):
        return value
    if isinstance(value, ModuleType):
        return _translated_module(value)
    kind = type(value)
    if kind.__name__ == "constexpr":
        return to_interpreter(value.value)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return kind(to_interpreter(v) for v in value) if kind in (tuple, list) else value
    module = getattr(value, "__module__", None) or ""
    if is_jit(value):
        if module.startswith("triton."):
            return _known(value.fn.__name__, module)
        return rebind(value)
    if isinstance(value, type):
        return _translated_class(value, module)
    if module.startswith("triton.") and callable(value) and hasattr(value, "__name__"):
        return _known(value.__name__, module)
    if kind.__module__.startswith("triton.language") and kind.__name__ in ("dtype", "pointer_type"):
        return _translated_dtype(value)
    if isinstance(value, BuiltinFunctionType):
        return _BUILTINS.get(value.__name__, value)
    return value


def _translated_dtype(value: object) -> dt.DType:
    element = getattr(value, "element_ty", None)
    if element is not None:
        return dt.pointer_type(_translated_dtype(element))
    return dt.as_dtype(value)


def _translated_module(module: ModuleType) -> object:
    if module is language or module.__name__ == "megamoe.interpreter.gl":
        return language
    known = _triton_module(module.__name__)
    if known is not None:
        return known
    if module.__name__.split(".")[0] in ("builtins", "math", "numpy", "torch", "os", "sys"):
        return module
    return _Module(module)


def _translated_class(cls: type, module: str) -> object:
    plain = _plain_class(cls)
    if plain is not None:
        return _rebound_class(plain)
    if module.startswith("triton."):
        return _known(cls.__name__, module)
    if cls.__name__ == "constexpr":
        return language.constexpr
    return cls


def _plain_class(cls: type) -> type | None:
    """The class as it was written, of an aggregate."""
    plain = cls.__dict__.get("plain") or getattr(cls, "plain", None)
    if isinstance(plain, type):
        return plain
    if not getattr(cls, "__triton_aggregate__", False):
        return None
    new = cls.__dict__["__new__"]
    cells = dict(zip(new.__code__.co_freevars, new.__closure__ or (), strict=True))
    return cells["cls"].cell_contents


def _rebound_class(plain: type) -> type:
    """The aggregate's class with its methods translated."""
    out = _CLASSES.get(plain)
    if out is None:
        members = {}
        for name, member in vars(plain).items():
            if name in ("__dict__", "__weakref__", "plain"):
                continue
            if isinstance(member, staticmethod):
                inner = member.__func__
                member = staticmethod(rebind(inner) if is_jit(inner) else inner)
            elif is_jit(member):
                member = rebind(member)
            elif isinstance(member, FunctionType):
                member = _translated_function(member, kernel=True)
            members[name] = member
        if "__init__" not in members and "__dataclass_fields__" not in members:
            members["__init__"] = _field_init(plain)
        bases = tuple(_rebound_class(b) if b is not object else b for b in plain.__bases__)
        out = _CLASSES[plain] = type(plain.__name__, bases, members)
    return out


def _field_init(plain: type) -> Callable:
    """Fields as arguments, in the order of the annotations."""
    names = list(inspect.get_annotations(plain))

    def init(self: object, *args: object, **kwargs: object) -> None:
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            setattr(self, name, value)

    return init


def rebind(kernel: object) -> FunctionType:
    """The translation of a JIT function (or of a plain function that is to run like one)."""
    fn = kernel if isinstance(kernel, FunctionType) else getattr(kernel, "fn", None)
    if not isinstance(fn, FunctionType):
        raise TypeError(f"{kernel!r} is no kernel: a function under gluon.jit is needed")
    return _translated_function(fn, kernel=not _is_constexpr_function(kernel))


def _translated_function(fn: FunctionType, kernel: bool) -> FunctionType:
    new = _FUNCTIONS.get(fn)
    if new is not None:
        return new
    names: dict[str, object] = {
        "__builtins__": fn.__globals__.get("__builtins__", builtins),
        "__name__": fn.__globals__.get("__name__", "?"),
        MARK: True,
    }
    closure = fn.__closure__
    cells = tuple(CellType() for _ in closure) if closure else None
    defaults = tuple(to_interpreter(d) for d in fn.__defaults__) if fn.__defaults__ else None
    new = FunctionType(fn.__code__, names, fn.__name__, defaults, cells)
    new.__annotations__ = fn.__annotations__
    new.__kwdefaults__ = {
        k: to_interpreter(v) for k, v in (fn.__kwdefaults__ or {}).items()
    } or None
    new.__qualname__ = fn.__qualname__
    # Before the names are filled in: functions may refer to each other.
    _FUNCTIONS[fn] = new
    for name in _global_names(fn.__code__):
        if name in fn.__globals__:
            names[name] = to_interpreter(fn.__globals__[name])
        elif kernel and name in _BUILTINS:
            names[name] = _BUILTINS[name]
    for new_cell, cell in zip(cells or (), closure or (), strict=True):
        new_cell.cell_contents = to_interpreter(cell.cell_contents)
    return new


def _global_names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names
