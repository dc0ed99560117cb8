"""What kernel files import instead of Triton when there is no Triton: decorators, types, layouts.

The functions are the interpreter's own; the files only need them to exist until a `Machine` runs a
kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace

from . import language as _language
from .errors import KernelError
from .hopper import (
    mbarrier,
    tma,
)
from .wgmma import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)


class constexpr:  # noqa: N801 (Triton's name)
    """A compile-time constant: `.value`, and arithmetic on it."""

    def __init__(self, value: object):
        self.value = getattr(value, "value", value) if isinstance(value, constexpr) else value

    def __repr__(self) -> str:
        return f"constexpr[{self.value}]"

    def __index__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __hash__(self) -> int:
        return hash(self.value)


def _operator(name: str) -> Callable:
    def run(self: constexpr, *others: object) -> constexpr:
        plain = [o.value if isinstance(o, constexpr) else o for o in others]
        return constexpr(getattr(self.value, name)(*plain))

    return run


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "mod",
    "rmod",
    "truediv",
    "rtruediv",
    "floordiv",
    "rfloordiv",
    "lshift",
    "rshift",
    "and",
    "or",
    "xor",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "neg",
    "invert",
    "pow",
    "rpow",
):
    setattr(constexpr, f"__{_name}__", _operator(f"__{_name}__"))


class JITFunction:
    """A function under `gluon.jit`: `fn` is the function; only a `Machine` can run it."""

    def __init__(self, fn: FunctionType):
        self.fn = fn
        self.__name__, self.__doc__, self.__module__ = fn.__name__, fn.__doc__, fn.__module__

    def __call__(self, *_: object, **__: object) -> None:
        raise KernelError(
            f"{self.__name__} is a kernel function; run it with megamoe.interpreter.Machine "
            "(there is no Triton here to launch it on a GPU)"
        )

    def __getitem__(self, grid: object) -> None:
        self()


class ConstexprFunction(JITFunction):
    """A function under `gluon.constexpr_function`: plain Python on constants."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        plain = {
            k: getattr(v, "value", v) if isinstance(v, constexpr) else v for k, v in kwargs.items()
        }
        return self.fn(*[a.value if isinstance(a, constexpr) else a for a in args], **plain)


def jit(fn: FunctionType | None = None, **_: object) -> object:
    """`gluon.jit`."""
    return JITFunction(fn) if fn is not None else JITFunction


def constexpr_function(fn: FunctionType) -> ConstexprFunction:
    """`gluon.constexpr_function`."""
    return ConstexprFunction(fn)


def aggregate(cls: type) -> type:
    """`gluon.aggregate`: the class itself, marked for the interpreter."""
    cls.plain = cls
    return cls


class _Gl(ModuleType):
    """`gl` outside kernels: the interpreter's names, and a `constexpr` that has `.value`."""

    def __getattr__(self, name: str) -> object:
        return getattr(_language, name)


gl = _Gl("megamoe.interpreter.gl")
gl.constexpr = constexpr
gluon = SimpleNamespace(
    jit=jit, constexpr_function=constexpr_function, aggregate=aggregate, language=gl
)

__all__ = [
    "aggregate",
    "constexpr",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "gluon",
    "jit",
    "mbarrier",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]
