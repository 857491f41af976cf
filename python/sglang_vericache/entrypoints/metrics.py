"""Prometheus metrics ``vericache:*`` on ``/metrics`` (``--enable-metrics``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_vericache.core import Counters
from sglang_vericache.entrypoints.storage_metrics import StorageExporter
from sglang_vericache.hooks import Hook

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter

# Name without prefix -> help text; each is a field of ``Counters`` followed by "_total".
TOTALS = {
    "drafted": "Tokens drafted, from compressed KV or the request's own text, and verified.",
    "accepted": "Drafted tokens that the full KV confirmed.",
    "verify_passes": "Verify passes: a request's drafts against its full KV.",
    "plain_passes": "Passes of a request over its full KV without drafts.",
    "kv_bytes_read": "Bytes of KV cache read by attention in decoding.",
    "offloads": "Times a request left its full KV to host memory.",
    "stages": "Verify passes of such requests that nothing was copied ahead for.",
    "staged_tokens": "Tokens whose KV was copied back from host memory for those.",
    "copied_ahead": "Tokens whose KV was copied back before the pass that needs it was due.",
    "waits": "Iterations that such a request waited for room on the device.",
    "late": "Iterations that such a request waited for the copy of its full KV.",
    "host_reads": "Tokens of full KV that verify passes read in host memory, copying nothing.",
    "returns": "Requests that left their full KV to host memory and came back for good.",
    "provisional": "Requests that drafted while a store delivered their full KV.",
    "proposed": "Tokens drafted so.",
    "unpacked": "Draft views that found no room in the pool of packed KV.",
    "looked_up": "Drafts that were found in the request's own text.",
    "looked_up_accepted": "Drafts found in the request's own text that were accepted.",
    "probed": "Tokens found in the request's own text that draft passes checked.",
    "probed_agreed": "Tokens so checked that became drafts.",
}
NAMES = {"drafted": "drafted_tokens", "accepted": "accepted_tokens"}
# The same by place in the draft, label ``position`` from 0.
BY_POSITION = {
    "drafted_at": ("drafted_at_position", "Drafts at a position that were verified."),
    "accepted_at": ("accepted_at_position", "Drafts at a position that the full KV confirmed."),
}
LENGTH_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class MetricsExporter:
    """Publishes what was added to ``Counters`` since the last ``update``.

    Acceptance is the ratio of two of them:
    ``rate(vericache:accepted_tokens_total[5m]) / rate(vericache:drafted_tokens_total[5m])``.

    Args:
        labels: of the scheduler, as on SGLang's own metrics.
        registry: of prometheus_client, None for its default.
    """

    def __init__(self, labels: dict[str, str], registry: Any = None) -> None:
        # NOTE: prometheus_client chooses its multi-process mode when it is first imported, from
        # an environment variable that SGLang sets while it starts.
        from prometheus_client import REGISTRY, Counter, Histogram

        registry = registry or REGISTRY
        self._totals = {
            field: Counter(
                f"vericache:{NAMES.get(field, field)}", text, labels.keys(), registry=registry
            ).labels(**labels)
            for field, text in TOTALS.items()
        }
        self._lengths = Histogram(
            "vericache:draft_length",
            "Tokens drafted before a pass over the full KV; 0 is plain decoding.",
            labels.keys(),
            buckets=LENGTH_BUCKETS,
            registry=registry,
        ).labels(**labels)
        self._by_position = {
            field: Counter(f"vericache:{name}", text, [*labels, "position"], registry=registry)
            for field, (name, text) in BY_POSITION.items()
        }
        self._labels = labels
        self._published: dict[str, int] = dict.fromkeys(TOTALS, 0)
        self._published_at: dict[tuple[str, int], int] = {}
        self._observed: dict[int, int] = {}

    def update(self, counters: Counters) -> None:
        """Publish what is new in ``counters``; some tens of microseconds."""
        for field, total in self._totals.items():
            value = getattr(counters, field)
            total.inc(value - self._published[field])
            self._published[field] = value
        for field, by_position in self._by_position.items():
            for position, value in getattr(counters, field).items():
                known = self._published_at.get((field, position), 0)
                if value > known:
                    by_position.labels(**self._labels, position=position).inc(value - known)
                    self._published_at[field, position] = value
        rounds = rounds_by_length(counters)
        for length, count in rounds.items():
            for _ in range(count - self._observed.get(length, 0)):
                self._lengths.observe(length)
        self._observed = rounds


def rounds_by_length(counters: Counters) -> dict[int, int]:
    """How many passes over the full KV verified a draft of each length; 0 is plain decoding."""
    at = counters.drafted_at
    return {0: counters.plain_passes} | {m + 1: n - at[m + 1] for m, n in at.items()}


def publish(result: None, self: SchedulerMetricsReporter, *args: Any, **kwargs: Any) -> None:
    """``SchedulerMetricsReporter.update_spec_metrics`` after: once per decode iteration."""
    from sglang_vericache.mem_cache.storage_hooks import storage_of

    counters = getattr(self.scheduler.draft_worker, "counters", None)
    if not self.current_scheduler_metrics_enabled or not isinstance(counters, Counters):
        return
    if not hasattr(self, "vericache_exporter"):
        self.vericache_exporter = MetricsExporter(self.metrics_collector.labels)
    self.vericache_exporter.update(counters)
    if (storage := storage_of(self.scheduler.tree_cache)) is not None:
        if not hasattr(self, "vericache_storage_exporter"):
            self.vericache_storage_exporter = StorageExporter(self.metrics_collector.labels)
        self.vericache_storage_exporter.update(storage.usage())


HOOKS = (
    Hook(
        "sglang.srt.managers.scheduler_components.metrics_reporter."
        "SchedulerMetricsReporter.update_spec_metrics",
        (
            "self",
            "bs",
            "num_correct_drafts",
            "num_accept_tokens",
            "num_block_accept_tokens",
            "num_cap_tokens",
        ),
        "after",
        publish,
        "no door for metrics of a plugin",
    ),
)
