"""Where downloaded and converted files live, and how two processes share that place."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from outpace.errors import DownloadError

# (what is being done, units done, units in all): bytes for a download, tensors for a conversion.
Progress = Callable[[str, int, int], None]


def silent(what: str, done: int, total: int) -> None:
    """The `Progress` of callers that show nothing."""


def cache_root() -> Path:
    """$OUTPACE_CACHE, or ~/.cache/outpace."""
    return Path(os.environ.get("OUTPACE_CACHE") or Path.home() / ".cache" / "outpace").expanduser().absolute()


@contextlib.contextmanager
def locked(target: Path, progress: Progress) -> Iterator[None]:
    """Only one process at a time makes `target`; the others wait. The system frees the lock when its owner dies."""
    with cache_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.parent / f".{target.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress(f"waiting for another process that is making {target.name}", 0, 1)
            lock.acquire()
    try:
        with cache_errors(target):
            yield
    finally:
        lock.release()


@contextlib.contextmanager
def cache_errors(target: Path) -> Iterator[None]:
    """A full or read-only disk becomes a DownloadError that says how much room there is and which variable to set."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_room(target) from error
        raise DownloadError(
            f"Cannot write to the model cache at {target.parent}: {error}. Check its permissions, or set OUTPACE_CACHE"
            " to a folder you can write to."
        ) from error


def no_room(target: Path) -> DownloadError:
    """The disk is full."""
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(target.parent).free
        return DownloadError(
            f"The disk of the model cache is full: {target.parent} has {free / 1e9:.1f} GB left, too little for"
            f" {target.name}. Free some space, or set OUTPACE_CACHE to a folder on a larger disk, and run the command"
            " again; what has arrived is kept."
        )
    return DownloadError(
        f"The disk of the model cache at {target.parent} is full. Free some space, or set OUTPACE_CACHE."
    )
