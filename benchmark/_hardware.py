"""Devices, models and what one iteration costs on them, for ``simulate.py``.

A roofline: an iteration takes the longer of reading its bytes and computing its products, plus a
fixed overhead. Peak figures are the vendors'; the shares of them that are reached are the same for
every device and policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

GB, GiB = 1e9, 2**30
# Share of peak bandwidth reached by memory and by the link. VeriCache's example copies 4 GB in
# 80 ms over a nominal 64 GB/s.
BANDWIDTH_SHARE = 0.8
# Share of peak matrix throughput reached.
COMPUTE_SHARE = 0.5
# Share of device memory that weights and KV may take (vLLM's default).
MEMORY_SHARE = 0.9
# Scheduling, launches and sampling of an iteration, in seconds.
OVERHEAD = 2e-3


@dataclass(frozen=True)
class Device:
    """One or several GPUs that split every layer (tensor parallel).

    Attributes:
        memory: bytes, all GPUs together, as are the others.
        hbm: peak bytes/s of device memory.
        link: peak bytes/s from host memory.
        flops: peak dense bf16 operations/s.
    """

    name: str
    memory: float
    hbm: float
    link: float
    flops: float

    def times(self, gpus: int) -> Device:
        """As many of this device, each with a link of its own."""
        return Device(
            f"{gpus}x {self.name}",
            gpus * self.memory,
            gpus * self.hbm,
            gpus * self.link,
            gpus * self.flops,
        )

    def with_ratio(self, ratio: float) -> Device:
        """The same with a link ``ratio`` times slower than device memory."""
        return replace(self, name=f"{self.name}, {ratio:g}:1", link=self.hbm / ratio)


@dataclass(frozen=True)
class Model:
    """A dense decoder with grouped-query attention, weights and KV in bf16."""

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def weights(self) -> float:
        """Bytes."""
        return 2 * self.parameters

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""
        return 4 * self.layers * self.kv_heads * self.head_dim

    @property
    def pair_flops(self) -> int:
        """Operations of attention for one row and one key."""
        return 4 * self.layers * self.heads * self.head_dim


H100_NVL = Device("H100 NVL", 94 * GiB, 3938 * GB, 64 * GB, 835e12)
RTX_PRO_6000 = Device("RTX PRO 6000", 96 * GiB, 1792 * GB, 64 * GB, 500e12)
GH200 = Device("GH200", 96 * GiB, 4000 * GB, 450 * GB, 990e12)

MISTRAL_24B = Model("Mistral-Small-24B", 23.6e9, 40, 32, 8, 128)
QWEN_32B = Model("Qwen2.5-32B", 32.8e9, 64, 40, 8, 128)
LLAMA_70B = Model("Llama-3.1-70B", 70.6e9, 80, 64, 8, 128)


@dataclass(frozen=True)
class Server:
    """A model on a device."""

    device: Device
    model: Model

    @property
    def capacity(self) -> int:
        """Tokens of KV that fit beside the weights."""
        free = MEMORY_SHARE * self.device.memory - self.model.weights
        return max(int(free / self.model.token_bytes), 0)

    @property
    def kv_share(self) -> float:
        """Share of the usable memory that is left for KV."""
        return 1 - self.model.weights / (MEMORY_SHARE * self.device.memory)

    def with_kv_share(self, share: float) -> Server:
        """The same with as much memory as leaves ``share`` of it for KV."""
        memory = self.model.weights / (1 - share) / MEMORY_SHARE
        return Server(replace(self.device, memory=memory), self.model)

    @property
    def token_seconds(self) -> float:
        """Time to copy one token's KV from host memory."""
        return self.model.token_bytes / (BANDWIDTH_SHARE * self.device.link)

    def seconds(self, rows: int, keys: float, pairs: float) -> float:
        """Time of a forward pass.

        Args:
            rows: token positions computed.
            keys: tokens whose KV is read.
            pairs: rows times the keys each attends to, summed.
        """
        model, device = self.model, self.device
        read = (model.weights + keys * model.token_bytes) / (BANDWIDTH_SHARE * device.hbm)
        flops = 2 * model.parameters * rows + model.pair_flops * pairs
        return OVERHEAD + max(read, flops / (COMPUTE_SHARE * device.flops))

    def draft_seconds(self, batch: int, keys: float) -> float:
        """Time of a pass in which ``batch`` requests bring one row over ``keys`` keys each."""
        return self.seconds(batch, batch * keys, batch * keys)


def expected_accepted(agreement: float, drafts: int) -> float:
    """Drafts accepted on average, p + p^2 + ... + p^k."""
    return sum(agreement**m for m in range(1, drafts + 1))


def agreement_of(accepted: float, drafts: int) -> float:
    """The per-token agreement with which ``accepted`` of ``drafts`` survive on average."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if expected_accepted(middle, drafts) < accepted:
            low = middle
        else:
            high = middle
    return math.fsum((low, high)) / 2
