"""Prometheus metrics ``vericache:storage_*``: what ``SafeStorage`` asked of the remote store."""

from __future__ import annotations

from typing import Any

# Fields of ``StorageCounters``.
TOTALS = {
    "queried": "Objects that the remote store was asked for.",
    "found": "Of those, objects that were there.",
    "read": "Objects read from the remote store that passed their check.",
    "written": "Objects written to the remote store.",
    "bytes_read": "Bytes of objects read.",
    "bytes_written": "Bytes of objects written.",
}
# The same by key, which is a label of that name.
BY_LABEL = {
    "seconds": ("operation", "Time spent in calls to the remote store."),
    "errors": ("reason", "Calls to and objects of the remote store that failed."),
}


class StorageExporter:
    """Publishes what was added to ``SafeStorage.usage`` since the last ``update``.

    Args:
        labels: of the scheduler, as on SGLang's own metrics.
        registry: of prometheus_client, None for its default.
    """

    def __init__(self, labels: dict[str, str], registry: Any = None) -> None:
        from prometheus_client import REGISTRY, Counter

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(
                f"vericache:storage_{name}", text, [*labels, *more], registry=registry or REGISTRY
            )

        self._labels = labels
        self._totals = {name: counter(name, text) for name, text in TOTALS.items()}
        self._by_label = {
            name: (label, counter(name, text, label)) for name, (label, text) in BY_LABEL.items()
        }
        self._published: dict[tuple[str, str], float] = {}

    def update(self, usage: dict[str, Any]) -> None:
        """Publish what is new in ``usage``."""
        for name, metric in self._totals.items():
            self._add(metric, self._labels, (name, ""), usage[name])
        for name, (label, metric) in self._by_label.items():
            for key, value in usage[name].items():
                self._add(metric, self._labels | {label: key}, (name, key), value)

    def _add(
        self, metric: Any, labels: dict[str, str], place: tuple[str, str], value: float
    ) -> None:
        metric.labels(**labels).inc(value - self._published.get(place, 0))
        self._published[place] = value
