"""The decoder layers of a Llama-like model: one call a pass instead of some 250."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from sgl_kernel_ext._loader import cpu_module
from sgl_kernel_ext.attention import check_rows, ragged_attention
from sgl_kernel_ext.fused import fused_add_rmsnorm, rmsnorm, rope_store_kv, silu_and_mul
from sgl_kernel_ext.linear import PackedWeight, linear
from sgl_kernel_ext.packed import ViewPool

_LINEARS = ("qkv", "out", "gate_up", "down")


@dataclass(frozen=True)
class DecoderLayer:
    """Weights and KV pool of one layer, all read in place.

    Attributes:
        input_norm, post_norm: ``[H]``.
        qkv: ``[(HQ + 2 * HKV) * D, H]``: queries, keys, values.
        out: ``[H, HQ * D]``.
        gate_up: ``[2 * I, H]``: gate, up.
        down: ``[H, I]``.
        k_pool, v_pool: ``[slots, HKV, D]``.
    """

    input_norm: Tensor
    post_norm: Tensor
    qkv: PackedWeight
    out: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    k_pool: Tensor
    v_pool: Tensor


@dataclass(frozen=True)
class DecoderShape:
    """What all layers share: HQ, HKV, D, scale of the dot products, eps of norms, rope style."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    eps: float
    is_neox: bool


@dataclass(frozen=True)
class DecoderRows:
    """Rows of a pass and what they attend to; see :func:`ragged_attention`.

    Attributes:
        view_indices, view_start, view_len: as there, the last two for all layers, ``[L, G, Hv]``.
        view_pools: as there, for each layer (equally many and of equal shapes); empty without.
        view_pool: as there.
        captured: int64 rows whose queries are returned, or None.
    """

    req_to_token: Tensor
    q_indptr: Tensor
    req_row: Tensor
    tail_start: Tensor
    tail_end: Tensor
    view_indices: Tensor | None = None
    view_start: Tensor | None = None
    view_len: Tensor | None = None
    view_pools: Sequence[Sequence[ViewPool]] = ()
    view_pool: Tensor | None = None
    captured: Tensor | None = None


class Decoder:
    """Runs the layers; compiled on a CPU with kernels, else the loop that defines the result.

    Args:
        shape: of all layers.
        layers: in order, at least one.
        final_norm: ``[H]``.
        rope_cache: ``cos_sin_cache`` of :func:`rotary`.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layers: list[DecoderLayer],
        final_norm: Tensor,
        rope_cache: Tensor,
    ) -> None:
        self.shape, self.layers = shape, layers
        self.final_norm, self.rope_cache = final_norm, rope_cache
        self._module = module = cpu_module()
        self._compiled = None
        if module is not None and final_norm.is_cpu:
            compiled = [module.DecoderLayer(*_arguments(layer, module)) for layer in layers]
            shape_ = module.DecoderShape(*_values(shape))
            self._compiled = module.Decoder(shape_, compiled, final_norm, rope_cache)

    def forward(
        self, hidden: Tensor, positions: Tensor, slots: Tensor, rows: DecoderRows
    ) -> tuple[Tensor, list[Tensor]]:
        """One pass: stores K and V of the rows, then attends.

        Args:
            hidden: ``[R, H]`` embeddings; overwritten.
            positions: ``[R]`` int64.
            slots: ``[R]`` KV slots of the rows.
            rows: what they attend to.

        Returns:
            Hidden states ``[R, H]`` after the final norm, and per layer the queries ``[n, HQ, D]``
            of the n rows ``rows.captured`` (an empty list without).

        Raises:
            TypeError, ValueError, IndexError: as the ops do.
        """
        if self._compiled is None:
            return self._loop(hidden, positions, slots, rows)
        shape, layer = self.shape, self.layers[0]
        queries = hidden.new_empty((hidden.shape[0], shape.heads, shape.head_dim))
        start, length = (None if v is None else v[0] for v in (rows.view_start, rows.view_len))
        check_rows(
            queries,
            layer.k_pool,
            layer.v_pool,
            rows.req_to_token,
            rows.q_indptr,
            rows.req_row,
            rows.tail_start,
            rows.tail_end,
            rows.view_indices,
            start,
            length,
            rows.view_pools[0] if rows.view_pools else (),
            rows.view_pool,
        )
        if rows.view_pools and len(rows.view_pools) != len(self.layers):
            raise ValueError(
                f"view_pools: expected one list for each of {len(self.layers)} layers, "
                f"got {len(rows.view_pools)}"
            )
        assert self._module is not None
        return self._compiled.forward(
            hidden, positions, slots, self._module.DecoderRows(*_values(rows))
        )

    def _loop(
        self, hidden: Tensor, positions: Tensor, slots: Tensor, rows: DecoderRows
    ) -> tuple[Tensor, list[Tensor]]:
        shape = self.shape
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        captured: list[Tensor] = []
        residual = hidden
        normed = rmsnorm(hidden, self.layers[0].input_norm, shape.eps)
        for index, layer in enumerate(self.layers):
            if index:
                fused_add_rmsnorm(hidden, residual, layer.input_norm, shape.eps)
                normed = hidden
            q, k, v = linear(normed, layer.qkv).split([q_size, kv_size, kv_size], dim=1)
            rope_store_kv(
                positions,
                q,
                k,
                v,
                shape.head_dim,
                self.rope_cache,
                shape.is_neox,
                layer.k_pool,
                layer.v_pool,
                slots,
            )
            queries = q.view(-1, shape.heads, shape.head_dim)
            if rows.captured is not None:
                captured.append(queries.index_select(0, rows.captured))
            attended = ragged_attention(
                queries,
                layer.k_pool,
                layer.v_pool,
                rows.req_to_token,
                rows.q_indptr,
                rows.req_row,
                rows.tail_start,
                rows.tail_end,
                shape.scale,
                view_indices=rows.view_indices,
                view_start=None if rows.view_start is None else rows.view_start[index],
                view_len=None if rows.view_len is None else rows.view_len[index],
                view_pools=rows.view_pools[index] if rows.view_pools else (),
                view_pool=rows.view_pool,
            )
            hidden = linear(attended.view(-1, q_size), layer.out)
            fused_add_rmsnorm(hidden, residual, layer.post_norm, shape.eps)
            hidden = linear(silu_and_mul(linear(hidden, layer.gate_up)), layer.down)
        fused_add_rmsnorm(hidden, residual, self.final_norm, shape.eps)
        return hidden, captured


def _values(record: Any) -> list[Any]:
    return [getattr(record, field.name) for field in fields(record)]


def _arguments(layer: DecoderLayer, module: Any) -> list[Any]:
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    for name in _LINEARS:
        weight: PackedWeight = values[name]
        values[name] = module.PackedLinear(weight.data, weight.n, weight.bias)
    return list(values.values())
