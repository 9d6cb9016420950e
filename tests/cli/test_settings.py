"""Flag > environment > file > default, and other tools' spellings."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from outpace.cli.settings import SETTINGS, gather, read_environment, read_file
from outpace.config import EngineConfig, SpecConfig
from outpace.errors import ConfigError
from outpace.types import SamplingParams


def test_every_field_has_a_setting_and_every_setting_a_field() -> None:
    fields = [*EngineConfig.__dataclass_fields__, *SpecConfig.__dataclass_fields__]
    fields += SamplingParams.__dataclass_fields__
    assert sorted(fields) == sorted(setting.name for setting in SETTINGS)


def test_the_strongest_source_wins(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('draft = "from-file"\nnum_speculative_tokens = 2\nseed = 1\nstop = ["a", "b"]')
    environment = {"OUTPACE_DRAFT": "from-environment", "OUTPACE_SEED": "2", "OUTPACE_TOP_K": "", "PATH": "x"}
    args = Namespace(config=str(file), seed=3)
    assert gather(args, environment, {"draft": "default", "temperature": 0.5}) == {
        "seed": 3,
        "draft": "from-environment",
        "num_speculative_tokens": 2,
        "stop": ("a", "b"),
        "temperature": 0.5,
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [("drafts = 'x'", "Did you mean 'draft'?"), ("draft = ", "not valid TOML"), ("logit_bias = 3", "logit_bias")],
)
def test_bad_file(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        read_file(file)


def test_logit_bias_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[logit_bias]\n7 = -2.5")
    assert read_file(file) == {"logit_bias": {7: -2.5}}
    assert read_environment({"OUTPACE_LOGIT_BIAS": "7=-2.5"}) == {"logit_bias": {7: -2.5}}
    assert gather(Namespace(logit_bias=[(7, 1.0), (8, 2.0)]), {}, {}) == {"logit_bias": {7: 1.0, 8: 2.0}}


@pytest.mark.parametrize("name", ["TEMPERATURE", "SEED", "IGNORE_EOS", "LOGIT_BIAS", "KV_CACHE_BYTES"])
def test_unreadable_environment_variable(name: str) -> None:
    with pytest.raises(ConfigError, match=f"OUTPACE_{name}"):
        read_environment({f"OUTPACE_{name}": "lots"})


def test_spellings_of_vllm(outpace: Callable, fake) -> None:
    words = "generate --model m -p x --speculative-model d --num-speculative-tokens 5 --max-model-len 99 --seed 1"
    assert outpace(*words.split(), "--dtype", "float32").code == 0
    assert fake.configs == (
        EngineConfig("m", dtype="float32", max_model_len=99),
        SpecConfig("d", num_speculative_tokens=5),
    )
    assert fake.requests[0].params.seed == 1


@pytest.mark.parametrize(
    ("given", "spec"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 3}', SpecConfig("lookup", 3)),
        ('{"model": "d"}', SpecConfig("d")),
        ('{"method": "draft_model", "model": "d", "num_speculative_tokens": 0}', SpecConfig("d", 0)),
    ],
)
def test_speculative_config_of_vllm(given: str, spec: SpecConfig, outpace: Callable, fake) -> None:
    assert outpace("generate", "m", "-p", "x", "--speculative-config", given).code == 0
    assert fake.configs[1] == spec


def test_options_and_model_in_any_order(outpace: Callable, fake) -> None:
    assert outpace("generate", "-p", "x", "--kv-cache-bytes", "2G", "m", "-k", "2").code == 0
    assert fake.configs == (EngineConfig("m", kv_cache_bytes=2**31), SpecConfig(num_speculative_tokens=2))
