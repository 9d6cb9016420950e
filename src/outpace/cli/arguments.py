"""The parser of one command: flags from the settings table, hidden aliases, suggestions for misspelt flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from outpace.cli.settings import ENGINE, SAMPLING, SETTINGS, SPEC, Setting, nearest
from outpace.errors import UsageError

_HELP_WIDTH = 110


class Parser(argparse.ArgumentParser):
    """argparse, but errors are exceptions, and settings that were not given leave no attribute."""

    def __init__(self, verb: str, description: str, show_all: bool) -> None:
        super().__init__(
            prog=f"outpace {verb}",
            description=description,
            usage=argparse.SUPPRESS,
            add_help=False,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=_HELP_WIDTH),
        )
        self._show_all = show_all
        self._titles = {SPEC: self.add_argument_group("speculation")}
        self._titles |= {SAMPLING: self.add_argument_group("sampling"), ENGINE: self.add_argument_group("engine")}
        general = self.add_argument_group("general")
        general.add_argument("-h", "--help", action="help", help="this list; --help-all shows every option")
        general.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
        general.add_argument("-q", "--quiet", action="store_true", help="no notes, no progress")
        general.add_argument("-v", "--verbose", action="store_true", help="tracebacks and library warnings")
        self._general = general

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. See: {self.prog} --help")

    def add_json(self) -> None:
        """The flag of every command that reports something."""
        self._general.add_argument("--json", action="store_true", help="machine-readable output on stdout")

    def add_settings(self, *chosen: str) -> None:
        """MODEL, the flags of these groups or single settings, --config, and the hidden spellings of other tools."""
        self.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=MODEL_HELP)
        self._hide("--model", "model")
        self._general.add_argument("--config", metavar="FILE", help="settings from a TOML file")
        self._hide("--speculative-config", "speculative_config")
        for setting in SETTINGS:
            if setting.flags and {setting.group, setting.name} & set(chosen):
                self._add_setting(setting)

    def _hide(self, flag: str, dest: str) -> None:
        self.add_argument(flag, dest=dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    def _add_setting(self, setting: Setting) -> None:
        shown = self._show_all or not setting.advanced
        target = self._titles[setting.group]
        for flags, text in ((setting.flags, setting.help if shown else None), (setting.hidden, None)):
            if flags:
                target.add_argument(
                    *flags,
                    dest=setting.name,
                    type=setting.parse,
                    action="append" if setting.repeat else "store",
                    default=argparse.SUPPRESS,
                    metavar=setting.metavar,
                    help=text or argparse.SUPPRESS,
                )

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse, flags and positionals in any order. Raises UsageError; a near miss is suggested."""
        args, unknown = self.parse_known_intermixed_args(list(argv))
        if unknown:
            word = unknown[0].partition("=")[0]
            if not word.startswith("-"):
                raise UsageError(f"unexpected argument {word!r}. See: {self.prog} --help")
            hint = nearest(word, self._option_string_actions)
            raise UsageError(f"unknown option {word!r}.{hint} See: {self.prog} --help")
        return args


MODEL_HELP = "catalogue name, hub id (org/name[@revision]), folder, or .gguf file"
