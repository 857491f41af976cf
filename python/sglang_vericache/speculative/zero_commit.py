"""Iterations in which a request only drafts: it commits nothing, which stock SGLang never sees.

Four places of the scheduler's result path assume at least one committed token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_vericache.hooks import Hook
from sglang_vericache.speculative.algorithm import NAME

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
    from sglang.srt.managers.utils import GenerationBatchResult


def update_finish_state(original: Any, self: Req, new_accepted_len: int = 1) -> None:
    """With nothing new only an abort can finish a request.

    The stock slice ``output_ids[-0:]`` would check the whole output again.
    """
    if new_accepted_len > 0 or self.to_finish:
        original(self, new_accepted_len)


def update_histogram(original: Any, self: Req, num_correct_drafts: int) -> None:
    """A drafting iteration is no verify pass: not a bar of the histogram."""
    if num_correct_drafts >= 0:
        original(self, num_correct_drafts)


def resolve_tokens(
    tokens: list[list[int]], self: Any, result: GenerationBatchResult, batch: ScheduleBatch
) -> None:
    """Take drafting iterations out of the verify counts that the stock function just raised."""
    if batch.spec_algorithm.name != NAME:
        return
    drafting = 0
    for req, accepted in zip(batch.reqs, result.num_correct_drafts_per_req_cpu, strict=True):
        if accepted < 0:
            drafting += 1
            if not (req.is_retracted or req.finished()):
                req.spec_verify_ct -= 1
                req.spec_num_correct_drafts += 1
    # update_spec_metrics is about to add len(batch) passes and sum(accepted) drafts.
    self.metrics_reporter.spec_num_forward_ct -= drafting
    self.metrics_reporter.spec_num_correct_drafts += drafting


def report_decode_stats(
    original: Any, self: SchedulerMetricsReporter, *args: Any, **kwargs: Any
) -> None:
    """Nothing was committed since the last report: its averages would divide by no pass."""
    spec = self.scheduler.spec_algorithm
    if spec.is_none() or spec.name != NAME or self.spec_num_forward_ct > 0:
        original(self, *args, **kwargs)


HOOKS = (
    Hook(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        ("self", "new_accepted_len"),
        "around",
        update_finish_state,
        "checks the whole output when no token is new",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req.update_spec_correct_drafts_histogram",
        ("self", "num_correct_drafts"),
        "around",
        update_histogram,
        "cannot count a pass without a committed token",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        ("self", "result", "batch"),
        "after",
        resolve_tokens,
        "counts a verify pass for every request of every iteration",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.metrics_reporter."
        "SchedulerMetricsReporter.report_decode_stats",
        ("self", "can_run_cuda_graph", "running_batch", "num_generated_tokens"),
        "around",
        report_decode_stats,
        "divides by the verify passes since the last report, which may be none",
    ),
)
