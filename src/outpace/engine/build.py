"""From configuration to a running engine: resolve, load, check that draft and target belong together, wire."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outpace.cache.base import KVStore
from outpace.config import EngineConfig, SpecConfig
from outpace.drafters.base import Drafter, Needs
from outpace.drafters.draft_model import DraftModel
from outpace.drafters.forced import Forced
from outpace.drafters.lookup import Lookup
from outpace.engine.local import Limits, LocalEngine
from outpace.engine.policy import FixedDepth
from outpace.engine.step import Machine
from outpace.errors import CapacityError, ConfigError, Unsupported
from outpace.models.base import LanguageModel
from outpace.models.loading import Placement, physical_cores
from outpace.sampling.constrained import GrammarMask
from outpace.sampling.grammar import Grammars, Vocabulary
from outpace.sampling.pipeline import LogitsPipeline
from outpace.text.codec import TokenizerCodec
from outpace.text.vocab_map import compare_vocabularies
from outpace.verify import choose_rule
from outpace.weights.load import load_decoder

Progress = Callable[[str, int, int], None]

# Share of the memory still free after loading that the KV store may grow into, if nobody says otherwise.
KV_SHARE = 0.8


@dataclass(frozen=True)
class EngineDescription:
    """What was built, for banners and reports. Bytes and seconds. drafter is "off", "lookup" or a model reference;
    draft_reason says why it is off, or what it is. bit_invariant: plain and speculative logits have the same bits."""

    model: str
    dtype: str
    device: str
    threads: int
    kernels: str
    bit_invariant: bool
    context: int
    weight_bytes: int
    kv_bytes_per_token: int
    drafter: str
    draft_reason: str
    draft_weight_bytes: int
    k: int
    load_seconds: float


@dataclass(frozen=True)
class _Loaded:
    model: LanguageModel
    codec: TokenizerCodec
    grammars: Grammars  # of the codec's vocabulary; costs nothing until the first constraint

    @property
    def row_bytes(self) -> int:
        """KV bytes per token."""
        return self.model.spec.kv_bytes_per_token(self.model.dtype.itemsize)


class LoadedEngine:
    """A running engine and what belongs to it. Close it, or use it as a context manager."""

    def __init__(self, target: _Loaded, machine: Machine, limits: Limits, description: EngineDescription) -> None:
        self._target, self._limits = target, limits
        self.description = description
        self.client = LocalEngine(machine, target.codec, limits, FixedDepth(description.k))
        self._engines = [self.client]

    @property
    def codec(self) -> TokenizerCodec:
        """The target's tokenizer."""
        return self._target.codec

    @property
    def model(self) -> LanguageModel:
        """The target."""
        return self._target.model

    def plain(self) -> LocalEngine:
        """A second engine on the same weights, without a drafter and with a KV store of its own."""
        machine = _machine(self._target, GrammarMask(self._target.grammars), None, "auto", self._limits.kv_rows)
        engine = LocalEngine(machine, self._target.codec, self._limits, FixedDepth(0))
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        """Stop every engine opened here."""
        for engine in self._engines:
            engine.shutdown()

    def __enter__(self) -> LoadedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_engine(config: EngineConfig, spec: SpecConfig, progress: Progress | None = None) -> LoadedEngine:
    """Load target and drafter and start the engine thread.

    Raises ModelError, DownloadError or ConfigError for what cannot be loaded, Unsupported if the draft model speaks
    another tokenizer, CapacityError if the KV store could not hold a single sequence.
    """
    start = time.perf_counter()
    target = _load(config, config.model, config.dtype, "none", progress)
    # Small torch operations between passes must not wake a second pool: its threads would spin beside ours.
    threads = config.threads or physical_cores()
    torch.set_num_threads(1 if target.model.bit_invariant else threads)
    context = _context(config, target)
    draft, reason = _draft_model(config, spec, target, progress)
    rows = _kv_rows(config, [target, draft] if draft else [target])
    grammar = GrammarMask(target.grammars)
    drafter = _drafter(spec, target, draft, grammar, rows)
    limits = Limits(context, config.max_num_seqs, config.max_batched_tokens, rows)
    machine = _machine(target, grammar, drafter, spec.rule, rows)
    description = EngineDescription(
        model=config.model,
        dtype="native" if config.dtype == "native" else str(target.model.dtype).removeprefix("torch."),
        device=str(target.model.device),
        threads=threads,
        kernels=target.model.kernels_name,
        bit_invariant=target.model.bit_invariant,
        context=context,
        weight_bytes=target.model.weight_bytes(),
        kv_bytes_per_token=target.row_bytes,
        drafter=spec.draft if spec.k else "off",
        draft_reason=reason,
        draft_weight_bytes=draft.model.weight_bytes() if draft else 0,
        k=spec.k,
        load_seconds=time.perf_counter() - start,
    )
    return LoadedEngine(target, machine, limits, description)


