"""Chat templates: what transformers renders, inside a sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
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
    "tojson": "{% for tool in tools or [] %}{{ tool | tojson }}{{ tool | tojson(indent=2) }}{% endfor %}",
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


def test_a_separate_file_wins_and_named_templates_have_a_default(tiny_model: Path, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    codec = codec_with(tiny_model, tmp_path / "x", named)
    assert codec.decode(codec.encode_chat(TALK)) == "Be brief."
    (tmp_path / "x" / "chat_template.jinja").write_text("file: {{ messages[1].role }}", encoding="utf-8")
    codec = TokenizerCodec.from_folder(tmp_path / "x")
    assert codec.decode(codec.encode_chat(TALK)) == "file: user"


def test_options_reach_the_template() -> None:
    template = ChatTemplate("{{ 'think' if enable_thinking else 'quick' }}{{ add_generation_prompt }}", {}, "here")
    assert template.render(TALK, {"enable_thinking": True}) == "thinkTrue"
    assert template.render(TALK, {"add_generation_prompt": False}) == "quickFalse"


def test_the_date_is_today() -> None:
    import datetime

    shown = ChatTemplate("{{ strftime_now('%Y') }}", {}, "here").render(TALK, {})
    assert shown == str(datetime.datetime.now().year)


def test_a_refused_conversation_says_why() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {}, "here")
    with pytest.raises(PromptError, match="refuses this conversation: roles must alternate"):
        template.render(TALK, {})


@pytest.mark.parametrize(
    "hostile",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages | nosuchfilter }}",
    ],
)
def test_hostile_templates_get_nowhere(hostile: str) -> None:
    talk = [dict(message) for message in TALK]
    with pytest.raises((PromptError, ModelError)):
        ChatTemplate(hostile, {}, "here").render(talk, {})
    assert talk == TALK


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelError, match="chat template in here does not compile"):
        ChatTemplate("{% for %}", {}, "here")


def test_a_model_without_a_template_holds_no_conversation(base_model: Path) -> None:
    codec = TokenizerCodec.from_folder(base_model)
    assert not codec.has_chat_template
    with pytest.raises(Unsupported, match="no chat template"):
        codec.encode_chat(TALK)
