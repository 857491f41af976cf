"""Runs a Mooncake store on this machine: a master, and a segment of memory that it hands out.

For trying and testing the remote tier (docs/remote.md) over TCP. Prints the flags for a server when
the store is ready, runs until SIGTERM or SIGINT, and ends with its processes. Needs only the
standard library and the package it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
START_SECONDS = 30.0
STOP_SECONDS = 5.0
INSTALL = """Mooncake {problem}. To install it:
  pip install 'sglang-vericache[storage]'   (or mooncake-transfer-engine, the build with CUDA)
  apt-get install libcurl4 libibverbs1 libnuma1 librdmacm1"""


# With their logs.
Processes = dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]]


class Stopped(Exception):
    """A signal asked for the end."""


def main() -> None:
    args = parse()
    binaries = locate()
    address = f"{args.host}:{args.port}"
    master = [
        *(str(binaries / "mooncake_master"), f"--rpc_address={args.host}"),
        *(f"--rpc_port={args.port}", f"--metrics_host={args.host}"),
        *(f"--metrics_port={args.metrics_port}", "--enable_metric_reporting=false"),
    ]
    segment = [
        *(str(binaries / "mooncake_client"), f"--host={args.host}", f"--port={args.segment_port}"),
        *(f"--global_segment_size={args.size}", f"--master_server_address={address}"),
        *("--metadata_server=P2PHANDSHAKE", "--protocol=tcp"),
    ]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with contextlib.ExitStack() as stack, contextlib.suppress(Stopped):
        processes: Processes = {}
        for name, command in {"master": master, "segment": segment}.items():
            log = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=end_with_parent
            )
            stack.callback(end, process)
            processes[name] = (process, log)
            await_port(args.host, args.port, processes)
        await_segment(f"http://{args.host}:{args.metrics_port}/get_all_segments", processes)
        print(shlex.join(flags(address, args.host)), flush=True)
        while True:
            check(processes)
            time.sleep(0.5)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=50051, help="of the master")
    parser.add_argument("--metrics-port", type=int, default=50052, help="of its HTTP server")
    parser.add_argument("--segment-port", type=int, default=50053, help="of the segment")
    parser.add_argument("--size", default="4 GB", help="memory of the segment (default: 4 GB)")
    return parser.parse_args()


def locate() -> Path:
    """Folder of Mooncake's programs.

    Raises:
        SystemExit: it is not installed, or cannot run; says what to install.
    """
    package = importlib.util.find_spec("mooncake")
    if package is None or package.origin is None:
        sys.exit(INSTALL.format(problem="is not installed"))
    folder = Path(package.origin).parent
    for name in ("mooncake_master", "mooncake_client"):
        done = subprocess.run([str(folder / name), "--version"], capture_output=True, text=True)
        if done.returncode:
            sys.exit(INSTALL.format(problem=f"does not run ({done.stderr.strip()})"))
    return folder


def flags(address: str, host: str) -> list[str]:
    """Command line of a server that uses the store and lends it no memory of its own."""
    config = {
        "master_server_address": address,
        "metadata_server": "P2PHANDSHAKE",
        "local_hostname": host,
        "protocol": "tcp",
        "global_segment_size": 0,
    }
    return [
        *("--hicache-storage-backend", "mooncake"),
        *("--hicache-storage-backend-extra-config", json.dumps(config)),
    ]


def stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def end_with_parent() -> None:
    """In the child: even a parent that is killed leaves nothing behind."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def check(processes: Processes) -> None:
    """Raise ``SystemExit`` with the log of a process that ended."""
    for name, (process, log) in processes.items():
        if process.poll() is not None:
            log.seek(0)
            tail = log.read()[-2000:].decode(errors="replace")
            sys.exit(f"the {name} ended with {process.returncode}:\n{tail}")


def await_port(host: str, port: int, processes: Processes) -> None:
    def listens() -> bool:
        try:
            socket.create_connection((host, port), 1).close()
        except OSError:
            return False
        return True

    wait_until(listens, f"{host}:{port} to answer", processes)


def await_segment(url: str, processes: Processes) -> None:
    def mounted() -> bool:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.read().strip())

    wait_until(mounted, "the segment to be mounted", processes)


def wait_until(condition: Callable[[], bool], what: str, processes: Processes) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        check(processes)
        if time.monotonic() > deadline:
            sys.exit(f"waited {START_SECONDS:g} s for {what}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
