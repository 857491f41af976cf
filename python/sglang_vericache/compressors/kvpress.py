"""Any scorer of the package kvpress as a dropper: ``kvpress:KnormPress``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sglang_vericache.compressors.base import KeepsEnds, LayerContext

logger = logging.getLogger(__name__)
FAMILY = "kvpress"
# A press refuses to keep nothing.
LEAST_RATIO = 1e-6
# Shape of the random layer that shows whether a press can do with keys and values.
PROBE_HEADS, PROBE_LENGTH, PROBE_DIM = 2, 600, 16


@dataclass(frozen=True)
class KVPress(KeepsEnds):
    """Keep what a ``ScorerPress`` of https://github.com/NVIDIA/kvpress scores highest, per KV head.

    The press gets keys and values ``[1, HKV, T, D]`` in float32, a ``module`` with ``layer_idx``,
    ``head_dim`` and ``config.num_key_value_heads``, and ``compression_ratio = 1 - ratio``; hidden
    states and attentions are None. Its own parameters keep their defaults. Sinks and recent tokens
    are kept as by every method here.

    Cost a layer: float32 copies of T*HKV*D keys and values, and what the press does. It draws
    random numbers from a generator seeded with ``seed``, not from the server's.
    Limits: presses that need more are refused when the method is created. Never refreshed. The
    first use in a process imports kvpress, which takes seconds and patches the attention functions
    of transformers (SGLang uses those for ``--model-impl transformers`` only).
    """

    per_head: ClassVar[bool] = True
    press: ClassVar[type[Any]]

    ratio: float = 0.1
    seed: int = 0

    def score(self, ctx: LayerContext) -> Tensor:
        """The press's scores ``[HKV, T]``; positions where it cannot score this context."""
        keys = ctx.keys()
        try:
            scores = self._score(ctx.layer, keys, ctx.values())
            if scores.shape == (keys.shape[1], ctx.length):
                return scores
            problem = f"scores {list(scores.shape)}"
        except Exception as error:  # e.g. fewer tokens than it keeps anyway
            problem = f"{type(error).__name__}: {error}"
        logger.warning("%s: %s; the latest tokens are kept", self.name, problem)
        recency = torch.arange(ctx.length, device=keys.device, dtype=torch.float32)
        return recency.expand(keys.shape[1], -1)

    def _score(self, layer: int, keys: Tensor, values: Tensor) -> Tensor:
        config = SimpleNamespace(num_key_value_heads=keys.shape[1])
        module = SimpleNamespace(layer_idx=layer, head_dim=keys.shape[2], config=config)
        press = self.press(compression_ratio=1 - max(self.ratio, LEAST_RATIO))
        k, v = (x.float().transpose(0, 1)[None] for x in (keys, values))
        # Seeding reaches every device's generator.
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.seed)
            return press.score(module, None, k, v, None, {})[0]


@cache
def press_method(press: str) -> type[KVPress]:
    """The method that scores with the class ``press`` of kvpress.

    Raises:
        ValueError: kvpress is missing, has no such scorer, or it needs more than keys and values.
    """
    name = f"{FAMILY}:{press}"
    try:
        import kvpress
    except ImportError as error:
        raise ValueError(
            f"compressor {name!r} needs the package kvpress ({error}); "
            "docs/compressors.md says how to install it"
        ) from error
    cls = getattr(kvpress, press, None)
    if not (isinstance(cls, type) and issubclass(cls, kvpress.ScorerPress)):
        raise ValueError(
            f"unknown compressor {name!r}: kvpress has no such ScorerPress; "
            "docs/compressors.md lists those that can be used"
        )
    members = {"name": name, "press": cls, "__doc__": KVPress.__doc__, "__module__": __name__}
    method = type(press, (KVPress,), members)
    _probe(method())
    return method


def _probe(method: KVPress) -> None:
    """Raise ``ValueError`` unless ``method`` scores a random layer."""
    shape = (PROBE_LENGTH, PROBE_HEADS, PROBE_DIM)
    keys, values = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    try:
        scores = method._score(0, keys, values)
    except Exception as error:
        raise ValueError(
            f"compressor {method.name!r} cannot be used: it needs more than keys and values, such "
            f"as hidden states, attentions or weights ({type(error).__name__}: {error})"
        ) from error
    if scores.shape != (PROBE_HEADS, PROBE_LENGTH):
        raise ValueError(f"compressor {method.name!r} cannot be used: it scores no tokens")
