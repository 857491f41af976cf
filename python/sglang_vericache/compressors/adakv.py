"""AdaKV: the heads of a layer compete for its budget."""

from __future__ import annotations

from typing import ClassVar

from sglang_vericache.compressors.base import Dropper
from sglang_vericache.core import Budget


class AdaKV(Dropper):
    """Lists of different lengths for the KV heads of a layer; together HKV times its budget B.

    Each head keeps what is protected and its own best tokens, 0.2 B together (the safeguard); the
    rest of HKV * B goes to the best scores of all heads. Feng et al. 2024,
    https://arxiv.org/abs/2407.11550; as in kvpress, save that equal scores have an order.

    Cost a layer: one more selection among T * HKV scores. Where tokens are copied (full KV on the
    host, packed views) one slot serves all heads, so the copy has as many as the longest list: up
    to HKV * B - 0.2 B * (HKV - 1).
    Limits: scores of different heads must mean the same, as probabilities do. Heads that run in
    parallel wait for the longest list.
    """

    name: ClassVar[str] = "adakv"
    floor_share: ClassVar[float] = 0.2

    def longest(self, length: int, kv_heads: int, budget: Budget) -> int:
        count = super().longest(length, kv_heads, budget)
        return min(length, count * kv_heads - self.sure(count) * (kv_heads - 1))
