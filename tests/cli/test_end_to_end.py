"""The real engine behind the command line, on models of two layers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROMPT = "the quick brown fox jumps over the lazy dog. the quick brown fox"


@pytest.fixture(autouse=True)
def own_cache(outpace: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OUTPACE_DTYPE", "float32")
    monkeypatch.setenv("OUTPACE_THREADS", "1")


def test_every_draft_gives_the_text_of_plain_decoding(tiny_model: Path, tiny_draft: Path, outpace: Callable) -> None:
    def answer(*options: str) -> tuple[str, list[int]]:
        result = outpace("generate", str(tiny_model), "-p", PROMPT, "--max-tokens", "40", "--json", *options)
        assert result.code == 0, result.err
        report = json.loads(result.out)
        return report["text"], report["tokens"]

    plain = answer()
    assert len(plain[1]) > 3
    assert answer("--draft", "lookup") == answer("--draft", str(tiny_draft)) == plain
    assert answer("--draft", str(tiny_model), "-k", "7") == plain
    sampled = answer("--temperature", "1", "--seed", "5")
    assert sampled != plain
    assert answer("--temperature", "1", "--seed", "5", "--draft", str(tiny_draft)) == sampled


def test_compare_finds_no_difference(tiny_model: Path, tiny_draft: Path, outpace: Callable, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(f"{PROMPT}\nshe sells sea shells\n")
    options = ("--draft", str(tiny_draft), "--prompts", str(tmp_path / "p.txt"), "--max-tokens", "24", "--json")
    result = outpace("compare", str(tiny_model), *options)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["lossless"] and not report["differences"]
    assert sum(run["drafted"] for case in report["cases"] for run in case["runs"] if run["side"] == "plain") == 0
    assert sum(run["drafted"] for case in report["cases"] for run in case["runs"]) > 0


def test_a_draft_that_is_the_target_accepts_everything(tiny_model: Path, outpace: Callable) -> None:
    options = ("--draft", str(tiny_model), "--draft-dtype", "float32", "-k", "3", "--max-tokens", "40")
    options += ("--ignore-eos", "true", "--json")
    stats = json.loads(outpace("generate", str(tiny_model), "-p", PROMPT, *options).out)["stats"]
    assert stats["drafted"] == stats["accepted"] > 20


def test_k_is_chosen_by_costs_that_are_measured_once(
    tiny_model: Path, tiny_draft: Path, outpace: Callable, tmp_path: Path
) -> None:
    options = ("generate", str(tiny_model), "-p", PROMPT, "--max-tokens", "30", "--draft", str(tiny_draft))
    first, cached = outpace(*options), list((tmp_path / "cache" / "costs").iterdir())
    assert first.code == 0 and "what passes of" in first.err and "K auto (at most 8)" in first.err
    assert len(cached) == 2
    cached[0].write_text("damaged")
    again = outpace(*options, "-k", "auto")
    assert again.out == first.out and again.err.count("what passes of") == 1
    assert "what passes of" not in outpace(*options).err
    assert "what passes of" not in outpace(*options, "-k", "2").err


def test_a_draft_of_frequent_tokens_gives_the_same_text(tiny_model: Path, outpace: Callable, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(f"{PROMPT}\n" * 3)
    options = ("-p", PROMPT, "--max-tokens", "40", "--ignore-eos", "true", "--json")
    exact = ("--draft", str(tiny_model), "--draft-dtype", "float32", "-k", "3")

    def answer(*draft: str) -> dict:
        result = outpace("generate", str(tiny_model), *options, *exact, *draft)
        assert result.code == 0, result.err
        return json.loads(result.out)

    whole = answer()
    some = [answer("--draft-vocab", "300"), answer("--draft-vocab", "280", "--draft-vocab-corpus", str(corpus))]
    for other in some:
        assert other["tokens"] == whole["tokens"]
        assert other["stats"]["accepted"] < other["stats"]["drafted"]
    assert whole["stats"]["accepted"] == whole["stats"]["drafted"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--draft-vocab", "5"), "needs at least"),
        (("--draft-vocab", "100000"), "311 in all"),
        (("--draft-vocab", "0"), "draft_vocab must be an integer >= 1"),
        (("--draft-vocab-corpus", "x.txt"), "Set draft_vocab"),
        (("--draft-vocab", "300", "--draft-vocab-corpus", "no/such.txt"), "no/such.txt does not exist"),
        (("--draft-vocab", "300", "--draft", "lookup"), "--draft lookup has none"),
    ],
)
def test_a_draft_vocabulary_that_cannot_be(
    options: tuple[str, ...], said: str, tiny_model: Path, tiny_draft: Path, outpace: Callable
) -> None:
    result = outpace("generate", str(tiny_model), "-p", PROMPT, "--draft", str(tiny_draft), *options)
    assert (result.code, result.out) == (2, "")
    assert said in result.err and result.err.count("error: ") == 1


def test_a_draft_with_another_tokenizer_is_refused(tiny_model: Path, foreign_draft: Path, outpace: Callable) -> None:
    result = outpace("generate", str(tiny_model), "-p", PROMPT, "--draft", str(foreign_draft))
    assert (result.code, result.out) == (2, "")
    assert result.err.count("error: ") == 1 and "token" in result.err


@pytest.mark.parametrize(
    ("model", "said"),
    [("smollm2-135m-instrct", "smollm2-135m-instruct"), ("./no/such/folder", "no/such/folder"), ("x.gguf", "x.gguf")],
)
def test_unknown_model(model: str, said: str, outpace: Callable) -> None:
    result = outpace("generate", model, "-p", "x")
    assert (result.code, result.out) == (2, "")
    assert said in result.err and result.err.splitlines()[-1].startswith("error: ")


def test_context_overflow(tiny_model: Path, outpace: Callable) -> None:
    result = outpace("generate", str(tiny_model), "-p", PROMPT * 40)
    assert (result.code, result.out) == (2, "")
    assert "maximum context length is 256 tokens" in result.err


def test_k_zero_is_plain(tiny_model: Path, outpace: Callable) -> None:
    result = outpace("generate", str(tiny_model), "-p", PROMPT, "-k", "0", "--draft", "lookup", "--max-tokens", "5")
    assert result.code == 0 and "plain decoding" in result.err


def test_base_model_continues_the_text(base_model: Path, outpace: Callable) -> None:
    result = outpace("generate", str(base_model), "-p", PROMPT, "--max-tokens", "5")
    assert result.code == 0 and "no chat template" in result.err
    assert outpace("chat", str(base_model)).code == 2


def test_inspect(tiny_model: Path, tiny_draft: Path, foreign_draft: Path, outpace: Callable) -> None:
    report = json.loads(outpace("inspect", str(tiny_model), str(tiny_draft), "--json").out)
    assert report["model"]["layers"] == 2 and report["model"]["context"] == 256
    assert report["model"]["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert 0 < report["weight_ratio"] < 1
    good, bad = (outpace("inspect", str(tiny_model), str(d)).out for d in (tiny_draft, foreign_draft))
    assert "2 layers of 32" in good and good.splitlines()[-1] != bad.splitlines()[-1]


def test_as_a_program(tiny_model: Path) -> None:
    words = ["-m", "outpace", "generate", str(tiny_model), "--max-tokens", "5", "--dtype", "float32", "-q"]
    result = subprocess.run([sys.executable, *words], input="the fox", capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("\n")
