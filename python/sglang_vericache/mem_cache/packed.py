"""Pools of packed KV: what drafts of quantizing compressors read instead of the KV pool.

A slot holds one token of every layer, encoded by one codec of ``sgl_kernel_ext``. Slots belong to
running requests, never to the radix tree, and any of them may be allocated for any token, but those
of one block to one request.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sgl_kernel_ext import KvCodec, ViewPool, pack_kv, packed_pool


class PackedPool:
    """Packed keys and values of all layers, and which slots are free.

    Args:
        codec: how slots are encoded.
        tokens: slots, rounded up to whole blocks.
        layers: attention layers L.
        kv_heads: HKV, of this rank.
        head_dim: D.
        device: where the KV pool is.

    Attributes:
        layers: keys and values of each layer.
    """

    def __init__(
        self,
        codec: KvCodec,
        tokens: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        self.codec = codec
        blocks = -(-tokens // codec.tokens)
        self.tokens = blocks * codec.tokens
        self.layers: list[ViewPool] = [
            packed_pool(codec, tokens, kv_heads, head_dim, device) for _ in range(layers)
        ]
        self._token_bytes = layers * kv_heads * codec.row_bytes(head_dim)
        self._free = torch.arange(blocks, dtype=torch.int32, device=device)

    @property
    def token_bytes(self) -> int:
        """Bytes of one slot, all layers."""
        return self._token_bytes

    @property
    def nbytes(self) -> int:
        return self.tokens * self.token_bytes

    def available(self) -> int:
        """Free slots."""
        return len(self._free) * self.codec.tokens

    def alloc(self, tokens: int) -> Tensor | None:
        """At least ``tokens`` slots, int32, those of whole blocks; None if fewer are free."""
        blocks = -(-tokens // self.codec.tokens)
        if blocks > len(self._free):
            return None
        taken, self._free = self._free[:blocks], self._free[blocks:]
        return self._slots(taken)

    def free(self, slots: Tensor) -> None:
        """Give back all slots of an ``alloc``, once."""
        tokens = self.codec.tokens
        # Used again first: memory that nobody has written to takes no room on a CPU.
        self._free = torch.cat([slots[::tokens] // tokens, self._free])

    def _slots(self, blocks: Tensor) -> Tensor:
        places = torch.arange(self.codec.tokens, dtype=torch.int32, device=blocks.device)
        return (blocks[:, None] * self.codec.tokens + places).flatten()

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Encode keys and values ``[n, HKV, D]`` of one layer into ``slots`` ``[n]``.

        Where codecs have blocks, those are the first n of an ``alloc``.
        """
        pack_kv(keys, values, self.layers[layer], slots)

    def check_integrity(self, held: Iterable[Tensor]) -> None:
        """Raise ``AssertionError`` unless every slot is either free or ``held``, once."""
        slots = torch.cat([self._slots(self._free), *held]).sort().values
        expected = torch.arange(self.tokens, dtype=torch.int32, device=slots.device)
        assert torch.equal(slots, expected), f"{len(slots)} of {self.tokens} slots, or some twice"
