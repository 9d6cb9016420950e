"""Every mistake is one paragraph on stderr and the right exit code, and nothing on stdout."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outpace.errors import DownloadError, EngineDead

MISTAKES = [
    (["genrate"], "'generate'"),
    (["--verbos"], "unknown option"),
    (["generate", "m", "-p", "x", "--tempratur", "1"], "'--temperature'"),
    (["generate", "m", "-p", "x", "--tempratur=1"], "'--temperature'"),
    (["chat", "m", "--spec-k", "2"], "--spec-k"),
    (["generate", "m", "n", "-p", "x"], "unexpected argument 'n'"),
    (["generate", "-p", "x"], "no model given"),
    (["generate", "m", "-p", ""], "prompt is empty"),
    (["generate", "m", "-p", "x", "--prompt-file", "y"], "Use one of them"),
    (["generate", "m", "--prompt-file", "no-such-file"], "no-such-file"),
    (["generate", "m", "-p", "x", "-k", "1000"], "from 0 (plain decoding) to 64"),
    (["generate", "m", "-p", "x", "-k", "-1"], "from 0 (plain decoding) to 64"),
    (["generate", "m", "-p", "x", "--top-k", "many"], "--top-k"),
    (["generate", "m", "-p", "x", "--top-p", "0"], "top_p"),
    (["generate", "m", "-p", "x", "--max-tokens", "0"], "max_tokens"),
    (["generate", "m", "-p", "x", "--temperature", "-1"], "temperature"),
    (["generate", "m", "-p", "x", "--temperature", "nan"], "temperature"),
    (["generate", "m", "-p", "x", "--logprobs", "99"], "logprobs"),
    (["generate", "m", "-p", "x", "--dtype", "int3"], "dtype"),
    (["generate", "m", "-p", "x", "--config", "no-such.toml"], "no-such.toml"),
    (["generate", "m", "-p", "x", "--raw", "--system", "s"], "--system"),
    (["generate", "m", "-p", "x", "--speculative-config", "{"], "--speculative-config"),
    (["generate", "m", "-p", "x", "--speculative-config", '{"method": "mtp"}'], "no counterpart"),
    (["compare", "m", "--repeats", "0"], "--repeats"),
    (["compare", "m", "--prompts", "no-such-file"], "no-such-file"),
    (["models", "pul"], "unknown action"),
    (["models", "pull"], "needs a name"),
    (["models", "list", "x"], "takes no name"),
]


@pytest.mark.parametrize(
    ("words", "said"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_mistake(words: list[str], said: str, outpace: Callable) -> None:
    result = outpace(*words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    assert said in result.err


def test_no_prompt_at_a_terminal(outpace: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())
    result = outpace("generate", "m")
    assert result.code == 2 and "no prompt given" in result.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (DownloadError("The file\nis gone."), 1, "error: The file is gone."),
        (EngineDead("stopped"), 1, "error: stopped"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("oops"), 1, "This is a bug in outpace"),
    ],
)
def test_failures_while_running(
    raised: BaseException, code: int, said: str, outpace: Callable, fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*ignored: object) -> None:
        raise raised

    monkeypatch.setattr(sys.modules["outpace.engine.build"], "open_engine", fail)
    result = outpace("generate", "m", "-p", "x")
    assert (result.code, result.out) == (code, "")
    assert said in result.err and "Traceback" not in result.err
    if code == 1:
        assert "Traceback" in outpace("generate", "m", "-p", "x", "-v").err


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    code = "import sys; from outpace.cli.main import main; sys.exit(main(['env']))"
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (result.returncode, result.stderr) == (1, "")


def test_misspelt_environment_variable_is_mentioned(outpace: Callable, fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_DRAFTS", "lookup")
    monkeypatch.setenv("OUTPACE_CACHE", "/nowhere")
    result = outpace("generate", "m", "-p", "x")
    assert "did you mean OUTPACE_DRAFT?" in result.err
    assert "OUTPACE_CACHE" not in result.err
