"""Do two tokenizers speak the same ids? Compared by the bytes of every token, never by sizes or names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outpace.text.codec import Codec


@dataclass(frozen=True)
class VocabVerdict:
    """Result of `compare_vocabularies`.

    same      ids can pass between the two models as they are
    differing ordinary ids that stand for other bytes, or that only one side has
    sizes     ids of both sides, padding of the models' output layers not counted
    text      one sentence for people
    """

    same: bool
    differing: int
    sizes: tuple[int, int]
    text: str

    def __str__(self) -> str:
        return self.text


def compare_vocabularies(target: Codec, draft: Codec) -> VocabVerdict:
    """Every id must stand for the same bytes on both sides. Special tokens may differ (they carry no text, and the
    target checks whatever is proposed); an ordinary token may not."""
    sizes = (target.vocab_size, draft.vocab_size)
    special = target.special_ids | draft.special_ids
    differing = list(_differing(target, draft, special))
    renamed = [i for i in special if target.token_bytes(i) != draft.token_bytes(i)]
    if not differing:
        text = f"The tokenizers agree on all {max(sizes) - len(renamed)} tokens."
        if renamed:
            text += f" {len(renamed)} special tokens differ, which does no harm."
        return VocabVerdict(True, 0, sizes, text)
    first = differing[0]
    shown = [codec.token_text(first) if codec.token_bytes(first) else "nothing" for codec in (target, draft)]
    text = (
        f"{len(differing)} of {max(sizes)} ids differ; the first is {first}, which is {shown[0]!r} for the target and"
        f" {shown[1]!r} for the draft."
    )
    return VocabVerdict(False, len(differing), sizes, text)


def _differing(target: Codec, draft: Codec, special: frozenset[int]) -> Iterator[int]:
    for i in range(max(target.vocab_size, draft.vocab_size)):
        if i not in special and target.token_bytes(i) != draft.token_bytes(i):
            yield i
