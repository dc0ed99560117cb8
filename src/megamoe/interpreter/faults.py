"""Where in the kernel something happens, for events and messages."""

from __future__ import annotations

import os
import sys
from types import CodeType, TracebackType

from .errors import KernelError

MARK = "__megamoe_interpreted__"  # in the globals of every rebound function


def where() -> tuple[CodeType | None, int]:
    """Code and instruction of the innermost kernel function on the stack."""
    frame = sys._getframe(2)
    while frame is not None:
        if MARK in frame.f_globals:
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None, 0


def line(place: tuple[CodeType | None, int]) -> str:
    """file:line of what `where` returned."""
    code, last = place
    if code is None:
        return "?"
    number = code.co_firstlineno
    for start, end, n in code.co_lines():
        if start <= last < end and n is not None:
            number = n
    return f"{os.path.basename(code.co_filename)}:{number}"


def locate(error: KernelError, task: object, trace: TracebackType | None = None) -> KernelError:
    """Put the kernel's file and line and the task in front of the message, once."""
    if getattr(error, "located", False):
        return error
    trace = trace or error.__traceback__
    place = None
    while trace is not None:
        if MARK in trace.tb_frame.f_globals:
            place = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    if place is None:
        code = task.launch.fn.__code__
        place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return mark_located(error, f"{place}: {task.title}: {error.args[0]}")


def mark_located(error: KernelError, message: str) -> KernelError:
    error.args = (message,)
    error.located = True
    return error


def party(event_info: tuple) -> str:
    """Who caused an event, and where, for messages."""
    task, place = event_info
    return f"{task.title} at {line(place)}"
