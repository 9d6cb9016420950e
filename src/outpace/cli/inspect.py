"""`outpace inspect MODEL [DRAFT]`: what a model needs, and whether a draft model speaks its language."""

from __future__ import annotations

import argparse
import dataclasses
import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outpace.cli.arguments import Parser
from outpace.cli.console import Console
from outpace.cli.session import read_plan

if TYPE_CHECKING:
    from outpace.models.spec import DecoderSpec
    from outpace.text.vocab_map import VocabVerdict

_BYTES = {"auto": 2, "bfloat16": 2, "float32": 4, "native": 2}


def configure(parser: Parser) -> None:
    """The options of this command."""
    parser.add_settings("dtype", "draft_dtype", "max_model_len")
    parser.add_argument("draft", nargs="?", default=argparse.SUPPRESS, metavar="DRAFT", help="a draft model for it")
    parser.add_json()


def run(args: Namespace, console: Console) -> int:
    """Report sizes, memory and the compatibility verdict. Returns the exit code."""
    plan = read_plan(args, {})
    engine, draft = plan.engine, plan.spec.draft
    folder, spec = _load(engine.model, engine.dtype, console)
    report: dict[str, Any] = {"model": facts(engine.model, spec, engine.dtype, engine.max_model_len)}
    if draft not in ("off", "lookup"):
        draft_folder, draft_spec = _load(draft, engine.draft_dtype, console)
        report["draft"] = facts(draft, draft_spec, engine.draft_dtype, engine.max_model_len)
        verdict = _compare(folder, draft_folder)
        report["verdict"] = dataclasses.asdict(verdict)
        report["weight_ratio"] = report["draft"]["weight_bytes"] / report["model"]["weight_bytes"]
    if args.json:
        console.data(json.dumps(report, indent=2, default=list))
        return 0
    _show(report["model"], console)
    if "draft" in report:
        _show(report["draft"], console)
        console.data(f"a draft step reads {report['weight_ratio']:.0%} of the bytes of a target step")
        console.data(str(verdict))
    return 0


def facts(name: str, spec: DecoderSpec, dtype: str, context: int | None) -> dict[str, Any]:
    """Sizes of one model. Memory is weights plus keys and values of one full context, in bytes."""
    size = _BYTES[dtype]
    length = min(context or spec.max_context, spec.max_context)
    weights, per_token = spec.parameters() * size, spec.kv_bytes_per_token(size)
    return {
        "name": name,
        "family": spec.model_type,
        "dtype": "float32" if size == 4 else "bfloat16",
        "parameters": spec.parameters(),
        "layers": spec.layers,
        "hidden": spec.hidden,
        "vocabulary": spec.vocab_size,
        "context": length,
        "weight_bytes": weights,
        "kv_bytes_per_token": per_token,
        "memory_bytes": weights + per_token * length,
    }


def _load(ref: str, dtype: str, console: Console) -> tuple[Path, DecoderSpec]:
    from outpace.models.spec import DecoderSpec
    from outpace.weights.load import read_config
    from outpace.weights.resolve import resolve

    with console.progress() as progress:
        folder = resolve(ref, dtype, progress)
    return folder, DecoderSpec.from_hf(read_config(folder))


def _compare(target: Path, draft: Path) -> VocabVerdict:
    from outpace.text.codec import TokenizerCodec
    from outpace.text.vocab_map import compare_vocabularies

    return compare_vocabularies(TokenizerCodec.from_folder(target), TokenizerCodec.from_folder(draft))


def _show(model: dict[str, Any], console: Console) -> None:
    mib = 2**20
    console.data(
        f"{model['name']}: {model['family']}, {model['parameters'] / 1e6:.0f}M parameters, {model['layers']} layers of"
        f" {model['hidden']}, vocabulary {model['vocabulary']}, context {model['context']}"
    )
    console.data(
        f"  {model['dtype']} weights {model['weight_bytes'] / mib:.0f} MiB, keys and values"
        f" {model['kv_bytes_per_token'] / 1024:.0f} KiB per token, {model['memory_bytes'] / mib:.0f} MiB in all with"
        " one full context"
    )
