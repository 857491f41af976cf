"""The same keys by another way: list prefixes turned into views, views moved to other pools, pools
packed."""

import itertools
from typing import Any

import torch
from torch import Tensor

from sgl_kernel_ext import ViewPool
from sgl_kernel_ext.packed import PLAIN, Codec
from sgl_kernel_ext.reference.packed import pack, unpack

VIEWS = ("view_indices", "view_start", "view_len")


def view_prefixes(args: dict[str, Any], tails: list[int]) -> dict[str, Any]:
    """Arguments of ``ragged_attention`` without views -> the same lists, all but the last
    ``tails[g]`` entries of group g as its view."""
    groups = zip(*(args[n].tolist() for n in ("req_row", "tail_start", "tail_end")), strict=True)
    lists = [
        args["req_to_token"][row, start : end - tail]
        for (row, start, end), tail in zip(groups, tails, strict=True)
    ]
    offsets = [0, *itertools.accumulate(map(len, lists))][:-1]
    return args | dict(
        tail_start=args["tail_end"] - torch.tensor(tails, device=args["q"].device),
        view_indices=torch.cat(lists),
        view_start=torch.tensor(offsets, device=args["q"].device)[:, None],
        view_len=torch.tensor(list(map(len, lists)), device=args["q"].device)[:, None].int(),
    )


def move_views(args: dict[str, Any], homes: list[int], seed: int = 0) -> dict[str, Any]:
    """Arguments with the view of group g moved to ``view_pools[homes[g] - 1]``; 0 stays.

    Pools differ in size and strides: keys and values side by side, heads apart. What is not listed
    holds NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    indices, start, length = (args[name] for name in VIEWS)
    _, heads, dim = args["k_pool"].shape
    lists = [
        indices[s : s + n]
        for s, n in zip(start.flatten().tolist(), length.flatten().tolist(), strict=True)
    ]
    total = sum(map(len, lists))
    empty = args["k_pool"].new_full((3, total + 40, 2, heads, dim), float("nan"))
    stacked = empty[0, : total + 9]
    apart = empty[1].transpose(0, 2).contiguous().transpose(0, 2)
    plain = empty[2, :, :, :].transpose(0, 1).contiguous()[:, : total + 21]
    pairs = [(stacked[:, 0], stacked[:, 1]), (apart[:, 0], apart[:, 1]), (plain[0], plain[1])]
    pools = [ViewPool(*pair) for pair in pairs[: max(homes)]]
    moved, taken = [], 0
    for i, slots in enumerate(lists):
        home = homes[i // start.shape[1]]
        if home == 0:
            moved.append(slots)
            continue
        size = len(pools[home - 1][0])
        free = torch.randperm(size, generator=generator)
        free = free[pools[home - 1][0][free, 0, 0].isnan().cpu()][: len(slots)]
        free = free.to(slots.device)
        for target, source in zip(
            pools[home - 1][:2], (args["k_pool"], args["v_pool"]), strict=True
        ):
            target[free] = source[slots.long()]
        moved.append(free.int())
        taken += len(slots)
    assert taken > 0, "precondition: something moved"
    offsets = [0, *itertools.accumulate(map(len, moved))][:-1]
    return args | dict(
        view_indices=torch.cat(moved),
        view_start=torch.tensor(offsets, device=start.device).view(start.shape),
        view_pools=pools,
        view_pool=torch.tensor(homes, dtype=torch.int32, device=start.device),
    )


def pack_views(
    args: dict[str, Any], codecs: list[tuple[Codec, Codec]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments with pool i of ``move_views`` packed by codecs of keys and values, and with that
    pool decoded again. Slots that held NaN decode to NaN, or to anything if blocks have several
    tokens."""
    packed, decoded = [], []
    for pool, pair in zip(args["view_pools"], codecs, strict=True):
        missing = -len(pool.keys) % max(codec.tokens for codec in pair)
        whole = [torch.cat([x, x[:1].expand(missing, -1, -1)]) if missing else x for x in pool[:2]]
        parts = [_packed(x, codec) for x, codec in zip(whole, pair, strict=True)]
        packed.append(ViewPool(*parts, *(codec.number for codec in pair)))
        plain = [
            _unpacked(x, part, codec) for x, part, codec in zip(pool, parts, pair, strict=False)
        ]
        decoded.append(ViewPool(*plain))
    return args | {"view_pools": packed}, args | {"view_pools": decoded}


def _packed(pool: Tensor, codec: Codec) -> Tensor:
    if codec is PLAIN:
        return pool
    slots, heads, dim = pool.shape
    shape = (slots // codec.tokens, heads + 2, codec.block_bytes(dim) + 4)
    # Blocks apart, as in a pool of keys and values side by side; 0xffff is a NaN.
    packed = torch.full(shape, 255, dtype=torch.uint8, device=pool.device)[:, 1:-1, :-4]
    if codec.tokens > 1:
        packed[:] = pack(pool.nan_to_num(), codec)
        return packed
    listed = ~pool[:, 0, 0].isnan()
    packed[listed] = pack(pool[listed], codec)
    return packed


def _unpacked(pool: Tensor, packed: Tensor, codec: Codec) -> Tensor:
    return pool if codec is PLAIN else unpack(packed, pool.shape[2], codec).to(pool.dtype)
