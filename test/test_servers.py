"""``benchmark/servers.py``: nothing outlives the process that started it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

# Answers /health, and has a child that no parent's death ends.
LAUNCHER = """
import http.server, subprocess, sys
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Healthy).serve_forever()
"""
STARTER = """
import pathlib, sys, time
from servers import Server
with Server([sys.executable, "-c", sys.argv[1]], log=pathlib.Path(sys.argv[2])):
    print("up", flush=True)
    time.sleep(600)
"""


def test_sigterm_ends_everything(tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", STARTER, LAUNCHER, str(log)]
    path = str(Path(__file__).parent.parent / "benchmark")
    starter = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout.readline() == "up\n"
    child = psutil.Process(int(log.read_text().split()[0]))
    assert child.is_running()
    starter.send_signal(signal.SIGTERM)
    assert starter.wait(30) != 0
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "left behind"
        time.sleep(0.05)
