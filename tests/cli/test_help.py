"""Help is short, quick, and loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from outpace.cli.main import VERBS

HEAVY = ("torch", "transformers", "numpy", "tokenizers", "rich", "huggingface_hub")
COMMANDS = [["--help"], ["--version"], *([verb, "--help"] for verb in VERBS), ["bench", "kernels", "--help"]]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def heavy_imports(code: str) -> str:
    """The heavy modules that are loaded after running `code`."""
    report = f"\nimport sys; print('loaded:', [name for name in {HEAVY!r} if name in sys.modules])"
    return run_python(code + report).stdout.splitlines()[-1]


def test_no_help_imports_a_heavy_module() -> None:
    code = f"from outpace.cli.main import main\nfor words in {COMMANDS!r}: assert main(words) == 0"
    assert heavy_imports(code) == "loaded: []"
    assert heavy_imports("import tokenizers") != "loaded: []"


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_a_screen(verb: str) -> None:
    result = subprocess.run([sys.executable, "-m", "outpace", verb, "--help"], capture_output=True, text=True)
    lines = result.stdout.splitlines()
    assert (result.returncode, result.stderr) == (0, "")
    assert 5 < len(lines) <= 40
    assert max(map(len, lines)) <= 110


def test_help_all_shows_what_help_hides() -> None:
    short, everything = (
        run_python(f"from outpace.cli.main import main; main(['chat', {flag!r}])").stdout
        for flag in ("--help", "--help-all")
    )
    assert "--logit-bias" not in short
    assert "--logit-bias" in everything
    assert "--speculative-model" not in everything


def test_help_takes_less_than_half_a_second() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "outpace", "generate", "--help"], capture_output=True, check=True)
        return time.perf_counter() - start

    # The best of five: other work on the machine must not fail this, a heavy import does (2 s for torch alone).
    assert min(seconds() for _ in range(5)) < 0.5


def test_overview_names_every_command() -> None:
    shown = subprocess.run([sys.executable, "-m", "outpace"], capture_output=True, text=True, check=True).stdout
    assert all(verb in shown for verb in VERBS)
