"""SGLang's radix tree, with device slots for others than the tree and the requests it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from torch import Tensor

from sglang_vericache.mem_cache.copying import CopyingCache

# Of the device's slots, how many may be lent.
LENT_SHARE = 0.25


class LendingCache(CopyingCache):
    """The tree, and slots that were taken or lent beside it."""

    def __init__(self, params: Any):
        super().__init__(params)
        self.lent: dict[Hashable, Tensor] = {}
        """Slots lent to whoever asked, by borrower."""
        # Asks for them all.
        self.give_up_room: Callable[[], None] = lambda: None
        self._lending = False
        # Whether slots were given up since admission was last asked, and whether it said no.
        self.made_room = self.refused = False

    def evict_for_alloc(self, params: EvictParams, **kwargs: Any) -> EvictResult:
        """As stock; what was lent goes before anybody is retracted or fails."""
        result = super().evict_for_alloc(params, **kwargs)
        if self.lent and not self._lending and result.num_tokens_evicted < params.num_tokens:
            self.give_up_room()
        return result

    def allocate(self, tokens: int) -> Tensor | None:
        """Device slots for a compressed copy, evicting cached prefixes; None if there is no room.

        Returns:
            int64 ``[n]``, ``n >= tokens`` a multiple of the page size.
        """
        size = -(-tokens // self.page_size) * self.page_size
        allocator = self.token_to_kv_pool_allocator
        missing = size - allocator.available_size()
        if missing > 0:
            self.evict_for_alloc(EvictParams(num_tokens=missing))
        found: Tensor | None = allocator.alloc(size)
        return None if found is None else found.long()

    def lend(self, borrower: Hashable, tokens: int) -> Tensor | None:
        """``allocate`` for a borrower, which holds nothing yet, until ``take_back``.

        All borrowers together get ``LENT_SHARE`` of the device at most.
        """
        assert borrower not in self.lent and tokens > 0
        lent = sum(len(slots) for slots in self.lent.values())
        if self.refused or lent + tokens > LENT_SHARE * self.token_to_kv_pool_allocator.size:
            return None
        self._lending = True
        slots = self.allocate(tokens)
        self._lending = False
        if slots is not None:
            self.lent[borrower] = slots
        return slots

    def take_back(self, borrower: Hashable) -> None:
        """Free what was lent."""
        self.token_to_kv_pool_allocator.free(self.lent.pop(borrower))
        self.made_room = True
