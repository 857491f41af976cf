"""Start a server as a process group, wait until it is healthy, measure its memory, stop it.

Knows processes and HTTP, no engine: benchmarks and tests hand in the command line.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

HOST = "127.0.0.1"
STOP_SECONDS = 20.0
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class ServerFailed(RuntimeError):
    """A server ended or stayed unhealthy; the message holds the tail of its log."""


@dataclass(frozen=True)
class Memory:
    """Memory of a process tree in bytes.

    Attributes:
        pss: proportional set size now: a page shared by n processes counts 1/n in each.
        peak_rss: sum of every process's highest resident set; counts shared pages repeatedly.
    """

    pss: int
    peak_rss: int


def free_port() -> int:
    """A TCP port that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


class Server:
    """A server process and everything it spawns; use as a context manager.

    Args:
        command: command line without host and port, which are appended as ``--host --port``.
        env: added to this process's environment.
        name: for messages.
        timeout: seconds until ``/health`` must answer 200.
        log: where stdout and stderr go; a temporary file by default, removed after a clean stop.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        name: str = "server",
        timeout: float = 600.0,
        port: int | None = None,
        log: Path | None = None,
    ):
        self.name = name
        self.port = port or free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.command = [*command, "--host", HOST, "--port", str(self.port)]
        self._env = {**os.environ, **(env or {})}
        self._timeout = timeout
        self._keep_log = log is not None
        self.log = log or Path(tempfile.mkstemp(prefix=f"{name}-", suffix=".log")[1])
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        if kind is None and not self._keep_log:
            self.log.unlink(missing_ok=True)
        elif kind is not None:
            print(f"[{self.name}] log: {self.log}", file=sys.stderr)

    @property
    def pid(self) -> int:
        """Process id of the launcher, which leads the group."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Start and wait until healthy.

        Raises:
            ServerFailed: it ended or did not become healthy in time; it is stopped then.
        """
        _end_in_order_on_sigterm()
        with self.log.open("wb") as log:
            self._process = self._spawn(log)
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise

    def stop(self, grace: float = STOP_SECONDS) -> None:
        """End the whole group: SIGTERM, and SIGKILL for what is left after ``grace`` seconds."""
        if self._process is None:
            return
        group, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while time.monotonic() < deadline:
                group.poll()
                os.killpg(group.pid, 0)
                time.sleep(0.1)
            os.killpg(group.pid, signal.SIGKILL)
        group.wait()

    def tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def memory(self) -> Memory:
        """Memory of the launcher and all its descendants."""
        launcher = psutil.Process(self.pid)
        pss = peak = 0
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, FileNotFoundError, ProcessLookupError):
                pss += process.memory_full_info().pss
                peak += _peak_rss(process.pid)
        return Memory(pss, peak)

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        started = time.monotonic()
        while not _healthy(self.url):
            if (status := self._process.poll()) is not None:
                raise ServerFailed(f"{self.name} ended with status {status}:\n{self.tail()}")
            if time.monotonic() - started > self._timeout:
                raise ServerFailed(
                    f"{self.name} was not healthy after {self._timeout:.0f} s:\n{self.tail()}"
                )
            time.sleep(0.3)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            return response.status == 200
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return False


def _end_in_order_on_sigterm() -> None:
    """Have SIGTERM end this process as an exception does, unless it means something else here.

    A launcher that dies with its parent leaves SGLang's detokenizer behind.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _die_with_parent() -> None:
    """Runs in the child: a killed benchmark leaves no server behind."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _peak_rss(pid: int) -> int:
    """``VmHWM`` of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
