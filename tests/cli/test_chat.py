"""`chat`: history, commands, and a Ctrl-C that stops only the answer."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable

import pytest


@pytest.fixture
def say(outpace: Callable, fake, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Type lines into a chat and return what came of it."""

    def talk(*lines: str, options: tuple[str, ...] = ()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return outpace("chat", "m", *options)

    return talk


def test_history_is_kept_and_reset(say: Callable, fake) -> None:
    fake.answers = ["one", "two", "three"]
    result = say("a", "b", "/reset", "c", options=("--system", "S"))
    assert (result.code, result.out) == (0, "one\ntwo\nthree\n")
    assert [bytes(request.prompt_ids).decode() for request in fake.requests] == [
        "<system>S<user>a",
        "<system>S<user>a<assistant>one<user>b",
        "<system>S<user>c",
    ]
    assert len({request.id for request in fake.requests}) == 3


def test_commands(say: Callable, fake) -> None:
    result = say("/help", "/halp", "", "/exit", "never asked")
    assert result.code == 0 and result.out == ""
    assert "unknown command '/halp'" in result.err and not fake.requests
    assert say("/etc/passwd is a file").out == "hello world\n"


def test_ctrl_c_stops_the_answer_and_not_the_program(say: Callable, fake) -> None:
    fake.answers = ["abcdefghi", "fine"]
    fake.before = lambda position: os.kill(os.getpid(), signal.SIGINT) if position == 3 else None
    before = signal.getsignal(signal.SIGINT)
    result = say("first", "/exit")
    assert result.code == 0 and "[interrupted]" in result.err
    assert result.out == "abcdef\n"
    assert fake.engine.client.closed == 1 and signal.getsignal(signal.SIGINT) is before
    say("first", "second")
    assert bytes(fake.requests[1].prompt_ids) == b"<user>first<assistant>abcdef<user>second"


def test_a_second_ctrl_c_leaves(say: Callable, fake) -> None:
    fake.answers = ["abcdefghi"]

    def twice(position: int) -> None:
        if position == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    fake.before = twice
    assert say("first").code == 130
    assert fake.engine.closed


def test_a_full_context_is_explained_and_the_chat_goes_on(say: Callable, fake) -> None:
    result = say("x" * 1200, "short")
    assert result.code == 0 and result.out == "hello world\n"
    assert "maximum context length is 1000" in result.err and "/reset" in result.err
    assert bytes(fake.requests[0].prompt_ids) == b"<user>short"


def test_base_model_is_refused(say: Callable, fake) -> None:
    fake.chat_template = False
    result = say("hello")
    assert result.code == 2 and "outpace generate --raw" in result.err
