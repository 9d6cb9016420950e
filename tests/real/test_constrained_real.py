"""A real model under a JSON schema: valid, and the same with every drafter."""

from __future__ import annotations

import json

import pytest

from fakes import gather
from outpace.config import EngineConfig, SpecConfig
from outpace.engine.build import open_engine
from outpace.types import Constraint, FinishReason, Request, SamplingParams

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.real, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "country": {"enum": ["France", "Italy", "Spain"]},
        "population": {"type": "integer"},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
}
KINDS = ({"temperature": 0}, {"temperature": 0.8, "seed": 4})


@pytest.mark.parametrize("draft", ["lookup", MODEL])
def test_json_is_valid_and_equal_with_and_without_speculation(draft: str) -> None:
    constraint = Constraint.of({"json": SCHEMA})
    config = EngineConfig(MODEL, dtype="float32", draft_dtype="bfloat16", max_model_len=1024)
    with open_engine(config, SpecConfig(draft, 4)) as loaded:
        prompt = tuple(loaded.codec.encode_chat([{"role": "user", "content": "Describe Rome as JSON."}]))
        for kind in KINDS:
            params = SamplingParams(max_tokens=100, constraint=constraint, **kind)  # type: ignore[arg-type]
            pair = [gather([e.generate(Request("1", prompt, params))])[0] for e in (loaded.plain(), loaded.client)]
            assert pair[0].tokens == pair[1].tokens
            assert pair[0].finish_reason is FinishReason.STOP
            answer = json.loads(pair[0].text)
            assert set(answer) == set(SCHEMA["required"]) and isinstance(answer["population"], int)
            assert pair[1].stats.steps < pair[0].stats.steps
