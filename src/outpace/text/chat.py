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
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(
                f"The chat template in {where} does not compile: {error}. Use a prompt without a template (--raw), or"
                " mend the file."
            ) from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        """The prompt of a conversation, up to where the assistant speaks. `options` are further template variables
        (tools, enable_thinking, ...). PromptError if the template refuses the conversation."""
        values = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens, **options}
        try:
            return self._template.render(messages=messages, **values)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise PromptError(
                f"The model's chat template refuses this conversation: {error}. Templates commonly want roles in turn,"
                " user first, each message with a text."
            ) from error


def find_template(folder: Path, settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """(source, file it came from): chat_template.jinja, chat_template.json or tokenizer_config.json; None without
    one. Of several named ones, "default"."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8"), str(path)
    path = folder / "chat_template.json"
    if path.is_file():
        settings = json.loads(path.read_text(encoding="utf-8"))
    else:
        path = folder / "tokenizer_config.json"
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    return (found, str(path)) if isinstance(found, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> Callable[[], None]:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
