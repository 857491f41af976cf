"""MurmurHash3 (x86, 32 bit), written from its published definition for comparison."""

import struct

import torch


def murmur3_32(data: bytes, seed: int = 0) -> int:
    h = seed
    whole = len(data) // 4 * 4
    for (k,) in struct.iter_unpack("<I", data[:whole]):
        h ^= _scramble(k)
        h = (_rotate(h, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    if tail := data[whole:]:
        h ^= _scramble(int.from_bytes(tail, "little"))
    h ^= len(data)
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


def hash_key(seed: int, position: int, column: int) -> int:
    return murmur3_32(struct.pack("<QII", seed & 0xFFFFFFFFFFFFFFFF, position, column))


def register_reference_op() -> None:
    """Provide the op of SGLang's CPU wheel that its seeded sampler calls on a CPU."""
    if hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        return
    signature = "murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor"
    torch.library.define(f"sgl_kernel::{signature.split('(')[0]}", "(" + signature.split("(", 1)[1])

    @torch.library.impl("sgl_kernel::murmur_hash32_cpu", "CPU")
    def hash_rows(seed, positions, columns):
        rows = zip(seed.view(torch.int64).tolist(), positions.tolist(), strict=True)
        return torch.stack([_hash_row(s, p, columns) for s, p in rows])


def _hash_row(seed, position, columns):
    h = torch.zeros_like(columns)
    blocks = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, position]
    for block in [*(torch.full_like(columns, value) for value in blocks), columns]:
        h = _rotate(h ^ _scramble(block), 13) * 5 + 0xE6546B64 & 0xFFFFFFFF
    h = h ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


def _scramble(k):
    return _rotate(k * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF


def _rotate(value, bits):
    return ((value << bits) | (value >> (32 - bits))) & 0xFFFFFFFF
