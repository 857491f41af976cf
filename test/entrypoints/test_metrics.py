"""Prometheus metrics follow the counters."""

import pytest
from prometheus_client import CollectorRegistry

from sglang_vericache.core import Counters
from sglang_vericache.entrypoints.metrics import MetricsExporter, rounds_by_length

LABELS = {"model_name": "m", "tp_rank": "0"}


@pytest.fixture
def registry():
    return CollectorRegistry()


def test_totals_follow_the_counters(registry):
    counters, exporter = Counters(), MetricsExporter(LABELS, registry)

    def value(name):
        return registry.get_sample_value(f"vericache:{name}", LABELS)

    for drafted, accepted in ((4, 3), (4, 0), (0, 0), (1, 1)):
        counters.record_verify(drafted, accepted)
        counters.kv_bytes_read += 100
        exporter.update(counters)
        assert value("drafted_tokens_total") == counters.drafted
        assert value("accepted_tokens_total") == counters.accepted
        assert value("verify_passes_total") == counters.verify_passes
        assert value("plain_passes_total") == counters.plain_passes
        assert value("kv_bytes_read_total") == counters.kv_bytes_read
    assert counters.drafted == 9 and counters.accepted == 4
    exporter.update(counters)
    assert value("drafted_tokens_total") == 9  # nothing is counted twice


def test_acceptance_by_position(registry):
    counters, exporter = Counters(), MetricsExporter(LABELS, registry)
    for drafted, accepted in ((3, 2), (3, 0), (1, 1)):
        counters.record_verify(drafted, accepted)
        exporter.update(counters)

    def at(name, position):
        labels = LABELS | {"position": str(position)}
        return registry.get_sample_value(f"vericache:{name}_at_position_total", labels)

    assert [at("drafted", position) for position in range(4)] == [3, 2, 2, None]
    assert [at("accepted", position) for position in range(4)] == [2, 1, None, None]


def test_draft_length_histogram(registry):
    counters, exporter = Counters(), MetricsExporter(LABELS, registry)
    for drafted in (4, 4, 0, 1, 64):
        counters.record_verify(drafted, 0)
    exporter.update(counters)
    counters.record_verify(2, 2)
    exporter.update(counters)

    def at_most(length):
        labels = LABELS | {"le": f"{length}.0"}
        return registry.get_sample_value("vericache:draft_length_bucket", labels)

    assert [at_most(n) for n in (0, 1, 2, 3, 4, 48, 64)] == [1, 2, 3, 3, 5, 5, 6]
    assert registry.get_sample_value("vericache:draft_length_sum", LABELS) == 75
    assert rounds_by_length(counters)[4] == 2
