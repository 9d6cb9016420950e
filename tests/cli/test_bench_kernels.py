"""`bench kernels`: a quick real run, what is written, and what is refused. Timings are not judged here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outpace.cli import kernels_report
from outpace.kernels import native
from outpace.lab.kernels import ROWS
from outpace.lab.weight_samples import DTYPES, weight_formats

NATIVE = pytest.mark.skipif(not native.available(), reason=native.missing())
PNG = b"\x89PNG\r\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench"], "`outpace bench kernels`"),
        (["bench", "kernel"], "Did you mean 'kernels'?"),
        (["bench", "kernels", "--threads", "0"], "threads must be an integer >= 1"),
        (["bench", "kernels", "--threads", "many"], "--threads"),
        (["bench", "kernels", "--rounds", "0"], "--rounds must be at least 1"),
        (["bench", "kernels", "--quantization", "int3"], "--quantization must be one of none, int8, int4"),
        (["bench", "kernels", "--dtype", "int3"], "dtype"),
        (["bench", "kernels", "--quik"], "Did you mean '--quick'?"),
        (["bench", "kernels", "no/such/model/here"], "no/such/model/here"),
    ],
    ids=" ".join,
)
def test_mistakes(words: list[str], said: str, outpace: Callable) -> None:
    result = outpace(*words)
    assert (result.code, result.out) == (2, "") and result.err.count("\n") == 1
    assert said in result.err


def test_help_of_the_group_and_of_its_member(outpace: Callable) -> None:
    assert "outpace bench kernels [MODEL]" in " ".join(outpace("bench", "--help").out.split())
    shown = outpace("bench", "kernels", "--help").out
    assert "--quick" in shown and "--threads" in shown and len(shown.splitlines()) <= 40


@NATIVE
def test_quick_run(tiny_model: Path, outpace: Callable, tmp_path: Path) -> None:
    words = ("bench", "kernels", str(tiny_model), "--quick", "--dtype", "float32", "--threads", "2", "--json")
    result = outpace(*words)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    facts = report["circumstances"]
    assert (facts["threads"], facts["rounds"], facts["quick"]) == (2, 2, True)
    assert facts["machine"]["cores"] >= 1 and facts["dtype"] == "float32"
    expected = {(name, False) for name in weight_formats()} | {(name, True) for name in DTYPES}
    assert {(curve["name"], curve["kernels"] == "torch") for curve in report["products"]} == expected
    assert len(report["products"]) == len(expected)
    for curve in [*report["products"], report["pass"]]:
        assert list(curve["rows"]) == [str(rows) for rows in ROWS]
        assert all(len(row["rounds"]) == 2 and row["seconds"]["low"] > 0 for row in curve["rows"].values())
        assert curve["rows"]["1"]["v"]["median"] == 1
    assert len(report["pass"]["read_bytes_per_second"]) == 2
    assert report["limits"]["multiply"]["float32"]["low"] > 0
    assert len(report["conclusions"]) == 4


@NATIVE
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounded_weights(kind: str, tiny_model: Path, outpace: Callable) -> None:
    words = ("bench", "kernels", str(tiny_model), "--quick", "--rounds", "1", "--json", "--quantization")
    report, plain = (json.loads(outpace(*words, rounding).out) for rounding in (kind, "none"))
    assert report["circumstances"]["quantization"] == kind and report["pass"]["unit"] is None
    assert report["pass"]["weight_bytes"] < plain["pass"]["weight_bytes"] and plain["pass"]["unit"] == "bfloat16"
    assert "no arithmetic limit" in report["conclusions"][1]


@pytest.mark.parametrize("drawn", [True, False])
def test_files(
    drawn: bool, tiny_model: Path, outpace: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if drawn:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    # torch's own kernels: what a machine without a compiler gets.
    words = ("--quick", "--kernels", "torch", "--out", str(tmp_path / "new"))
    result = outpace("bench", "kernels", str(tiny_model), *words)
    assert result.code == 0, result.err
    assert kernels_report.QUICK in result.out and "one pass over" in result.out
    assert result.err.count(kernels_report.NO_PICTURE) == (0 if drawn else 1)
    files = {path.suffix: path for path in (tmp_path / "new").iterdir()}
    assert set(files) == {".md", ".json", ".png"} - (set() if drawn else {".png"})
    assert {path.stem for path in files.values()} == {"kernels-tiny-bfloat16-torch"}
    page = files[".md"].read_text()
    assert f"({files['.json'].stem}.png)" in page if drawn else "![" not in page
    assert "| bfloat16 | torch |" in page and "## Products in ms" in page
    assert [curve["kernels"] for curve in json.loads(files[".json"].read_text())["products"]] == ["torch", "torch"]
    if drawn:
        assert files[".png"].read_bytes().startswith(PNG)


def test_without_the_library_it_says_so(tiny_model: Path, outpace: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    result = outpace("bench", "kernels", str(tiny_model), "--quick")
    assert result.code == 0, result.err
    assert f"{native.missing()} Measured is torch." in result.err
    assert "machine (torch)" in result.out
    refused = outpace("bench", "kernels", str(tiny_model), "--quick", "--kernels", "native")
    assert refused.code == 2 and native.missing() in refused.err
