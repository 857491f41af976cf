"""Runs triton_cases.py in its own process: see there why."""

import os
import subprocess
import sys
from pathlib import Path

import torch


def test_triton_kernels():
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    cases = Path(__file__).with_name("triton_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
