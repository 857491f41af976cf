"""The nouns: counters add up, and importing them loads neither torch nor the engine."""

import subprocess
import sys

import pytest

from sglang_vericache.core import Counters


def test_counters_by_position():
    counters = Counters()
    for drafted, accepted in [(3, 3), (3, 1), (2, 0), (0, 0)]:
        counters.record_verify(drafted, accepted)
    assert (counters.drafted, counters.accepted) == (8, 4)
    assert (counters.verify_passes, counters.plain_passes) == (3, 1)
    assert counters.acceptance == 0.5
    assert counters.acceptance_by_position() == [2 / 3, 1 / 3, 1 / 2]


def test_counters_refuse_more_accepted_than_drafted():
    with pytest.raises(AssertionError):
        Counters().record_verify(1, 2)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("core", ["torch", "sglang"]),
        ("scheduler", ["torch", "sglang"]),
        ("compressors", ["sglang", "sgl_kernel_ext"]),
    ],
)
def test_layers_do_not_import_upwards(module, forbidden):
    loaded = f"[m for m in {forbidden} if m in sys.modules]"
    code = f"import sys, sglang_vericache.{module}; print({loaded})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
