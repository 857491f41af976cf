"""Settings, budgets and the registry refuse clearly."""

import pytest

from sglang_vericache import compressors
from sglang_vericache.compressors import Settings
from sglang_vericache.core import Budget


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ratio", 0.0),
        ("ratio", -0.5),
        ("ratio", 1.01),
        ("ratio", float("nan")),
        ("ratio", "0.1"),
        ("ratio", True),
        ("min_tokens", -1),
        ("sinks", -1),
        ("window", 0),
        ("window", 2.5),
        ("recent", -0.1),
        ("recent", 1.1),
        ("kernel", 0),
        ("kernel", 4),
    ],
)
def test_invalid_settings_name_the_field(field, value):
    with pytest.raises(ValueError, match=field):
        Settings(**{field: value})


@pytest.mark.parametrize(
    ("field", "kind"), [("window", "whole number"), ("seed", "whole number"), ("recent", "number")]
)
def test_the_kind_of_a_setting_is_named(field, kind):
    with pytest.raises(ValueError, match=f"{field} must be a {kind}, not '1'"):
        Settings(**{field: "1"})


def test_a_request_may_narrow():
    narrowed = Settings(ratio=0.2, window=32).narrowed({"ratio": 0.1, "window": 8})
    assert (narrowed.ratio, narrowed.window, narrowed.kernel) == (0.1, 8, Settings().kernel)


@pytest.mark.parametrize("changes", [{"ratio": 0.3}, {"seed": 1}, {"colour": 1}, {"ratio": None}])
def test_a_request_may_not_widen_or_invent(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        Settings(ratio=0.2).narrowed(changes)


@pytest.mark.parametrize(
    ("ratio", "floor", "length", "expected"),
    [(0.1, 0, 1000, 100), (0.1, 0, 1, 1), (0.1, 0, 0, 0), (0.1, 128, 100, 100), (1.0, 0, 7, 7)],
)
def test_budget(ratio, floor, length, expected):
    assert Budget(ratio, floor).tokens(length) == expected


def test_unknown_name_lists_the_supported():
    with pytest.raises(ValueError, match=r"'snapk'.*identity.*snapkv-per-head.*streaming"):
        compressors.create("snapk", Settings())


def test_a_name_cannot_be_taken_twice():
    class Thief(type(compressors.create("identity", Settings()))):
        pass

    with pytest.raises(ValueError, match="identity"):
        compressors.register(Thief)


def test_methods_take_the_settings_they_declare():
    snapkv = compressors.create("snapkv", Settings(window=8, kernel=7, sinks=2))
    assert (snapkv.window, snapkv.kernel, snapkv.sinks) == (8, 7, 2)
    assert compressors.create("streaming", Settings(sinks=1)).sinks == 1
