"""The hooks into SGLang: checked against the installed one (case X5), never off unnoticed (X3)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from servers import Server
from sglang_vericache import hooks, plugin
from sglang_vericache.embedded_model import ensure_embedded_model

TARGET = "sglang.srt.server_args.ServerArgs.from_cli_args"
ADMISSION = "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request"
# What SGLang would look like after a release that changed a hooked function.
CHANGED = """
from sglang.srt.server_args import ServerArgs
ServerArgs.from_cli_args = classmethod(lambda cls, namespace, extra=None: cls(model_path="x"))
"""
# SGLang logs that a hook could not be applied, and goes on without it.
NOT_APPLIED = f"""
from sglang.srt.plugins.hook_registry import HookRegistry
apply = HookRegistry._apply_target
def fail_once(target, hooks):
    if target == {ADMISSION!r}:
        raise RuntimeError("some reason")
    apply(target, hooks)
HookRegistry._apply_target = fail_once
"""
START = """
import runpy, sys
sys.argv = ["launch_server", "--model-path", "nowhere", "--vericache-ratio", "0.1"]
runpy.run_module("sglang_vericache.launch_server", run_name="__main__")
"""


def test_the_table_fits_the_installed_sglang():
    assert hooks.problems(plugin.table()) == []


def test_a_changed_signature_is_named():
    """Negative control of the one above."""
    (entry,) = (hook for hook in plugin.table() if hook.target == TARGET)
    other = hooks.Hook(entry.target, ("cls", "namespace"), entry.kind, entry.function, entry.why)
    gone = hooks.Hook("sglang.srt.server_args.Gone", (), "after", entry.function, "")
    found = hooks.problems([other, gone])
    assert len(found) == 2
    assert TARGET in found[0] and "namespace" in found[0]
    assert "Gone" in found[1]


@pytest.mark.slow
def test_a_broken_hook_ends_the_start_with_the_reason():
    done = subprocess.run(
        [sys.executable, "-c", CHANGED + START], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    assert "this SGLang is not supported" in done.stderr
    assert TARGET in done.stderr


@pytest.mark.slow
def test_a_hook_that_was_not_applied_ends_the_start_with_the_reason():
    """In the process that takes requests; the scheduler checks the same."""
    done = subprocess.run(
        [sys.executable, "-c", NOT_APPLIED + START], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    assert "some reason" in done.stderr, "precondition: SGLang has logged it"
    assert f"hooks were not applied: {ADMISSION}" in done.stderr


def test_the_scheduler_makes_no_worker_without_its_hooks(monkeypatch):
    from sglang_vericache.speculative import algorithm

    made = {}
    register = lambda name, **_: lambda factory: made.setdefault(name, factory)  # noqa: E731
    monkeypatch.setattr(algorithm.SpeculativeAlgorithm, "register", register)
    algorithm.register_algorithm(check=hooks.assert_applied)
    monkeypatch.setattr(hooks, "_registered", [])
    assert made["VERICACHE"](None).__name__ == "VeriCacheWorker"
    monkeypatch.setattr(hooks, "_registered", ["sglang.no.such.function"])
    with pytest.raises(RuntimeError, match=r"not applied: sglang\.no\.such\.function"):
        made["VERICACHE"](None)


@pytest.mark.slow
def test_a_plugin_that_is_left_out_ends_the_start_with_the_reason():
    done = subprocess.run(
        [sys.executable, "-c", START],
        env={**os.environ, "SGLANG_PLUGINS": "another"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert "SGLANG_PLUGINS" in done.stderr


@pytest.mark.slow
def test_another_version_ends_the_start_with_the_reason():
    program = 'import sglang\nsglang.__version__ = "0.5.99"\n' + START
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    assert "sglang 0.5.99 is installed, 0.5.23 is supported" in done.stderr


@pytest.mark.slow
def test_sglang_serve_is_active():
    """Without AMX (case X1): this CPU has none, or the test proves nothing about that."""
    command = [
        *(str(Path(sys.executable).parent / "sglang"), "serve"),
        *("--model-path", str(ensure_embedded_model()), "--max-total-tokens", "8192"),
        *("--vericache-draft-len", "4", "--vericache-compressor", "streaming"),
    ]
    with Server(command, name="serve") as server:
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        body = {"text": "The capital of France is" * 40, "sampling_params": sampling}
        answer = requests.post(f"{server.url}/generate", json=body, timeout=120).json()
        status = requests.get(f"{server.url}/vericache", timeout=30).json()
    assert answer["meta_info"]["vericache"]["drafted"] > 0
    assert status["config"]["compressor"] == "streaming"
    if "amx_tile" in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has AMX, so starting without it was not tested")