def _load(config: EngineConfig, ref: str, dtype: str, quantization: str, progress: Progress | None) -> _Loaded:
    place = Placement(config.device, config.threads, config.kernels, quantization)
    folder, model = load_decoder(ref, dtype, place, progress)
    codec = TokenizerCodec.from_folder(folder)
    return _Loaded(model, codec, Grammars(_vocabulary(codec)))


def _vocabulary(codec: TokenizerCodec) -> Vocabulary:
    size = codec.vocab_size
    ends = frozenset(i for i in codec.eos_ids if i < size)
    return Vocabulary(size, codec.token_bytes, codec.special_ids, ends, codec.encode_continuation)


def _machine(target: _Loaded, grammar: GrammarMask, drafter: Drafter | None, rule: str, rows: int | None) -> Machine:
    needs = drafter.needs if drafter is not None else Needs()
    wanted = rule if drafter is not None else "auto"
    chosen = choose_rule(wanted, proposes_law=needs.proposes_law, tree=needs.tree)
    codec = target.codec
    pipeline = LogitsPipeline(target.model.spec.vocab_size, codec.eos_ids, codec.vocab_size, grammar=grammar)
    return Machine(target.model, _store(target, rows), pipeline, drafter, chosen)


def _store(loaded: _Loaded, rows: int | None) -> KVStore:
    return loaded.model.new_store(None if rows is None else rows * loaded.row_bytes)


def _draft_model(
    config: EngineConfig, spec: SpecConfig, target: _Loaded, progress: Progress | None
) -> tuple[_Loaded | None, str]:
    """The draft model, if one is wanted, and what drafts or why nothing does."""
    if spec.draft == "off":
        return None, "no draft was asked for (--draft)"
    if spec.k == 0:
        return None, "K is 0"
    if spec.draft == "lookup":
        return None, "suffix lookup in the request's own text"
    quantization = config.draft_quantization
    if quantization == "auto":  # int8 reads half the bytes of bfloat16 and agrees with the target as often
        quantization = "int8" if target.model.bit_invariant and config.draft_dtype == "auto" else "none"
    draft = _load(config, spec.draft, config.draft_dtype, quantization, progress)
    verdict = compare_vocabularies(target.codec, draft.codec)
    if not verdict.same:
        raise Unsupported(
            f"{spec.draft} cannot draft for {config.model}: they speak different tokenizers. {verdict.text}"
            " Use a draft of the same family, or --draft lookup, which needs no model."
        )
    return draft, f"draft model with the target's tokenizer, on {draft.model.kernels_name}"


def _drafter(
    spec: SpecConfig, target: _Loaded, draft: _Loaded | None, grammar: GrammarMask, rows: int | None
) -> Drafter | None:
    if spec.k == 0:
        return None
    if draft is None:
        return Forced(Lookup(), grammar)
    # Ids that the target lacks are masked; eos is the target's, for min_tokens.
    known = min(draft.codec.vocab_size, target.codec.vocab_size)
    pipeline = LogitsPipeline(draft.model.spec.vocab_size, target.codec.eos_ids, known, grammar=grammar)
    budget = None if rows is None else rows * draft.row_bytes
    return Forced(DraftModel(draft.model, pipeline, target.model.spec.vocab_size, budget), grammar)


def _context(config: EngineConfig, target: _Loaded) -> int:
    longest = target.model.spec.max_context
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds what {config.model} was trained for ({longest} tokens)."
            " Lower it, or leave it out to use the model's own context."
        )
    return config.max_model_len


def _kv_rows(config: EngineConfig, models: list[_Loaded]) -> int | None:
    """Tokens whose keys and values fit, in all models together; None if the system does not say what is free."""
    budget = config.kv_cache_bytes
    if budget is None:
        free = _free_memory(models[0].model.device)
        budget = None if free is None else int(free * KV_SHARE)
    if budget is None:
        return None
    row = sum(loaded.row_bytes for loaded in models)
    if budget < row * 2:
        raise CapacityError(
            f"The KV store may use {budget} bytes, but a single token of {config.model} needs {row}, its draft model"
            " included. Raise --kv-cache-bytes, or free memory."
        )
    return budget // row


def _free_memory(device: torch.device) -> int | None:
    """Bytes free on the device, None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None
