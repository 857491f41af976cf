"""Takes the name ``sgl_kernel`` where the CUDA-only wheel cannot be imported (see bootstrap.py).

Holds what stock SGLang reaches on a CPU without AMX. Everything else that it imports at module
level on a CPU is present but refuses to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """The pool constructor warms it up by copying a slot onto itself; nothing else calls it.

    VeriCache never moves KV rows: rejected positions are freed by moving a length back.
    """
    if not torch.equal(tgt_loc, src_loc):
        raise NotImplementedError("sgl_kernel.copy_all_layer_kv_cache_cpu needs the CPU wheel")


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write ``out_cache_loc`` into ``req_to_token[row, start:end]``, request after request."""
    taken = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def _unavailable(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not available on a plain CPU")

    refuse.__name__ = name
    return refuse


for _name in (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
):
    globals()[_name] = _unavailable(_name)
