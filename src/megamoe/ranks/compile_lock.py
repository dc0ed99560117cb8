"""One process at a time compiles into Triton's cache; the others find the result there."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.05


def cache_directory() -> Path:
    """Where Triton keeps what it has compiled."""
    given = os.environ.get("TRITON_CACHE_DIR")
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(given) if given else home / ".triton" / "cache"


@contextmanager
def compile_lock(*, timeout_s: float) -> Iterator[None]:
    """Hold the lock of the cache.  The system frees it when its holder ends, however it ends.

    Raises TimeoutError, which names the file.
    """
    import fcntl  # not on Windows, which has no GPU kernel either

    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "megamoe.lock"
    with path.open("w") as file:
        begin = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - begin > timeout_s:
                    raise TimeoutError(
                        f"waited {timeout_s:g} s for another process that compiles ({path})"
                    ) from None
                time.sleep(POLL_S)
        yield
