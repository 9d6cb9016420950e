"""`generate`: what goes to stdout, what to stderr, and what the engine is asked."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outpace.cli.console import printable


def test_text_on_stdout_and_summary_on_stderr(outpace: Callable, fake) -> None:
    result = outpace("generate", "m", "-p", "Hi", "--draft", "lookup")
    assert (result.code, result.out) == (0, "hello world\n")
    assert "11 tokens in" in result.err and "acceptance 88% (7 of 8 drafted)" in result.err
    assert "K 4, draft lookup" in result.err
    assert bytes(fake.requests[0].prompt_ids) == b"<user>Hi"
    assert fake.requests[0].params.greedy and fake.engine.closed


def test_quiet_leaves_only_the_answer(outpace: Callable, fake) -> None:
    result = outpace("generate", "m", "-p", "Hi", "-q")
    assert (result.out, result.err) == ("hello world\n", "")


@pytest.mark.parametrize("typed", ["line\n", "line"])
def test_prompt_from_stdin_and_file(typed: str, outpace: Callable, fake, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    outpace("generate", "m", "--raw")
    assert bytes(fake.requests[0].prompt_ids) == b"line"
    (tmp_path / "prompt").write_text(typed)
    outpace("generate", "m", "--prompt-file", str(tmp_path / "prompt"), "--system", "Be brief")
    assert bytes(fake.requests[0].prompt_ids) == b"<system>Be brief<user>line"


def test_a_file_that_is_no_text(outpace: Callable, fake, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"\xff\xfe\x00")
    result = outpace("generate", "m", "--prompt-file", str(tmp_path / "prompt"))
    assert result.code == 2 and "not UTF-8" in result.err


def test_base_model_goes_raw_and_says_so(outpace: Callable, fake) -> None:
    fake.chat_template = False
    assert "no chat template" in outpace("generate", "m", "-p", "Hi").err
    assert bytes(fake.requests[0].prompt_ids) == b"Hi"
    refused = outpace("generate", "m", "-p", "Hi", "--system", "s")
    assert refused.code == 2 and "--system" in refused.err


def test_k_zero_is_plain_decoding_and_says_so(outpace: Callable, fake) -> None:
    fake.description = replace(fake.description, drafter="off", k=0)
    result = outpace("generate", "m", "-p", "Hi", "--draft", "lookup", "-k", "0")
    assert result.code == 0
    assert "K is 0: plain decoding" in result.err and "speculation is off" not in result.err


def test_speculation_that_is_off_says_why(outpace: Callable, fake) -> None:
    fake.description = replace(fake.description, drafter="off", draft_reason="it does not pay here")
    assert "speculation is off: it does not pay here" in outpace("generate", "m", "-p", "Hi", "--draft", "x").err


def test_without_max_tokens_the_answer_takes_what_is_left(outpace: Callable, fake) -> None:
    outpace("generate", "m", "-p", "x" * 900, "--raw")
    assert fake.requests[0].params.max_tokens == 100
    outpace("generate", "m", "-p", "Hi", "--raw", "--max-tokens", "5")
    assert fake.requests[0].params.max_tokens == 5


@pytest.mark.parametrize("extra", [(), ("--max-tokens", "50")])
def test_context_overflow_gives_the_numbers(extra: tuple[str, ...], outpace: Callable, fake) -> None:
    result = outpace("generate", "m", "-p", "x" * 1200, *extra)
    assert (result.code, result.out) == (2, "")
    assert "maximum context length is 1000 tokens" in result.err and result.err.count("error:") == 1


def test_json_holds_everything(outpace: Callable, fake) -> None:
    result = outpace("generate", "m", "-p", "Hi", "--json", "--logprobs", "1")
    report = json.loads(result.out)
    assert report["text"] == "hello world" and report["finish_reason"] == "stop"
    assert report["tokens"] == list(b"hello world") and len(report["kinds"]) == 11
    assert report["stats"]["accepted"] == 7 and report["stats"]["acceptance_rate"] == 7 / 8
    assert report["logprobs"][0] == {
        "token": "h",
        "id": 104,
        "logprob": -0.5,
        "top": [{"token": "h", "id": 104, "logprob": -0.5}],
    }
    assert report["engine"]["context"] == 1000


@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_stats_and_logprobs_as_text(quiet: tuple[str, ...], outpace: Callable, fake) -> None:
    result = outpace("generate", "m", "-p", "Hi", "--stats", "--logprobs", "1", *quiet)
    assert result.out == "hello world\n"
    assert "mean_acceptance_length" in result.err and "'h'" in result.err


def test_sampling_flags_reach_the_request(outpace: Callable, fake) -> None:
    flags = "--temperature 0.7 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --presence-penalty -1"
    flags += " --frequency-penalty 0.5 --stop A --stop B --seed 9 --min-tokens 2 --ignore-eos true --logit-bias 3=-1.5"
    outpace("generate", "m", "-p", "Hi", *flags.split(), "--stop-token-ids", "4")
    params = fake.requests[0].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.7, 5, 0.9, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, -1, 0.5)
    assert (params.stop, params.stop_token_ids, params.seed) == (("A", "B"), (4,), 9)
    assert (params.min_tokens, params.ignore_eos, dict(params.logit_bias)) == (2, True, {3: -1.5})


def test_escape_sequences_of_a_model_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2J\x07\ttab\nline \u202e é") == "a\\x1b[2J\\x07\ttab\nline \u202e é"


def test_constraints_reach_the_engine(outpace: Callable, fake, tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "integer"}')
    for words, kind, text in (
        (("--json-schema", str(path)), "json", '{"type": "integer"}'),
        (("--json-schema", '{"type": "object"}'), "json", '{"type": "object"}'),
        (("--regex", "[0-9]+"), "regex", "[0-9]+"),
        (("--grammar", str(path)), "grammar", '{"type": "integer"}'),
    ):
        assert outpace("generate", "m", "-p", "Hi", *words).code == 0
        constraint = fake.requests[-1].params.constraint
        assert (constraint.kind, constraint.text) == (kind, text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--regex", "a", "--json-schema", "{}"), "not allowed with"),
        (("--grammar", "nowhere.lark"), "nowhere.lark"),
        (("--regex", ""), "empty"),
    ],
)
def test_constraints_that_cannot_be(outpace: Callable, fake, words: tuple[str, ...], message: str) -> None:
    result = outpace("generate", "m", "-p", "Hi", *words)
    assert result.code == 2 and message in result.err
