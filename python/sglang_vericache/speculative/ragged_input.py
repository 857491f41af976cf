"""The speculative input of one ragged pass, as SGLang carries it from batch to forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

if TYPE_CHECKING:
    from torch import Tensor

    from sglang_vericache.attention.rows import Rows


class RaggedInput(SpecInput):
    """Positions and rows of a pass; between passes an empty one rides on the batch.

    Drafts live in the worker, by request, so filtering and merging batches moves nothing.
    """

    def __init__(self, slots: int, positions: Tensor | None = None, rows: Rows | None = None):
        # NOTE: the type only tells SGLang that this is a verify input of a chain.
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.positions = positions
        self.rows = rows
        self.draft_token_num = slots
        self.num_tokens_per_req = slots
        self.num_tokens_for_logprob_per_req = slots

    def filter_batch(self, *args: Any, **kwargs: Any) -> None:
        pass

    def merge_batch(self, spec_info: SpecInput) -> None:
        pass
