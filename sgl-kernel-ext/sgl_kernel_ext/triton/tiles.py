"""Sizes of the Triton kernels' tiles, and which rows a tile holds.

NOTE: no size may depend on the batch, and none may be autotuned: both change a row's bits.
"""

import torch
import triton
import triton.language as tl

# Packed rows of a tile: the smallest tensor-core tile. One for decode, verify and prefill.
BLOCK_M = 16
# Entries of a split of a KV list.
SPLIT = 512
# Contraction off: a product and a sum round in two steps in every kernel that has them.
LAUNCH = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
LOG2_E = 1.4426950408889634
# Tiles of more columns do not fit the shared memory of every GPU.
MAX_HEAD_DIM = 256


def block_d(head_dim: int) -> int:
    """Columns of a tile of keys: ``head_dim`` padded to a power of two, at least 16.

    Raises:
        ValueError: ``head_dim`` is above MAX_HEAD_DIM.
    """
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"q: on CUDA head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}")
    return max(16, triton.next_power_of_2(head_dim))


def block_n(head_dim: int, dtype: torch.dtype) -> int:
    """Rows of a tile of keys: at most 64, and at most 16 KiB of them."""
    return max(16, min(64, (16 << 10) // (block_d(head_dim) * dtype.itemsize)))


@triton.jit
def locate_tile(
    q_indptr, tail_start, tail_end, view_len, groups,
    GQA: tl.constexpr, VIEW_HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What the program (tile, KV head, ...) works on.

    A group's rows times the GQA query heads of a KV head, row-major, are its packed rows. Group g
    gets the tiles of BLOCK_M packed rows from ``q_indptr[g] * GQA // BLOCK_M + g`` on: enough for
    its rows, at most one too many, and ``R * GQA // BLOCK_M + G`` in all, known on the host.

    Returns:
        group; its first row; its number of rows; first packed row of the tile (no rows if that is
        ``rows * GQA`` or more); entries of its KV list; of these, entries of the view.
    """
    tile = tl.program_id(0)
    group = -1
    for start in range(0, groups, 128):
        g = start + tl.arange(0, 128)
        first_tile = tl.load(q_indptr + g, mask=g < groups, other=0) * GQA // BLOCK_M + g
        group += tl.sum(((first_tile <= tile) & (g < groups)).to(tl.int32))
    row = tl.load(q_indptr + group).to(tl.int32)
    rows = tl.load(q_indptr + group + 1).to(tl.int32) - row
    first = (tile - row * GQA // BLOCK_M - group) * BLOCK_M
    in_view = 0
    if VIEW_HEADS > 0:
        in_view = tl.load(view_len + group * VIEW_HEADS + tl.program_id(1) % VIEW_HEADS)
    tail = tl.load(tail_end + group).to(tl.int32) - tl.load(tail_start + group).to(tl.int32)
    return group, row, rows, first, in_view + tail, in_view


@triton.jit
def tile_rows(first_row, rows, first, length, GQA: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of each packed row of a tile: whether there is one, its row, query head and entries it sees;
    then the entries that all of them see, and that any of them sees."""
    packed = first + tl.arange(0, BLOCK_M)
    row = (first_row + packed // GQA).to(tl.int64)
    head = tl.program_id(1) * GQA + packed % GQA
    first_sees = length - rows + 1
    last = tl.minimum(first + BLOCK_M, rows * GQA) - 1
    return (
        packed < rows * GQA,
        row,
        head,
        first_sees + packed // GQA,
        first_sees + first // GQA,
        first_sees + last // GQA,
    )
