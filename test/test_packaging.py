"""The wheel prepares every interpreter of the environment it is installed in."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
PTH = "sglang_vericache.pth"
PROBE = """
import site, sys
before = set(sys.modules)
site.addsitedir(sys.argv[1])
prepared = any(getattr(f, "__name__", "") == "_PlainCpuFinder" for f in sys.meta_path)
heavy = {"torch", "sglang", "numpy"} & (set(sys.modules) - before)
print(prepared, sorted(heavy))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the sources: building leaves files behind."""
    root = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in"):
        shutil.copy(REPO / name, root)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(REPO / "python", root / "python", ignore=ignored)
    return root


def build(source, kind):
    """Build a wheel the way pip does; ``kind`` is ``wheel`` or ``editable``."""
    code = f"import setuptools.build_meta as b; print(b.build_{kind}('{kind}'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, check=True, capture_output=True, text=True
    )
    return source / kind / done.stdout.splitlines()[-1]


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_pth_is_beside_the_package(source, kind):
    with zipfile.ZipFile(build(source, kind)) as wheel:
        if kind == "wheel":
            assert "sglang_vericache/entrypoints/ui.html" in wheel.namelist()
            model = "SmolLM2-135M-Instruct.json"
            assert f"sglang_vericache/calibrations/{model}" in wheel.namelist()
        assert wheel.read(PTH).decode() == (REPO / "python" / PTH).read_text()
        record = next(name for name in wheel.namelist() if name.endswith("RECORD"))
        assert PTH in wheel.read(record).decode()  # uninstalling removes it


def test_installed_wheel_prepares_an_interpreter(source, tmp_path):
    with zipfile.ZipFile(build(source, "wheel")) as wheel:
        wheel.extractall(tmp_path)

    def probe(site, **environment):
        command = [sys.executable, "-I", "-S", "-c", PROBE, str(site)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.stderr == ""
        return done.stdout.strip()

    assert probe(tmp_path, SGLANG_USE_CPU_ENGINE="1") == "True []"
    assert probe(tmp_path / "sglang_vericache", SGLANG_USE_CPU_ENGINE="1") == "False []"
