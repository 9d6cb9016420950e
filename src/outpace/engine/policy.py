"""How long a draft each sequence gets on this step."""

from __future__ import annotations

from outpace.types import Sequence


class FixedDepth:
    """Always K, less where the output ends sooner. The first token never waits for a draft, and the last one needs
    none."""

    def __init__(self, k: int) -> None:
        self.k = k

    def depth(self, sequence: Sequence) -> int:
        """Draft tokens wanted behind the frontier; 0 is a plain step."""
        if sequence.generated == 0:
            return 0
        return max(0, min(self.k, sequence.room - 1))
