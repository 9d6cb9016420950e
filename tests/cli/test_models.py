"""`models`: the catalogue and what is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def cache(outpace: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    return tmp_path


def test_list(cache: Path, outpace: Callable) -> None:
    before = json.loads(outpace("models", "--json").out)
    assert "smollm2-135m-instruct" in [row["name"] for row in before]
    assert not any(row["cached"] for row in before)
    (cache / "gguf").mkdir()
    (cache / "gguf" / "smollm2-135m-instruct.gguf").write_bytes(b"x")
    after = [row["name"] for row in json.loads(outpace("models", "list", "--json").out) if row["cached"]]
    assert after == ["smollm2-135m-instruct"]
    lines = outpace("models").out.splitlines()
    assert len(lines) == len(before) and sum("not downloaded" in line for line in lines) == len(before) - 1


def test_pull(cache: Path, outpace: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def pull(name: str, progress: Callable[[str, int, int], None]) -> Path:
        progress(f"fetching {name}", 1, 2)
        progress(f"fetching {name}", 2, 2)
        return cache / name

    monkeypatch.setattr("outpace.weights.catalog.pull", pull)
    result = outpace("models", "pull", "a", "b")
    assert result.out.splitlines() == [str(cache / "a"), str(cache / "b")]
    assert result.err.splitlines() == ["fetching a", "fetching b"]
    assert json.loads(outpace("models", "pull", "a", "--json").out) == {"a": str(cache / "a")}


def test_pull_of_an_unknown_name(cache: Path, outpace: Callable) -> None:
    result = outpace("models", "pull", "smollm2-135m-instrct")
    assert result.code == 2 and "smollm2-135m-instruct" in result.err


def test_env_block_hides_secrets(outpace: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OUTPACE_API_KEY", "hush")
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("OUTPACE_DRAFT", "lookup")
    facts = json.loads(outpace("env", "--json").out)
    assert facts["variables"] == {"HF_TOKEN": "(set)", "OUTPACE_API_KEY": "(set)", "OUTPACE_DRAFT": "lookup"}
    assert facts["cores"] >= 1 and facts["packages"]["torch"] != "not installed"
    text = outpace("env").out
    assert "hush" not in text and "python:" in text
