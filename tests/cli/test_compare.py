"""`compare`: equal texts, differing texts, what is measured, and what is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outpace.cli.compare import read_prompts
from outpace.cli.report import show_summary, summary_lines, write
from outpace.lab.compare import Case, Setup, Verdict, bootstrap, compare, order, spread
from outpace.types import Delta, FinishReason, Request, RequestStats, SamplingParams


def test_equal_texts(outpace: Callable, fake) -> None:
    result = outpace("compare", "m")
    assert result.code == 0
    assert "the same to the character in all 24 runs" in result.out and "speedup:" in result.out
    assert fake.configs[1].draft == "lookup"
    assert result.out.count("identical, 11 characters") == 6


def test_a_differing_text_is_code_3_and_shows_the_place(outpace: Callable, fake, tmp_path: Path) -> None:
    fake.answers, fake.plain_answers = ["hello w0rld"], ["hello world"]
    result = outpace("compare", "m", "--out", str(tmp_path / "new"), "--repeats", "1")
    assert result.code == 3
    assert "at character 7 (line 1, column 8, token 7)" in result.out and "'orld' against '0rld'" in result.out
    assert "this must not happen" in result.out and "not a tie" in result.out
    report = json.loads((tmp_path / "new" / "compare-fake-lookup.json").read_text())
    assert report["lossless"] is False and report["differences"][0]["character"] == 7
    assert "-hello world\n+hello w0rld" in (tmp_path / "new" / "compare-fake-lookup.md").read_text()


def test_json_is_the_only_thing_on_stdout(outpace: Callable, fake) -> None:
    report = json.loads(outpace("compare", "m", "--json", "--max-tokens", "8").out)
    assert report["lossless"] is True and len(report["cases"]) == 6
    assert report["circumstances"]["sampling"] == {"max_tokens": 8, "temperature": 0.0}
    assert report["circumstances"]["machine"]["cores"] >= 1
    assert report["acceptance_rate"] == pytest.approx(5 / 6)


def test_sampling_without_a_seed_gets_one(outpace: Callable, fake) -> None:
    result = outpace("compare", "m", "--temperature", "0.8")
    assert "using --seed 0" in result.err
    assert {request.params.seed for request in fake.requests} == {0}


@pytest.mark.parametrize("full", [(), ("--full",)])
def test_long_answers_are_cut_and_full_shows_them(full: tuple[str, ...], outpace: Callable, fake) -> None:
    fake.answers = ["".join(f"line {number}\n" for number in range(16))]
    assert ("line 15" in outpace("compare", "m", *full).out) == bool(full)


def test_prompt_files(tmp_path: Path, outpace: Callable) -> None:
    (tmp_path / "a.txt").write_text("first\n\nsecond\n")
    assert [entry["prompt"] for entry in read_prompts(str(tmp_path / "a.txt"))] == ["first", "second"]
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "kind": "code", "more": 1}\n')
    assert read_prompts(str(tmp_path / "a.jsonl")) == [{"name": "line 1", "kind": "code", "prompt": "x"}]
    for content, said in [("", "no prompts"), ("{", "line 1: not JSON"), ('{"text": "x"}', "needs a non-empty string")]:
        (tmp_path / "a.jsonl").write_text(content)
        result = outpace("compare", "m", "--prompts", str(tmp_path / "a.jsonl"))
        assert result.code == 2 and said in result.err


def test_demo_prompts_are_honestly_mixed() -> None:
    kinds = [entry["kind"] for entry in read_prompts(None)]
    assert set(kinds) == {"quoting", "editing", "chat"} and 5 <= len(kinds) <= 6


class Clock:
    """A time source that only the scripted engine advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """Answers ids 0, 1, ... in bursts of `burst`, taking `cost` seconds per delta; keeps who ran when."""

    def __init__(self, clock: Clock, log: list[str], burst: int, cost: float = 1.0, wrong_from: int = 10**9) -> None:
        self.clock, self.log, self.burst, self.cost, self.wrong_from = clock, log, burst, cost, wrong_from

    def generate(self, request: Request) -> Iterator[Delta]:
        self.log.append(request.id)
        ids = [i + (i >= self.wrong_from) for i in range(request.params.max_tokens)]
        self.clock.now += 5.0  # reading the prompt
        for batch in _batched(ids, self.burst):
            self.clock.now += self.cost
            done = batch[-1] == ids[-1]
            stats = RequestStats(1, len(ids), 4, 4, 8, 6) if done and self.burst > 1 else None
            text = "".join(chr(97 + i) for i in batch)
            yield Delta(request.id, tuple(batch), (), text, (), FinishReason.LENGTH if done else None, stats)


