"""Where SGLang's sampling is replaced; inert on a server without VeriCache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_server_args

from sglang_vericache.config import config_of
from sglang_vericache.hooks import Hook
from sglang_vericache.sampling.requests import adjust_from_schedule_batch

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


def create_sampler(original: Any, backend: str | None = None) -> Sampler:
    """``create_sampler`` around: rows of a VeriCache server are sampled one by one."""
    if config_of(get_server_args()) is None:
        return original(backend)
    from sglang_vericache.sampling.sampler import RowSampler

    return RowSampler()


def adjusted_from_schedule_batch(
    result: None, self: SamplingBatchInfo, batch: ScheduleBatch, vocab_size: int
) -> None:
    """``SamplingBatchInfo.adjusted_from_schedule_batch`` after: seeds and restored penalties."""
    if config_of(get_server_args()) is not None:
        adjust_from_schedule_batch(self, batch, vocab_size)


def apply_penalties(original: Any, self: SamplingBatchInfo, logits: torch.Tensor) -> None:
    """``SamplingBatchInfo._apply_pre_grammar_logits_transforms`` around: add penalties as one sum.

    Without overlap scheduling stock subtracts them one after another, in the order of a set of
    classes, so their rounding differs from process to process and from ``penalties.py``.
    """
    orchestrator = self.penalizer_orchestrator
    on = config_of(get_server_args()) is not None
    if not on or orchestrator is None or not orchestrator.is_required:
        original(self, logits)
        return
    self.update_penalties()
    self.penalizer_orchestrator = None
    try:
        original(self, logits)
    finally:
        self.penalizer_orchestrator = orchestrator
        self.acc_additive_penalties = self.acc_scaling_penalties = None


HOOKS = (
    Hook(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo."
        "_apply_pre_grammar_logits_transforms",
        ("self", "logits"),
        "around",
        apply_penalties,
        "the rounding of mixed penalties depends on the order of a set",
    ),
    Hook(
        "sglang.srt.layers.sampler.create_sampler",
        ("backend",),
        "around",
        create_sampler,
        "the stock sampler's result for a row depends on the rest of the batch",
    ),
    Hook(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch",
        ("self", "batch", "vocab_size"),
        "after",
        adjusted_from_schedule_batch,
        "seeds are ignored and a retracted request's penalties forgotten",
    ),
)
