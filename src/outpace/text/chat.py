"""Chat templates: jinja2, as checkpoints ship them, in a sandbox (they are code from the internet).

The environment is the one that templates are written for (transformers documentation, "Chat templates"): trimmed
blocks, loop controls, `raise_exception`, `strftime_now`, `tojson` that leaves letters alone, and the `generation` tag.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outpace.errors import ModelError, PromptError

Message = Mapping[str, Any]


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only holds its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """One compiled template and the special tokens it may name (bos_token, eos_token, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        # The class `dict` itself would let a template change its input: dict.update(messages[0], ...).
        environment.globals.update(raise_exception=_refuse, strftime_now=_now, dict=_new_dict)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(
                f"The chat template in {where} does not compile: {error}. Use a prompt without a template (--raw), or"
                " mend the file."
            ) from error
        self._special_tokens, self._where = dict(special_tokens), where

    def render(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        """The prompt of a conversation, up to where the assistant speaks. `options` are further template variables
        (tools, enable_thinking, ...). Entries of a message that are None count as absent, as in transformers.

        PromptError if the template refuses the conversation, ModelError if it does what no template may.
        """
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            talk = [{key: value for key, value in message.items() if value is not None} for message in messages]
            return self._template.render({**defaults, **self._special_tokens, **options, "messages": talk})
        except SecurityError as error:
            raise ModelError(
                f"The chat template in {self._where} tries what no template may: {error} Do not trust this model's"
                " files; take them from their original source, or use a prompt without a template (--raw)."
            ) from error
        except Exception as error:  # a template is a program: it can fail in every way
            raise PromptError(
                f"The model's chat template refuses this conversation: {str(error) or type(error).__name__}. Templates"
                " commonly want roles in turn, user first, each message with a text."
            ) from error


def find_template(folder: Path, settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """(source, file it came from): chat_template.jinja, chat_template.json or tokenizer_config.json (`settings`);
    None without one. Of several named ones, "default". ModelError for broken JSON."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except ValueError as error:
            raise ModelError(f"{path} is not UTF-8: {error}. Download the file again.") from error
    path = folder / "chat_template.json"
    if path.is_file():
        settings = read_json(path)
    else:
        path = folder / "tokenizer_config.json"
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    return (found, str(path)) if isinstance(found, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} if there is no file or no object. ModelError for broken JSON."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}. Download the file again.") from error
    return values if isinstance(values, dict) else {}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_dict(*pairs: Any, **named: Any) -> dict[str, Any]:
    return dict(*pairs) | named


def _refuse(message: str) -> Callable[[], None]:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
