"""Streaming sessions: the next turn may only inherit KV that was computed exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_vericache.hooks import Hook

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def keep_exact_kv(original: Any, self: Any, req: Req) -> bool:
    """``StreamingSession.try_cache_finished_req`` around: leave out the last output token.

    Its KV is computed only by the pass that would have followed. Stock counts it in, and relies on
    the slots allocated to leave it out; slots reserved for drafts hold a rejected draft there.
    """
    kv = req.kv
    exact = len(req.origin_input_ids) + max(len(req.output_ids) - 1, 0)
    kept = original(self, req)
    if kept:
        kv.kv_committed_len = min(kv.kv_committed_len, exact)
    return kept


HOOKS = (
    Hook(
        "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req",
        ("self", "req"),
        "around",
        keep_exact_kv,
        "takes a slot reserved for a draft for the KV of the last output token",
    ),
)