def _batched(ids: list[int], size: int) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[i : i + size]) for i in range(0, len(ids), size))


def cases(count: int = 2) -> list[Case]:
    return [Case(f"c{i}", "kind", (1, 2), SamplingParams(temperature=0, max_tokens=9)) for i in range(count)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    source = Clock()
    monkeypatch.setattr("outpace.lab.compare.time.perf_counter", source)
    return source


def test_runs_are_paired_interleaved_and_warmed_up(clock: Clock) -> None:
    log: list[str] = []
    result = compare(cases(), Timed(clock, log, 1), Timed(clock, log, 3), Setup(), lambda done: None)
    assert log[:2] == ["warm-up-plain", "warm-up-speculative"]
    sides = [name.split("-")[-1] for name in log[2:]]
    assert sides == ["plain", "speculative", "speculative", "plain", "speculative", "plain", "plain", "speculative"]
    assert order(0) == order(2) != order(1)
    # Plain: 8 tokens after the first in 8 s. Speculative: 6 tokens after the first burst in 2 s.
    assert (result.plain_speed.median, result.speculative_speed.median) == (1.0, 3.0)
    assert result.speedup.median == 3.0 and result.interval == (3.0, 3.0)
    assert result.answer_speedup.median == 14 / 8
    assert (result.acceptance_rate, result.mean_acceptance_length) == (6 / 8, 1 + 6 / 4)
    assert result.lossless and not result.differences


@pytest.mark.parametrize("near_tie", [True, False])
def test_only_a_near_tie_excuses_a_difference(near_tie: bool, clock: Clock) -> None:
    asked = []

    def judge(prompt, plain, other) -> Verdict:
        asked.append((prompt, plain[:6], other[:6]))
        return Verdict(near_tie, "two logits within rounding", 0.0)

    engines = Timed(clock, [], 1), Timed(clock, [], 3, wrong_from=5)
    result = compare(cases(1), *engines, Setup(1, judge=judge), lambda done: None)
    assert asked == [((1, 2), (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 6))]
    assert result.lossless is near_tie
    found = result.differences[0]
    assert (found.token, found.diff.first, found.side) == (5, 5, "speculative")
    facts = {"draft": "d", "k": 2}
    assert any(("near tie" in line) == near_tie and "differ" in line for line in summary_lines(result, facts))


def test_plain_decoding_that_does_not_repeat_is_a_difference(clock: Clock) -> None:
    class Drifting(Timed):
        def generate(self, request: Request) -> Iterator[Delta]:
            self.wrong_from = 4 if request.id == "0-1-plain" else 10**9
            return super().generate(request)

    result = compare(cases(1), Drifting(clock, [], 1), Timed(clock, [], 3), Setup(), lambda done: None)
    assert [(found.side, found.repeat, found.token) for found in result.differences] == [("plain", 1, 4)]
    assert not result.lossless


def test_answers_of_one_step_are_not_timed(clock: Clock, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = compare(cases(1), Timed(clock, [], 9), Timed(clock, [], 9), Setup(), lambda done: None)
    assert result.speedup.n == 0 and result.interval == (0.0, 0.0)
    facts = {
        "draft": "d",
        "k": 2,
        "model": "org/m",
        "dtype": "float32",
        "threads": 1,
        "kernels": "fake",
        "date": "2026-01-01",
    }
    facts["machine"] = {"cpu": "x", "cores": 1, "torch": "2"}
    show_summary(result, facts)
    assert "nothing to time" in capsys.readouterr().out
    assert [path.name for path in write(tmp_path, result, facts)] == ["compare-m-d.md", "compare-m-d.json"]


def test_spread_and_bootstrap() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0, 5.0]).__dict__ == dict(n=5, median=3.0, q1=2.0, q3=4.0, low=1.0, high=5.0)
    assert spread([2.0]).q3 == 2.0 and spread([]).n == 0
    low, high = bootstrap([[1.0, 1.1], [2.0, 2.1], [3.0, 3.1], [1.5, 1.4]])
    assert 1.0 <= low < 2.0 < high <= 3.1 and bootstrap([[1.0], [1.0]]) == (1.0, 1.0)


def test_a_folder_that_cannot_be_written(outpace: Callable, fake, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = outpace("compare", "m", "--repeats", "1", "--out", str(tmp_path / "file" / "x"))
    assert result.code == 2 and "Cannot write the result" in result.err
