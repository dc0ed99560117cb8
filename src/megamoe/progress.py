"""Progress for a person: a moving line on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from typing import TextIO

PLAIN_SECONDS = 5.0


class Progress:
    """Says which step of how many is being done, and for how long. Used as a context manager.

    On a terminal one line is rewritten and removed at the end. Elsewhere a line is printed when a
    step begins at least `PLAIN_SECONDS` after the last one, so logs of quick runs stay short.
    """

    def __init__(self, *, total: int, stream: TextIO | None = None, quiet: bool = False) -> None:
        self._total = total
        self._done = 0
        self._stream = sys.stderr if stream is None else stream
        self._moving = self._stream.isatty()
        self._quiet = quiet
        self._began = time.monotonic()
        self._last = float("-inf")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Takes the moving line away, so that something else can be printed."""
        if self._moving and not self._quiet:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def step(self, what: str) -> None:
        """Begins the next step."""
        self._done += 1
        self._show(f"[{self._done}/{self._total}] {what}")

    def _show(self, line: str) -> None:
        now = time.monotonic()
        if self._quiet:
            return
        if self._moving:
            self._stream.write(f"\r\x1b[K{line} ({now - self._began:.0f} s)")
        elif now - self._last >= PLAIN_SECONDS:
            self._stream.write(f"{line}\n")
        else:
            return
        self._last = now
        self._stream.flush()
