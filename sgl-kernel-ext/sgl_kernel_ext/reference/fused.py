"""Torch references of the fused ops: SGLang's native semantics, rounding included.

Sources (SGLang 0.5.23): ``RMSNorm.forward_native``, ``SiluAndMul.forward_native``,
``RotaryEmbedding.forward_native`` under ``sglang/srt/layers``.
"""

import torch
import torch.nn.functional as F


def _normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    variance = x.pow(2).mean(dim=-1, keepdim=True)
    return x * torch.rsqrt(variance + eps) * weight


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x [..., H]`` over its root mean square times ``weight [H]``, in fp32, rounded once."""
    y = _normalize(x.float().contiguous(), weight, eps).to(x.dtype)
    return y if out is None else out.copy_(y)


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    """In place: ``residual = x + residual``, ``x = rmsnorm`` of the unrounded sum."""
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(_normalize(total.contiguous(), weight, eps))


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(x[:, :N]) * x[:, N:]`` for ``x [M, 2N]``, silu rounded before the product."""
    gate, up = x.chunk(2, dim=-1)
    return torch.mul(F.silu(gate), up, out=out)


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor, head_size: int, is_neox: bool) -> None:
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
    heads = x.unflatten(-1, (-1, head_size)) if x.dim() == 2 else x
    rotated = heads[..., :rotary_dim]
    if is_neox:
        first, second = rotated.chunk(2, dim=-1)
    else:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    new_first = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(new_first)


def rotary(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Rotates ``q [M, HQ*D]`` and ``k [M, HKV*D]`` in place, rounding after every operation."""
    cos_sin = cos_sin_cache.index_select(0, positions)
    _rotate(q, cos_sin, head_size, is_neox)
    _rotate(k, cos_sin, head_size, is_neox)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    loc: torch.Tensor,
) -> None:
    """``pool[loc] = rows``, pools ``[slots, HKV, D]``."""
    loc = loc.long()
    k_pool[loc] = k.reshape(-1, *k_pool.shape[1:])
    v_pool[loc] = v.reshape(-1, *v_pool.shape[1:])


def rope_store_kv(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    loc: torch.Tensor,
) -> None:
    """:func:`rotary`, then :func:`store_kv`."""
    rotary(positions, q, k, head_size, cos_sin_cache, is_neox)
    store_kv(k, v, k_pool, v_pool, loc)


def copy_rows(
    source: torch.Tensor, source_index: torch.Tensor, out: torch.Tensor, out_index: torch.Tensor
) -> None:
    """``out[out_index] = source[source_index]``."""
    out.index_copy_(0, out_index.long(), source.index_select(0, source_index))


def argmax_rows(x: torch.Tensor) -> torch.Tensor:
    """First index of each row's largest value, a NaN counting as the largest."""
    return x.argmax(dim=-1)
