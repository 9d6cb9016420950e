"""Acceptance rules: which draft tokens to keep, and the law of the token after them. Pure functions on laws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.errors import ConfigError, Unsupported
from outpace.sampling.rng import Stream, uniforms
from outpace.types import Draft
from outpace.verify.block import BlockRule
from outpace.verify.rule import AcceptanceRule, draw
from outpace.verify.token import WalkRule

REGISTRY: dict[str, AcceptanceRule] = {
    rule.name: rule for rule in (WalkRule("token", trees=False), WalkRule("tree", trees=True), BlockRule())
}


def choose_rule(name: str, proposes_law: bool, tree: bool) -> AcceptanceRule:
    """The rule for unseeded sampling.

    name "auto": tree if drafts branch, block if they carry a q, else token. The coupled rule is no AcceptanceRule: it
    is `coupled.emit`, so "coupled" is an unknown name here. Unsupported if the rule cannot verify such drafts.
    """
    if name == "auto":
        name = "tree" if tree else "block" if proposes_law else "token"
    rule = REGISTRY.get(name)
    if rule is None:
        raise ConfigError(f"Unknown acceptance rule {name!r}. Known rules: auto, {', '.join(REGISTRY)}.")
    if tree and not rule.trees:
        raise Unsupported(
            f"The {name} rule verifies chains, but this drafter proposes trees, which it would cut wrongly."
            " Use rule 'auto' or 'tree', or a drafter that proposes chains."
        )
    if rule.needs_q and not proposes_law:
        raise Unsupported(
            f"The {name} rule needs the law its drafts were drawn from, but this drafter proposes tokens without one"
            " (lookup, arg max or re-encoded text). Use rule 'auto' or 'token', or a draft model."
        )
    return rule


def verify(
    rule: AcceptanceRule, p: Tensor, draft: Draft, keys: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """One verified step: p [S, N+1, V] -> (stop row [S] int64, extra token [S] int64).

    keys and positions [S] name the noise; positions[s] is the index of the token that row 0 decides.
    Emission = tokens on the path to the stop row, then the extra token.
    """
    u_stop, u_extra = uniforms(keys, positions, Stream.STOP), uniforms(keys, positions, Stream.EXTRA)
    stop = torch.empty(len(keys), dtype=torch.int64)
    token = torch.empty_like(stop)
    # One sequence at a time: at V = 152k whole-batch temporaries leave the cache (measured 3 times slower).
    for s in range(len(keys)):
        one = slice(s, s + 1)
        own = Draft(draft.tokens[one], draft.parent[one], None if draft.q is None else draft.q[one])
        at = draw(rule.stop_law(p[one], own), u_stop[one].to(p.device))
        stop[one] = at
        token[one] = draw(rule.residual(p[one], own, at), u_extra[one].to(p.device))
    return stop, token
