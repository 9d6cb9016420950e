"""From configuration to a running engine: resolve, load, check that draft and target belong together, wire."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from outpace.cache.base import KVStore
from outpace.config import EngineConfig, SpecConfig
from outpace.drafters.base import Drafter, Needs
from outpace.drafters.draft_model import DraftModel
from outpace.drafters.forced import Forced
from outpace.drafters.lookup import Lookup
from outpace.engine.costs import known_costs
from outpace.engine.local import Limits, LocalEngine
from outpace.engine.policy import AdaptiveDepth, AdaptiveSettings, FixedDepth, Policy
from outpace.engine.step import Machine
from outpace.errors import CapacityError, ConfigError, Unsupported
from outpace.models.base import LanguageModel
from outpace.models.loading import Placement, physical_cores
from outpace.sampling.constrained import GrammarMask
from outpace.sampling.grammar import Grammars, Vocabulary
from outpace.sampling.pipeline import LogitsPipeline
from outpace.text.codec import TokenizerCodec
from outpace.text.frequency import count_tokens, frequent_ids
from outpace.text.vocab_map import compare_vocabularies
from outpace.verify import choose_rule
from outpace.weights.load import load_decoder
from outpace.weights.local import Progress, silent
from outpace.weights.resolve import resolve

ChooseOutputs = Callable[[TokenizerCodec], Tensor]

# Ended texts whose keys and values are kept for texts that begin alike.
KEPT_TEXTS = 32
# Rows at which passes are measured for adaptive K: what checks a draft, and one token each for several sequences.
VERIFY_ROWS = (*range(1, 10), 12, 17, 32)
DRAFT_ROWS = (1, 2, 4, 8, 16)


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
    adaptive: bool
    load_seconds: float

    @property
    def shown_k(self) -> str:
        """K for people."""
        return f"auto (at most {self.k})" if self.adaptive else str(self.k)


@dataclass(frozen=True)
class _Loaded:
    folder: Path
    model: LanguageModel
    codec: TokenizerCodec
    grammars: Grammars  # of the codec's vocabulary; costs nothing until the first constraint

    @property
    def row_bytes(self) -> int:
        """KV bytes per token."""
        return self.model.spec.kv_bytes_per_token(self.model.dtype.itemsize)


@dataclass(frozen=True)
class _Room:
    """What each KV store may hold: rows, None without a bound, and ended texts among them."""

    rows: int | None
    kept: int

    def bytes(self, loaded: _Loaded) -> int | None:
        return None if self.rows is None else self.rows * loaded.row_bytes

    def store(self, loaded: _Loaded) -> KVStore:
        return loaded.model.new_store(self.bytes(loaded), self.kept)


class LoadedEngine:
    """A running engine and what belongs to it. Close it, or use it as a context manager."""

    def __init__(
        self, target: _Loaded, room: _Room, client: LocalEngine, limits: Limits, description: EngineDescription
    ) -> None:
        self._target, self._room, self._limits = target, room, limits
        self.description = description
        self.client = client
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
        machine = _machine(self._target, GrammarMask(self._target.grammars), None, "auto", self._room)
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
    target = _load(config.model, config.dtype, _place(config, "none"), None, progress)
    # Small torch operations between passes must not wake a second pool: its threads would spin beside ours.
    threads = config.threads or physical_cores()
    torch.set_num_threads(1 if target.model.bit_invariant else threads)
    context = _context(config, target)
    draft, reason = _draft_model(config, spec, target, progress)
    rows = _kv_rows(config, [target, draft] if draft else [target])
    room = _Room(rows, KEPT_TEXTS if config.prefix_cache else 0)
    grammar = GrammarMask(target.grammars)
    drafter = _drafter(spec, target, draft, grammar, room)
    limits = Limits(context, config.max_num_seqs, config.max_batched_tokens, rows)
    machine = _machine(target, grammar, drafter, spec.rule, room)
    policy = _policy(spec, target, draft, threads, progress or silent)
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
        adaptive=spec.adaptive,
        load_seconds=time.perf_counter() - start,
    )
    client = LocalEngine(machine, target.codec, limits, policy)
    return LoadedEngine(target, room, client, limits, description)


def _place(config: EngineConfig, quantization: str) -> Placement:
    return Placement(config.device, config.threads, config.kernels, quantization)


def _load(ref: str, dtype: str, place: Placement, choose: ChooseOutputs | None, progress: Progress | None) -> _Loaded:
    folder = resolve(ref, dtype, progress)
    codec = TokenizerCodec.from_folder(folder)
    model = load_decoder(folder, dtype, place, None if choose is None else choose(codec))
    return _Loaded(folder, model, codec, Grammars(_vocabulary(codec)))


def _vocabulary(codec: TokenizerCodec) -> Vocabulary:
    size = codec.vocab_size
    ends = frozenset(i for i in codec.eos_ids if i < size)
    return Vocabulary(size, codec.token_bytes, codec.special_ids, ends, codec.encode_continuation)


def _machine(target: _Loaded, grammar: GrammarMask, drafter: Drafter | None, rule: str, room: _Room) -> Machine:
    needs = drafter.needs if drafter is not None else Needs()
    wanted = rule if drafter is not None else "auto"
    chosen = choose_rule(wanted, proposes_law=needs.proposes_law, tree=needs.tree)
    codec = target.codec
    pipeline = LogitsPipeline(target.model.spec.vocab_size, codec.eos_ids, codec.vocab_size, grammar=grammar)
    return Machine(target.model, room.store(target), pipeline, drafter, chosen)


def _draft_model(
    config: EngineConfig, spec: SpecConfig, target: _Loaded, progress: Progress | None
) -> tuple[_Loaded | None, str]:
    """The draft model, if one is wanted, and what drafts or why nothing does."""
    if spec.draft == "off":
        return None, "no draft was asked for (--draft)"
    if spec.k == 0:
        return None, "K is 0"
    if spec.draft == "lookup":
        _check_lookup(config)
        return None, "suffix lookup in the request's own text"
    quantization = config.draft_quantization
    if quantization == "auto":  # half the time of int8, for one or two tokens in a hundred fewer accepted
        quantization = "int4" if target.model.bit_invariant and config.draft_dtype == "auto" else "none"
    choose = None if config.draft_vocab is None else partial(_frequent, config.draft_vocab, config.draft_vocab_corpus)
    draft = _load(spec.draft, config.draft_dtype, _place(config, quantization), choose, progress)
    verdict = compare_vocabularies(target.codec, draft.codec)
    if not verdict.same:
        raise Unsupported(
            f"{spec.draft} cannot draft for {config.model}: they speak different tokenizers. {verdict.text}"
            " Use a draft of the same family, or --draft lookup, which needs no model."
        )
    some = "" if config.draft_vocab is None else f", {config.draft_vocab} of {draft.codec.vocab_size} tokens"
    return draft, f"draft model with the target's tokenizer, on {draft.model.kernels_name}{some}"


def _frequent(count: int, corpus: str | None, codec: TokenizerCodec) -> Tensor:
    counts = None if corpus is None else count_tokens(codec, Path(corpus))
    return torch.from_numpy(frequent_ids(codec, count, counts))


def _check_lookup(config: EngineConfig) -> None:
    if config.draft_vocab is not None:
        raise Unsupported(
            "draft_vocab cuts down the output projection of a draft model, and --draft lookup has none. Leave"
            " --draft-vocab out, or name a draft model."
        )


def _drafter(
    spec: SpecConfig, target: _Loaded, draft: _Loaded | None, grammar: GrammarMask, room: _Room
) -> Drafter | None:
    if spec.k == 0:
        return None
    if draft is None:
        return Forced(Lookup(), grammar)
    # Ids that the target lacks are masked; eos is the target's, for min_tokens.
    known = min(draft.codec.vocab_size, target.codec.vocab_size)
    pipeline = LogitsPipeline(draft.model.spec.vocab_size, target.codec.eos_ids, known, grammar=grammar)
    drafter = DraftModel(draft.model, pipeline, target.model.spec.vocab_size, room.bytes(draft), room.kept)
    return Forced(drafter, grammar)


def _policy(spec: SpecConfig, target: _Loaded, draft: _Loaded | None, threads: int, progress: Progress) -> Policy:
    if not spec.adaptive:
        return FixedDepth(spec.k)
    verify = known_costs(target.model, target.folder, threads, VERIFY_ROWS, progress)
    drafting = None if draft is None else known_costs(draft.model, draft.folder, threads, DRAFT_ROWS, progress)
    return AdaptiveDepth(verify, drafting, AdaptiveSettings(spec.k))


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
        budget = None if free is None else int(free * config.memory_utilisation)
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
