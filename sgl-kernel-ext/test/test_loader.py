"""Which module is picked, what is refused, and what happens when nothing was built."""

import json
import logging
import os
import subprocess
import sys

import pytest

from sgl_kernel_ext import _loader

PROBE = "import json, sgl_kernel_ext as s; print(json.dumps(s.active()))"


def probe(**env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch):
    monkeypatch.delenv("SGL_KERNEL_EXT_ISA", raising=False)
    monkeypatch.delenv("SGL_KERNEL_EXT_FORCE", raising=False)
    _loader.cpu_module.cache_clear()
    yield
    _loader.cpu_module.cache_clear()


def test_best_built_isa_is_active():
    built = [isa for isa in _loader.supported_isas() if _loader._is_built(isa)]
    assert built, "precondition: the extension is built"
    active = _loader.active()
    assert active["isa"] == built[0]
    assert active["cpu_backend"] == "cpp"
    assert active["module"].startswith(f"_C_{built[0]}.")
    assert active["threads"] >= 1


def test_forced_isa_is_the_one_in_use(monkeypatch):
    built = [isa for isa in _loader.supported_isas() if _loader._is_built(isa)]
    monkeypatch.setenv("SGL_KERNEL_EXT_ISA", built[-1])
    assert _loader.active()["isa"] == built[-1]


def test_unknown_isa_names_variable_and_values(monkeypatch):
    monkeypatch.setenv("SGL_KERNEL_EXT_ISA", "sse9")
    with pytest.raises(ValueError, match=r"SGL_KERNEL_EXT_ISA='sse9'.*avx512_bf16.*generic"):
        _loader.cpu_module()


def test_isa_the_cpu_lacks_is_refused(monkeypatch):
    monkeypatch.setenv("SGL_KERNEL_EXT_ISA", "avx2")
    monkeypatch.setattr(_loader, "_cpu_flags", lambda: frozenset({"sse2"}))
    assert _loader.supported_isas() == ["generic"]
    with pytest.raises(ValueError, match=r"SGL_KERNEL_EXT_ISA='avx2'.*lacks .*fma"):
        _loader.cpu_module()


def test_one_warning_when_nothing_is_built(monkeypatch, caplog):
    monkeypatch.setattr(_loader, "_is_built", lambda isa: False)
    with caplog.at_level(logging.WARNING):
        assert _loader.cpu_module() is None
        assert _loader.cpu_module() is None
    assert len(caplog.records) == 1
    assert "pip install --no-build-isolation" in caplog.text
    assert _loader.active()["cpu_backend"] == "reference"


def test_module_that_does_not_load_is_reported(monkeypatch, caplog):
    def fail(isa):
        raise ImportError("undefined symbol: torch_of_another_version")

    monkeypatch.setattr(_loader, "_is_built", lambda isa: True)
    monkeypatch.setattr(_loader, "load_isa", fail)
    with caplog.at_level(logging.WARNING):
        assert _loader.cpu_module() is None
    assert "torch_of_another_version" in caplog.text


def test_force_reference_in_a_fresh_process():
    active = json.loads(probe(SGL_KERNEL_EXT_FORCE="reference").stdout)
    assert active["cpu_backend"] == "reference"
    assert active["isa"] is None


def test_other_forced_value_is_refused():
    failed = probe(SGL_KERNEL_EXT_FORCE="fast")
    assert failed.returncode != 0
    assert "SGL_KERNEL_EXT_FORCE='fast'" in failed.stderr


def test_no_second_openmp_runtime():
    """Two OpenMP runtimes would each keep a thread pool and fight over the cores."""
    script = (
        "import sgl_kernel_ext as s, torch\n"
        "s.linear(torch.ones(64, 512), s.pack_weight(torch.ones(512, 512)))\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "print(*{p for p in maps if 'gomp' in p or 'iomp' in p or 'libomp' in p}, sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert len(done.stdout.split()) == 1, done.stdout + done.stderr
