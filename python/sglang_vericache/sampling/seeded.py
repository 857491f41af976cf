"""Draws whose noise is fixed by (request seed, position).

Semantics: ``multinomial_with_seed`` of SGLang's sampler, a Gumbel-max draw whose uniform variate is
a 32-bit MurmurHash3 of seed, position and column. On a GPU that function is called as it is. On a
CPU the same draw is made without compiling it (its first call takes half a minute) and with one
logarithm in double precision per column instead of several passes over the batch.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

_MASK = 0xFFFFFFFF
_C1, _C2, _N = 0xCC9E2D51, 0x1B873593, 0xE6546B64
_KEY_BYTES = 16  # seed 8, position 4, column 4
# Two libraries may round a logarithm differently: columns this close to the maximum are decided by
# torch's, as in the stock sampler.
_MARGIN = 1e-6


def draw(logprobs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw one column of every row, proportionally to ``exp(logprobs)``.

    Args:
        logprobs: ``[rows, columns]``, any float dtype; need not be normalised, ``-inf`` is never
            drawn.
        seeds: ``[rows]`` int64, the seed of the row's request.
        positions: ``[rows]``, position of the row's input token (what plain decoding passes).

    Returns:
        ``[rows]`` int64 columns. A row's result does not depend on the other rows.
    """
    if logprobs.is_cuda:
        from sglang.srt.layers.sampler import multinomial_with_seed

        return multinomial_with_seed(logprobs, seeds, positions).view(-1)
    rows = logprobs.numpy()
    drawn = [
        draw_row(row, seed, position)
        for row, seed, position in zip(rows, seeds.tolist(), positions.tolist(), strict=True)
    ]
    return torch.tensor(drawn, dtype=torch.int64)


def draw_row(logprobs: np.ndarray, seed: int, position: int) -> int:
    """``draw`` for one row ``[columns]`` on the host."""
    hashed = hash_columns(seed, position, logprobs.shape[0])
    score = hashed / float(_MASK)
    with np.errstate(divide="ignore"):
        np.log(score, out=score)
    np.clip(score, np.finfo(np.float64).min, -(2.0**-32), out=score)
    np.negative(score, out=score)
    np.log(score, out=score)
    np.subtract(logprobs, score, out=score)
    near = np.flatnonzero(score >= score.max() - _MARGIN)
    if near.size == 1:
        return int(near[0])
    exact = _noise(torch.from_numpy(hashed[near].astype(np.float64)))
    exact += torch.from_numpy(logprobs[near].astype(np.float64))
    return int(near[int(exact.argmax())])


def hash_columns(seed: int, position: int, columns: int) -> np.ndarray:
    """MurmurHash3 (x86, 32 bit) of (seed, position, column) for columns 0..n-1: ``[n]`` uint32."""
    state = 0
    for block in (seed & _MASK, (seed >> 32) & _MASK, position & _MASK):
        state ^= _rotate((block * _C1) & _MASK, 15) * _C2 & _MASK
        state = (_rotate(state, 13) * 5 + _N) & _MASK
    h = _column_blocks(columns) ^ np.uint32(state)
    h = (h << np.uint32(13)) | (h >> np.uint32(19))
    h *= np.uint32(5)
    h += np.uint32(_N)
    h ^= np.uint32(_KEY_BYTES)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    h ^= h >> np.uint32(16)
    return h


@functools.lru_cache(maxsize=8)
def _column_blocks(columns: int) -> np.ndarray:
    block = np.arange(columns, dtype=np.uint32) * np.uint32(_C1)
    block = (block << np.uint32(15)) | (block >> np.uint32(17))
    return block * np.uint32(_C2)


def _rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _noise(hashed: torch.Tensor) -> torch.Tensor:
    """Gumbel noise of hashes given as float64, in the stock sampler's own arithmetic."""
    x = hashed / _MASK
    x.log_().clamp_(min=torch.finfo(x.dtype).min, max=-(2.0**-32)).neg_()
    return x.log_().neg_()
