"""Chat templates: what transformers renders, inside a sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from outpace.errors import ModelError, PromptError, Unsupported
from outpace.text.chat import ChatTemplate
from outpace.text.codec import TokenizerCodec

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Grüße 你好 <b>&</b> "quoted"'},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And 2 + 2?"},
]
TOOLS = [{"type": "function", "function": {"name": "wetter", "description": 'für "heute" <jetzt>', "parameters": {}}}]
TEMPLATES = {
    "plain": "{% for m in messages %}[{{ m.role }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "blocks": "{%- for m in messages -%}\n    {%- if m.role == 'user' %}\n  {{ m.content | trim }}\n"
    "    {% endif %}\n{% endfor %}",
    "tojson": "{% for tool in tools or [] %}{{ tool | tojson }}{{ tool | tojson(indent=2) }}"
    "{{ tool | tojson(separators=(',', ':'), sort_keys=true) }}{{ tool | tojson(ensure_ascii=true) }}{% endfor %}",
    "continue": "{% for m in messages %}{% if m.role != 'user' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "date": "{{ strftime_now('%Y-%m-%d') }}",
    "unused refusal": "{% if not messages %}{{ raise_exception('empty') }}{% endif %}{{ dict(a=1, b='x') }}",
    "undefined": "{% if enable_thinking is defined %}think{% endif %}{{ pad_token }}{{ documents }}",
    "special": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}


def codec_with(folder: Path, to: Path, template: object) -> TokenizerCodec:
    to.mkdir()
    for path in folder.glob("*.json"):
        (to / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    settings = json.loads((to / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {"chat_template": template, "bos_token": "<|im_start|>"}
    (to / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return TokenizerCodec.from_folder(to)


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_transformers(name: str, tiny_model: Path, tmp_path: Path) -> None:
    codec = codec_with(tiny_model, tmp_path / "x", TEMPLATES[name])
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "x")
    expected = theirs.apply_chat_template(TALK, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert codec.encode_chat(TALK, {"tools": TOOLS}) == expected
    assert len(expected) > 0


def test_planted_plain_jinja_is_caught() -> None:
    """An environment that does not trim blocks, and json that escapes letters, give other text."""
    for source in (TEMPLATES["blocks"], "{{ tools | tojson }}"):
        plain = jinja2.Environment().from_string(source).render(messages=TALK, tools=TOOLS)
        assert ChatTemplate(source, {}, "here").render(TALK, {"tools": TOOLS}) != plain


def test_absent_entries_are_not_spelled_out() -> None:
    """A client that sends `content: null` beside tool calls does not make the model read "None"."""
    template = ChatTemplate("{% for m in messages %}<{{ m.content }}{{ m.role }}>{% endfor %}", {}, "here")
    assert template.render([{"role": "assistant", "content": None, "tool_calls": None}], {}) == "<assistant>"


def test_a_separate_file_wins_and_named_templates_have_a_default(tiny_model: Path, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    codec = codec_with(tiny_model, tmp_path / "x", named)
    assert codec.decode(codec.encode_chat(TALK)) == "Be brief."
    (tmp_path / "x" / "chat_template.jinja").write_text("file: {{ messages[1].role }}", encoding="utf-8")
    codec = TokenizerCodec.from_folder(tmp_path / "x")
    assert codec.decode(codec.encode_chat(TALK)) == "file: user"
    (tmp_path / "x" / "chat_template.jinja").unlink()
    (tmp_path / "x" / "chat_template.json").write_text(json.dumps({"chat_template": "json: {{ messages[3].role }}"}))
    codec = TokenizerCodec.from_folder(tmp_path / "x")
    assert codec.decode(codec.encode_chat(TALK)) == "json: user"


def test_named_templates_without_a_default_are_none(tiny_model: Path, tmp_path: Path) -> None:
    assert not codec_with(tiny_model, tmp_path / "x", [{"name": "rag", "template": "x"}]).has_chat_template


def test_bos_is_written_by_the_template_alone(tiny_model: Path, tmp_path: Path) -> None:
    """A tokenizer that adds bos by itself does so for plain text only: never twice in a conversation."""
    codec_with(tiny_model, tmp_path / "x", "{{ bos_token }}{{ messages[0].content }}")
    path = str(tmp_path / "x" / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.save(path)
    codec = TokenizerCodec.from_folder(tmp_path / "x")
    assert codec.encode("Be brief.") == codec.encode_chat(TALK)
    assert codec.encode_chat(TALK).count(1) == 1


def test_options_reach_the_template() -> None:
    template = ChatTemplate("{{ 'think' if enable_thinking else 'quick' }}{{ add_generation_prompt }}", {}, "here")
    assert template.render(TALK, {"enable_thinking": True}) == "thinkTrue"
    assert template.render(TALK, {"add_generation_prompt": False}) == "quickFalse"
    template = ChatTemplate("{{ bos_token }}{{ eos_token }}", {"bos_token": "<s>", "eos_token": "</s>"}, "here")
    assert template.render(TALK, {"bos_token": "!"}) == "!</s>"


def test_a_template_cannot_be_given_other_messages_by_an_option() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, "here")
    assert template.render(TALK, {"messages": []}) == "Be brief."


def test_a_refused_conversation_says_why() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, "here")
    with pytest.raises(PromptError, match="refuses this conversation: roles must alternate"):
        template.render(TALK, {})


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[0].name.first }}", "no attribute 'name'"),
        ("{{ messages | tojson(wrong=1) }}", "wrong"),
    ],
)
def test_a_template_that_fails_on_a_conversation_says_how(template: str, said: str) -> None:
    with pytest.raises(PromptError, match=f"refuses this conversation: .*{said}"):
        ChatTemplate(template, {}, "here").render(TALK, {})


def test_a_message_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(PromptError, match="refuses this conversation"):
        ChatTemplate("{{ messages }}", {}, "here").render(["hello"], {})  # type: ignore[list-item]


HOSTILE = {
    "classes": "{{ messages.__class__.__mro__ }}",
    "subclasses": "{{ ''.__class__.__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update(role='x') }}",
    "attr filter": "{{ (messages | attr('append'))(1) }}",
    "pop": "{{ messages[0].pop('role') }}",
    "tools": "{{ tools.clear() }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_named(name: str) -> None:
    talk, tools = [dict(message) for message in TALK], [dict(tool) for tool in TOOLS]
    with pytest.raises(ModelError, match="chat template in here tries what no template may"):
        ChatTemplate(HOSTILE[name], {}, "here").render(talk, {"tools": tools})
    assert talk == TALK and tools == TOOLS


@pytest.mark.parametrize(
    "hostile",
    ["{{ dict.update(tools[0], x=1) }}", "{{ dict.__subclasses__() }}", "{{ dict.fromkeys.__self__ }}"],
)
def test_the_dict_of_templates_is_not_the_class(hostile: str) -> None:
    tools = [dict(tool) for tool in TOOLS]
    with pytest.raises((ModelError, PromptError)):
        ChatTemplate(hostile, {}, "here").render(TALK, {"tools": tools})
    assert tools == TOOLS


def test_planted_plain_environment_lets_hostile_templates_through() -> None:
    """Without the sandbox these templates do reach what they want: the tests above can fail."""
    environment = jinja2.Environment()
    talk, tools = [dict(message) for message in TALK], [dict(tool) for tool in TOOLS]
    assert "class" in environment.from_string(HOSTILE["classes"]).render(messages=talk)
    environment.from_string(HOSTILE["append"]).render(messages=talk)
    assert talk != TALK
    # jinja2's sandbox by itself does not stop this one.
    environment = ImmutableSandboxedEnvironment()
    environment.from_string("{{ dict.update(tools[0], x=1) }}").render(tools=tools)
    assert tools != TOOLS


def test_an_unknown_filter_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match=r"does not compile: No filter named 'nosuchfilter'"):
        ChatTemplate("{{ messages | nosuchfilter }}", {}, "here")


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="chat template in here does not compile"):
        ChatTemplate("{% for %}", {}, "here")


def test_a_model_without_a_template_holds_no_conversation(base_model: Path) -> None:
    codec = TokenizerCodec.from_folder(base_model)
    assert not codec.has_chat_template
    with pytest.raises(Unsupported, match="no chat template"):
        codec.encode_chat(TALK)


def test_a_template_file_that_is_no_text_is_the_models_fault(tiny_model: Path, tmp_path: Path) -> None:
    for path in tiny_model.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{{ messages }}")
    with pytest.raises(ModelError, match="not UTF-8"):
        TokenizerCodec.from_folder(tmp_path)
