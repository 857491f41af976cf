"""Grammar masks along a drafted chain.

Row d of a request is masked by the grammar after the committed output and ``drafts[:d]``. The walk
stops at the first draft the grammar forbids or at the draft that ends it; rows behind that point
get no mask and are never committed. The grammar is left where it was found.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject, GrammarMask

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_vericache.sampling.settle import RowLayout


def mask_rows(logits: torch.Tensor, layout: RowLayout, reqs: list[Req]) -> list[int]:
    """Mask in place the rows of ``logits`` ``[rows, vocab]`` that a grammar constrains.

    Returns:
        Per request, how many rows may be committed as far as its grammar is concerned.

    Precondition: each ``req.grammar`` has accepted exactly ``req.output_ids``.
    """
    limits = [stop - start for start, stop in layout.spans]
    mask: GrammarMask | None = None
    for at, (req, (start, _), drafts) in enumerate(
        zip(reqs, layout.spans, layout.drafts, strict=True)
    ):
        grammar = req.grammar
        if grammar is None or grammar.finished or grammar.is_terminated():
            continue
        if mask is None:
            rows, vocab_size = logits.shape
            vocab_mask = grammar.allocate_vocab_mask(vocab_size, rows, logits.device)
            mask = GrammarMask(grammar, vocab_mask)
        with _lookahead(grammar) as walker:
            if layout.verifying[at]:
                limits[at] = _mask_chain(walker, drafts, mask.vocab_mask, start)
            else:
                _mask_after(walker, drafts, mask.vocab_mask, start, vocab_size)
    if mask is not None:
        moved = mask.grammar.move_vocab_mask(mask.vocab_mask, logits.device)
        GrammarMask(mask.grammar, moved).apply(logits)
    return limits


def _mask_chain(walker: _Walker, drafts: list[int], vocab_mask: torch.Tensor, start: int) -> int:
    """Fill rows ``start`` .. ``start + len(drafts)``; return how many were reached."""
    walker.grammar.fill_vocab_mask(vocab_mask, start)
    for depth, token in enumerate(drafts, 1):
        if not walker.step(token, vocab_mask[start + depth - 1]):
            return depth
        walker.grammar.fill_vocab_mask(vocab_mask, start + depth)
    return len(drafts) + 1


def _mask_after(
    walker: _Walker, drafts: list[int], vocab_mask: torch.Tensor, row: int, vocab_size: int
) -> None:
    """Fill the row of the token after all of ``drafts``.

    Behind the end of the grammar drafting goes on unconstrained: then the row stays unmasked.
    """
    for token in drafts:
        scratch = walker.grammar.allocate_vocab_mask(vocab_size, 1, vocab_mask.device)
        walker.grammar.fill_vocab_mask(scratch, 0)
        if not walker.step(token, scratch[0]):
            return
    walker.grammar.fill_vocab_mask(vocab_mask, row)


class _Walker:
    """A grammar on its way along a chain; ``taken`` counts the tokens it has accepted."""

    def __init__(self, grammar: BaseGrammarObject) -> None:
        self.grammar = grammar
        self.taken = 0

    def step(self, token: int, mask_row: torch.Tensor) -> bool:
        """Accept ``token`` if the mask of its place allows it; False where the walk ends."""
        if not _allows(mask_row, token):
            return False
        self.grammar.accept_token(token)
        self.taken += 1
        return not self.grammar.is_terminated()


@contextlib.contextmanager
def _lookahead(grammar: BaseGrammarObject) -> Iterator[_Walker]:
    """Walk ahead of ``grammar``; on exit it is where it was."""
    wrapped = getattr(grammar, "grammar", None)
    innermost = wrapped or grammar
    if type(innermost).rollback is BaseGrammarObject.rollback:
        # Outlines cannot roll back, and its own copy() starts from the first state again.
        ahead = copy.copy(innermost)
        if wrapped is not None:
            wrapper = grammar.copy()
            wrapper.grammar = ahead
            ahead = wrapper
        yield _Walker(ahead)
        return
    walker = _Walker(grammar)
    last_tokens = grammar.current_token, innermost.current_token
    try:
        yield walker
    finally:
        if walker.taken:
            grammar.rollback(walker.taken)
        grammar.current_token, innermost.current_token = last_tokens


def _allows(mask_row: torch.Tensor, token: int) -> bool:
    if mask_row.dtype == torch.bool:  # outlines: one entry a token, True where forbidden
        return token < mask_row.shape[0] and not mask_row[token]
    word, bit = divmod(token, 32)  # xgrammar, llguidance: one bit a token, set where allowed
    return word < mask_row.shape[0] and bool((int(mask_row[word]) >> bit) & 1)
