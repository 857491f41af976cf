"""The nouns of draft-and-verify decoding.

Small value classes that every layer may import. They know neither SGLang nor the kernels, and
torch only by name: importing this module loads nothing but the standard library.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Action(enum.Enum):
    """What a running request does in one scheduler iteration."""

    DRAFT = "draft"
    """One row against the draft view; commits nothing."""
    VERIFY = "verify"
    """``k + 1`` rows against the full KV; with no drafts this is plain decoding."""
    WAIT = "wait"
    """Its full KV cannot be read yet: one row whose result is dropped."""


@dataclass(frozen=True)
class DraftState:
    """What the planner is told about a running request at the start of an iteration.

    Attributes:
        rid: request id.
        context: keys a row over the full KV would attend to, in tokens.
        view: keys a drafting row would attend to: listed tokens (mean over layers) plus tail.
        drafted: tokens drafted since the last verify pass.
        limit: drafting more tokens than this in a round is useless or impossible (tokens left to
            generate minus one, free KV slots); 0 asks for plain decoding.
        margins: of the drafts, by how much (in logits) each was preferred to the runner-up; empty
            where nobody asks for them.
        load: tokens of its full KV that must be copied from the host to verify, as far as known.
        found: tokens proposed by lookup, which could be verified at once.
        match: tokens of the text that agree before that proposal.
    """

    rid: Hashable
    context: int
    view: float
    drafted: int
    limit: int
    margins: Sequence[float] = ()
    load: float = 0
    found: int = 0
    match: int = 0


@dataclass(frozen=True)
class Budget:
    """How many tokens a view keeps.

    Attributes:
        ratio: kept share of the context, in (0, 1].
        min_tokens: never keep fewer than this, nor more than there are.
    """

    ratio: float
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise ValueError(f"ratio must be in (0, 1], not {self.ratio}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be at least 0, not {self.min_tokens}")

    def tokens(self, length: int) -> int:
        """Tokens to keep of ``length``; at least 1 unless ``length`` is 0."""
        return min(length, max(self.min_tokens, math.ceil(self.ratio * length)))


@dataclass(frozen=True)
class DraftView:
    """The positions a drafting row may attend to in tokens ``0 .. length - 1`` of its request.

    Tokens from ``length`` on (everything since the compression) are not listed: the reader adds
    them all. Positions are those of the full context, so rotary embeddings need no correction.

    Attributes:
        layers: per layer int32 ``[Hs, n]``, each row strictly ascending; ``Hs`` is 1 when all KV
            heads share the list, else the number of KV heads. ``n`` may differ between layers.
        length: number of tokens the view was chosen from.
        counts: per layer, tokens of each of its ``Hs`` lists, the longest ``n``, where they differ:
            a shorter list repeats its last position up to ``n``, and whoever copies listed tokens
            copies those repetitions too. Empty: every list of every layer has ``n``.
    """

    layers: tuple[Tensor, ...]
    length: int
    counts: tuple[tuple[int, ...], ...] = ()

    @property
    def kept(self) -> tuple[int, ...]:
        """Number of tokens in the longest list of each layer."""
        return tuple(positions.shape[1] for positions in self.layers)

    @property
    def list_lengths(self) -> tuple[tuple[int, ...], ...]:
        """Per layer, tokens of each list."""
        return self.counts or tuple((p.shape[1],) * len(p) for p in self.layers)

    @property
    def mean_kept(self) -> float:
        """Listed tokens averaged over lists and layers: what a drafting row reads of the
        compressed part."""
        return sum(sum(lists) / len(lists) for lists in self.list_lengths) / max(
            len(self.layers), 1
        )

    @property
    def is_full(self) -> bool:
        """Whether nothing was dropped in any layer."""
        return all(n == self.length for lists in self.list_lengths for n in lists)

    def cpu(self) -> DraftView:
        """The same view in host memory."""
        return replace(self, layers=tuple(positions.cpu() for positions in self.layers))

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless every list is ascending, unique and in range."""
        assert len(self.list_lengths) == len(self.layers)
        for positions, counts in zip(self.layers, self.list_lengths, strict=True):
            assert positions.ndim == 2, positions.shape
            assert len(counts) == len(positions) and max(counts) == positions.shape[1], counts
            if positions.numel():
                assert int(positions.min()) >= 0 and int(positions.max()) < self.length
            for row, count in zip(positions, counts, strict=True):
                assert bool((row[1:count] > row[: count - 1]).all()) or count == 0
                assert count == 0 or bool((row[count:] == row[count - 1]).all())


@dataclass
class Counters:
    """What drafting and verifying did so far.

    ``drafted_at[m]`` and ``accepted_at[m]`` count the drafts at position ``m`` (0 is the first
    token of a draft) that were verified and that were accepted. ``kv_bytes_read`` counts attention
    reads of both kinds of row. ``offloads`` counts requests whose full KV was left to the host,
    ``stages`` their verify passes that nothing was copied ahead for, ``staged_tokens`` what those
    copied, ``copied_ahead`` what was copied for passes to come; ``waits`` the iterations in which a
    request that should verify found no room, and ``late`` those in which its copy was not there.
    ``host_reads`` counts tokens read in host memory by verify passes instead, and ``returns`` the
    offloaded requests that came back to stay on the device. ``provisional`` counts requests that
    drafted while their full KV was on its way from a store, and ``proposed`` those drafts.
    ``unpacked`` counts views that found no room in a packed pool. ``looked_up`` counts drafts that
    were found in the request's own text, ``looked_up_accepted`` those of them that were accepted;
    ``probed`` tokens found there that draft passes checked, ``probed_agreed`` those that became
    drafts.
    """

    drafted: int = 0
    accepted: int = 0
    verify_passes: int = 0
    plain_passes: int = 0
    kv_bytes_read: int = 0
    offloads: int = 0
    stages: int = 0
    staged_tokens: int = 0
    copied_ahead: int = 0
    waits: int = 0
    late: int = 0
    host_reads: int = 0
    returns: int = 0
    provisional: int = 0
    proposed: int = 0
    unpacked: int = 0
    looked_up: int = 0
    looked_up_accepted: int = 0
    probed: int = 0
    probed_agreed: int = 0
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)

    def record_verify(self, drafted: int, accepted: int) -> None:
        """Count one pass over the full KV; one without drafts counts as plain."""
        assert 0 <= accepted <= drafted, (accepted, drafted)
        if drafted:
            self.verify_passes += 1
        else:
            self.plain_passes += 1
        self.drafted += drafted
        self.accepted += accepted
        self.drafted_at.update(range(drafted))
        self.accepted_at.update(range(accepted))

    @property
    def acceptance(self) -> float:
        """Share of verified drafts that were accepted; 0 before the first one."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def acceptance_by_position(self) -> list[float]:
        """Share accepted at each draft position, first token of a draft first."""
        return [self.accepted_at[m] / self.drafted_at[m] for m in sorted(self.drafted_at)]
