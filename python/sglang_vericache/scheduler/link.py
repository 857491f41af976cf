"""The way from host to device memory: how fast it is, and how much of its time is taken."""

from __future__ import annotations

from dataclasses import dataclass

# Weight of the latest round in the mean number of iterations that one takes.
ROUND_RATE = 0.1


@dataclass(frozen=True)
class Link:
    """The way from the host to the device.

    Attributes:
        token_seconds: time to copy the KV of one token; 0 before it was measured.
        room: device slots that copies may take.
    """

    token_seconds: float
    room: int


class LinkLoad:
    """Whether the link has time for the full KV of one more request.

    It brings every offloaded request's full KV once a round, so copies take

        busy = token_seconds * sum(tokens) / (iterations of a round * seconds of an iteration)

    of its time. Beyond 1 they wait for each other: a further offloaded request would slow the
    others down by as much as it gains, and what it took from a resident one would be lost (the two
    sides of T_iter = max(T_gpu, T_link) in VeriCache, arXiv 2605.17613).
    """

    def __init__(self) -> None:
        self._iterations = 0.0

    def settle(self, drafted: int) -> None:
        """Learn from an offloaded request's round of ``drafted`` > 0 drafts."""
        if self._iterations == 0.0:
            self._iterations = drafted + 1.0
        self._iterations += ROUND_RATE * (drafted + 1 - self._iterations)

    def busy(self, link: Link, tokens: float, seconds: float) -> float:
        """Share of the link's time that copies take.

        Args:
            tokens: full KV that it brings once a round, of all offloaded requests.
            seconds: of an iteration.
        """
        if tokens <= 0 or seconds <= 0 or self._iterations == 0:
            return 0.0
        return link.token_seconds * tokens / (self._iterations * seconds)

    def carries(self, link: Link, tokens: float, more: float, seconds: float) -> bool:
        """Whether ``more`` tokens a round fit in beside ``tokens``.

        The first request always may: without one nothing is measured.
        """
        if tokens <= 0:
            return True
        measured = link.token_seconds > 0 and self._iterations > 0
        return measured and self.busy(link, tokens + more, seconds) <= 1.0
