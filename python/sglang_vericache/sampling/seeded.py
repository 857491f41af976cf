"""Draws on the host whose noise is fixed by (request seed, position).

Semantics: ``multinomial_with_seed`` of SGLang's sampler, a Gumbel-max draw whose uniform variate is
a 32-bit MurmurHash3 of seed, position and token id. That function serves GPUs as it is; on a CPU it
would first be compiled for half a minute, and it takes two logarithms in double precision of every
token of every row. Here only of the tokens that can win.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

_MASK = 0xFFFFFFFF
_C1, _C2, _N = 0xCC9E2D51, 0x1B873593, 0xE6546B64
_KEY_BYTES = 16  # seed 8, position 4, token id 4
# Two libraries may round a logarithm differently: columns this close to the maximum are decided by
# torch's, as in the stock sampler.
_MARGIN = 1e-6
# A column whose probability is below the largest by this factor (in nats), and whose noise is below
# this bound, cannot beat a score of ``log(largest) - _FAR + _LOUD``; nearly every draw does.
_FAR, _LOUD = 10.0, 6.0
_LOUD_HASH = np.uint32(math.ceil(_MASK * math.exp(-math.exp(-_LOUD))))


def draw_row(
    probs: torch.Tensor, seed: int, position: int, token_ids: np.ndarray | None = None
) -> int:
    """Draw one token, proportionally to ``probs``.

    Args:
        probs: ``[n]`` float32, need not sum to 1.
        seed: of the request, 64 bits.
        position: of the row's input token (what plain decoding passes to its sampler).
        token_ids: ``[n]`` int64, rising, where ``probs`` leaves out tokens of probability 0;
            otherwise n is the vocabulary.

    Returns:
        A token id.
    """
    values = probs.numpy()
    blocks = _vocab_blocks(values.shape[0]) if token_ids is None else _blocks(token_ids)
    hashed = _hash(seed, position, blocks)
    largest = float(values.max())
    if largest > 0:
        contending = (values >= largest * math.exp(-_FAR)) | (hashed >= _LOUD_HASH)
        winner, score = _best_of(probs, hashed, np.flatnonzero(contending))
        if score > math.log(largest) - _FAR + _LOUD + _MARGIN:
            return winner if token_ids is None else int(token_ids[winner])
    winner, _ = _best_of(probs, hashed, np.arange(values.shape[0]))
    return winner if token_ids is None else int(token_ids[winner])


def _best_of(probs: torch.Tensor, hashed: np.ndarray, columns: np.ndarray) -> tuple[int, float]:
    """Column of ``columns`` with the largest noisy log-probability, and that score."""
    logprobs = probs[torch.from_numpy(columns)].log_().double()
    score = hashed[columns] / float(_MASK)
    with np.errstate(divide="ignore"):
        np.log(score, out=score)
    np.clip(score, np.finfo(np.float64).min, -(2.0**-32), out=score)
    np.log(np.negative(score, out=score), out=score)
    np.subtract(logprobs.numpy(), score, out=score)
    # With NaN among the scores argmax finds the first one, as torch's does.
    best = int(score.argmax())
    near = np.flatnonzero(score >= score[best] - _MARGIN)
    if near.size > 1:
        exact = _noise(torch.from_numpy(hashed[columns[near]].astype(np.float64)))
        best = int(near[int((exact + logprobs[torch.from_numpy(near)]).argmax())])
    return int(columns[best]), float(score[best])


def hash_tokens(seed: int, position: int, token_ids: np.ndarray) -> np.ndarray:
    """MurmurHash3 (x86, 32 bit) of (seed, position, token id): ``[n]`` uint32."""
    return _hash(seed, position, _blocks(token_ids))


@functools.cache
def _vocab_blocks(vocab: int) -> np.ndarray:
    return _blocks(np.arange(vocab))


def _blocks(token_ids: np.ndarray) -> np.ndarray:
    """The part of the hash that only the token id enters."""
    block = token_ids.astype(np.uint32) * np.uint32(_C1)
    block = (block << np.uint32(15)) | (block >> np.uint32(17))
    return block * np.uint32(_C2)


def _hash(seed: int, position: int, blocks: np.ndarray) -> np.ndarray:
    state = 0
    for block in (seed & _MASK, (seed >> 32) & _MASK, position & _MASK):
        state ^= _rotate((block * _C1) & _MASK, 15) * _C2 & _MASK
        state = (_rotate(state, 13) * 5 + _N) & _MASK
    h = blocks ^ np.uint32(state)
    shifted = h >> np.uint32(19)
    h <<= np.uint32(13)
    h |= shifted
    h *= np.uint32(5)
    h += np.uint32(_N)
    h ^= np.uint32(_KEY_BYTES)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
        h ^= np.right_shift(h, np.uint32(shift), out=shifted)
        if factor is not None:
            h *= np.uint32(factor)
    return h


def _rotate(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _noise(hashed: torch.Tensor) -> torch.Tensor:
    """Gumbel noise of hashes given as float64, in the stock sampler's own arithmetic."""
    x = hashed / _MASK
    x.log_().clamp_(min=torch.finfo(x.dtype).min, max=-(2.0**-32)).neg_()
    return x.log_().neg_()
