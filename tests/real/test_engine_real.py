"""Real checkpoints: the speculative text is the plain text.

The default run is short. OUTPACE_TEST_FULL=1 runs all 20 prompts over 512 tokens, which takes hours on a laptop.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import gather
from outpace.config import EngineConfig, SpecConfig
from outpace.engine.build import LoadedEngine, open_engine
from outpace.engine.local import LocalEngine
from outpace.lab.judge import TeacherJudge
from outpace.types import Request, SamplingParams

pytestmark = [pytest.mark.real, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
FULL = os.environ.get("OUTPACE_TEST_FULL") == "1"
PROMPTS = (Path(__file__).parent / "prompts.txt").read_text(encoding="utf-8").splitlines()
USED = PROMPTS if FULL else [PROMPTS[0], PROMPTS[9], PROMPTS[16], PROMPTS[4]]
TOKENS = 512 if FULL else 48
KINDS = {
    "greedy": SamplingParams(temperature=0, max_tokens=TOKENS),
    "seeded": SamplingParams(temperature=0.8, top_p=0.9, seed=17, max_tokens=TOKENS),
}


def speculative(draft: str, k: int, dtype: str = "float32") -> LoadedEngine:
    """The draft model is the same checkpoint in bfloat16: it agrees often, and not always."""
    config = EngineConfig(MODEL, dtype=dtype, draft_dtype="bfloat16", max_model_len=2048)
    return open_engine(config, SpecConfig(draft, k))


def texts(engine: LocalEngine, loaded: LoadedEngine, params: SamplingParams, batch: int) -> list[tuple[int, ...]]:
    prompts = [tuple(loaded.codec.encode_chat([{"role": "user", "content": prompt}])) for prompt in USED]
    found = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        streams = [engine.generate(Request(f"{start + i}", ids, params)) for i, ids in enumerate(part)]
        answers = gather(streams)
        assert all(answer.stats.drafted > 0 for answer in answers) or engine is not loaded.client
        found += [answer.tokens for answer in answers]
    return found


@pytest.fixture(scope="module")
def plain() -> Iterator[dict[str, list[tuple[int, ...]]]]:
    with speculative("lookup", 1) as loaded:
        engine = loaded.plain()
        yield {kind: texts(engine, loaded, params, 1) for kind, params in KINDS.items()}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("draft", ["lookup", MODEL])
def test_float32_text_is_the_plain_text(
    draft: str, k: int, batch: int, plain: dict[str, list[tuple[int, ...]]]
) -> None:
    with speculative(draft, k) as loaded:
        for kind, params in KINDS.items():
            assert texts(loaded.client, loaded, params, batch) == plain[kind]


def test_bfloat16_differs_at_near_ties_at_most() -> None:
    params = KINDS["greedy"]
    with speculative("lookup", 4, "bfloat16") as loaded:
        judge = TeacherJudge(loaded.model, params)
        prompts = [tuple(loaded.codec.encode_chat([{"role": "user", "content": prompt}])) for prompt in USED]
        pairs = zip(texts(loaded.plain(), loaded, params, 1), texts(loaded.client, loaded, params, 1), strict=True)
        for prompt, (a, b) in zip(prompts, pairs, strict=True):
            verdict = judge(prompt, a, b) if a != b else None
            assert verdict is None or verdict.near_tie, verdict
