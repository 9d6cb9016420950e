"""Where the command line writes: data to stdout, everything else (notes, progress, errors) to stderr."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes or items done, total or 0 when unknown)."""

# Everything in Unicode's control class but tab and newline: model output must not drive the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Text that is safe to show on a terminal: control characters become visible escapes such as \\x1b."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def is_terminal(stream: TextIO) -> bool:
    """True when a person is watching this stream."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@dataclass(frozen=True)
class Console:
    """Output of one command. `quiet` drops notes and progress, `verbose` adds tracebacks and third-party warnings."""

    quiet: bool = False
    verbose: bool = False

    def data(self, text: str, end: str = "\n") -> None:
        """Write to stdout at once."""
        sys.stdout.write((printable(text) if is_terminal(sys.stdout) else text) + end)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Tell the person something that is not data."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        """Tell what a flag asked for, even with --quiet."""
        print(text, file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """Report a failure: one paragraph, even with --quiet."""
        print(f"error: {printable(text)}", file=sys.stderr, flush=True)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A callback that draws bars on a terminal, and elsewhere prints each new activity once."""
        if self.quiet:
            yield lambda what, done, total: None
        elif is_terminal(sys.stderr):
            with _bars() as report:
                yield report
        else:
            seen: set[str] = set()

            def announce(what: str, done: int, total: int) -> None:
                if what not in seen:
                    seen.add(what)
                    self.note(what)

            yield announce


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    tasks: dict[str, TaskID] = {}
    # Transient: the bars go away, so that what stays on the screen is the answer.
    with RichProgress(*columns, TimeElapsedColumn(), console=RichConsole(stderr=True), transient=True) as bars:

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(printable(what), total=total or None)
            bars.update(tasks[what], completed=done, total=total or None)

        yield report


class LiveTitle:
    """Speed and acceptance in the terminal's title while text streams, where no answer text is disturbed."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled and is_terminal(sys.stderr)
        self._shown = 0.0

    def show(self, text: str) -> None:
        """Replace the title, at most five times a second."""
        now = time.monotonic()
        if self._enabled and now - self._shown > 0.2:
            self._shown = now
            self._write(text)

    def close(self) -> None:
        """Give the title back."""
        if self._enabled and self._shown:
            self._write("")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"\x1b]0;{printable(text)}\x07")
        sys.stderr.flush()
