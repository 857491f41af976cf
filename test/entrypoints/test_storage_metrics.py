"""Prometheus metrics follow the counters of the remote store."""

from dataclasses import fields

from prometheus_client import CollectorRegistry

from sglang_vericache.entrypoints.storage_metrics import BY_LABEL, TOTALS, StorageExporter
from sglang_vericache.mem_cache.storage_guard import StorageCounters

LABELS = {"model_name": "m", "tp_rank": "0"}


def test_metrics_follow_the_counters():
    registry = CollectorRegistry()
    counters, exporter = StorageCounters(), StorageExporter(LABELS, registry)

    def value(name, **more):
        return registry.get_sample_value(f"vericache:storage_{name}_total", LABELS | more)

    for step in range(1, 4):
        counters.read += step
        counters.bytes_written += 1000
        counters.seconds["read"] += 0.5
        counters.errors["read_corrupt"] += 1
        exporter.update(vars(counters))
        assert value("read") == counters.read
        assert value("bytes_written") == counters.bytes_written
        assert value("seconds", operation="read") == counters.seconds["read"]
        assert value("errors", reason="read_corrupt") == step
    exporter.update(vars(counters))
    assert value("read") == 6 and value("errors", reason="read_corrupt") == 3


def test_every_counter_has_a_metric():
    assert {field.name for field in fields(StorageCounters)} == {*TOTALS, *BY_LABEL}
