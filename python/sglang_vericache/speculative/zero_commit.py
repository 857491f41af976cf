"""Iterations that commit no token or several, where stock SGLang's result path expects one.

A drafting iteration commits nothing, which stock never sees. A verify pass commits a run of tokens,
which stock checks for stops as a whole, in another order than plain decoding would.
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
    """Check the new tokens one by one, as plain decoding does.

    With nothing new only an abort can finish a request: the stock slice ``output_ids[-0:]`` would
    check the whole output again. Of several new tokens stock looks for stop strings first, so a
    string behind an end of sequence, or a later string of another place in the list, would win.
    """
    if not _drafting_server() or new_accepted_len == 1 or self.to_finish or self.finished():
        original(self, new_accepted_len)
        return
    if new_accepted_len == 0:
        return
    run = self.output_ids[-new_accepted_len:]
    del self.output_ids[-new_accepted_len:]
    # The grammar stands behind the whole run already.
    grammar, self.grammar = self.grammar, None
    for i, token in enumerate(run):
        self.output_ids.append(token)
        if i == len(run) - 1:
            self.grammar = grammar
        original(self, 1)
        if self.finished():
            if self.finished_len is None:
                self.finished_len = len(self.output_ids)
            self.output_ids.extend(run[i + 1 :])
            break
    self.grammar = grammar


def _drafting_server() -> bool:
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm == NAME


def accept_output(original: Any, self: Any, *, req: Req) -> None:
    """Stream a request only when it has something new or is done.

    With a stream interval of 1 stock sends a chunk every iteration, drafting ones included.
    """
    spec = self.spec_algorithm
    nothing_new = len(req.output_ids) == req.send_token_offset and not req.finished()
    if nothing_new and not spec.is_none() and spec.name == NAME:
        return
    original(self, req=req)


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
        "checks the whole output for no new token, and several in another order than one by one",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.output_streamer."
        "_GenerationStreamAccumulator.accept",
        ("self", "req"),
        "around",
        accept_output,
        "sends an empty chunk for an iteration without new tokens",
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
