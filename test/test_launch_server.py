"""Defaults of ``python -m sglang_vericache.launch_server``: only for what nobody asked for."""

import pytest

from sglang_vericache import embedded_model
from sglang_vericache.launch_server import server_argv

MODEL = ["--model-path", "embedded"]
ON = ["--vericache", "on"]


@pytest.fixture(autouse=True)
def embedded(monkeypatch):
    monkeypatch.setattr(embedded_model, "ensure_embedded_model", lambda: "embedded")


@pytest.mark.parametrize(
    ("argv", "added"),
    [
        ([], MODEL + ON),
        (["--model", "m"], ON),
        (["--model-path=m", "--vericache=off"], []),
        (["--vericache", "off"], MODEL),
        (["--help"], []),
    ],
)
def test_flags(argv, added):
    assert server_argv(argv) == argv + added


@pytest.mark.parametrize(
    ("text", "added"),
    [
        ("vericache: 'off'", MODEL),
        ("vericache_ratio: 0.2", MODEL + ON),
        ("model-path: m\nvericache: 'off'", []),
        ("model_path: m", ON),
        ("", MODEL + ON),
    ],
)
def test_a_config_file_says_it_too(text, added, tmp_path):
    """A flag would take precedence over the file."""
    path = tmp_path / "server.yaml"
    path.write_text(text)
    argv = ["--port", "1", "--config", str(path)]
    assert server_argv(argv) == argv + added


def test_a_config_file_that_is_not_there():
    with pytest.raises(ValueError, match="not found"):
        server_argv(["--config", "nowhere.yaml"])
