"""``vericache doctor``: whether this installation can keep its promise on this machine."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

ENTRY_POINT_GROUP = "sglang.srt.plugins"
ENTRY_POINT = "vericache"
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Result:
    """Outcome of one check: ``ok``, ``warn`` (works, but slowly) or ``FAIL``."""

    name: str
    state: str
    detail: str


class Warn(Exception):
    """Raised by a check that passes with a reservation."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check versions, hooks, kernels and row invariance on this machine",
        description=__doc__,
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table; 1 if a check failed."""
    logging.disable(logging.WARNING)  # import-time notes of SGLang about absent accelerators
    warnings.simplefilter("ignore")
    failed = False
    for name, check in checks():
        result = examine(name, check)
        failed |= result.state == "FAIL"
        print_result(result)
    print("some checks failed" if failed else "all checks passed")
    return int(failed)


def checks() -> list[tuple[str, Callable[[], str]]]:
    """Name and function of each check, in order; a function returns details or raises."""
    return [
        ("versions", versions),
        ("interpreter start", interpreter_start),
        ("plugin entry point", entry_point),
        ("signature table", signature_table),
        ("hooks", hooks_applied),
        ("shims", shims_applied),
        ("CPU", cpu_features),
        ("kernels", kernels),
        ("row-invariant linear", lambda: self_test("linear_rows")),
        ("row-invariant attention", lambda: self_test("attention_rows")),
        ("attention vs reference", lambda: self_test("attention_reference")),
        ("key scores vs reference", lambda: self_test("scores_reference")),
        ("negative control", lambda: self_test("negative_control")),
    ]


def self_test(name: str) -> str:
    """Run a function of ``self_test``; even its import may fail."""
    from sglang_vericache.cli import self_test

    detail: str = getattr(self_test, name)()
    return detail


def examine(name: str, check: Callable[[], str]) -> Result:
    """Run one check; whatever it raises is its failure."""
    try:
        return Result(name, "ok", check())
    except Warn as warning:
        return Result(name, "warn", str(warning))
    except (Exception, SystemExit) as error:
        return Result(name, "FAIL", str(error.__cause__ or error) or type(error).__name__)


def print_result(result: Result) -> None:
    first, *others = result.detail.splitlines() or [""]
    print(f"{result.state:<5} {result.name:<24} {first}")
    for line in others:
        print(" " * 31 + line)
    sys.stdout.flush()


def versions() -> str:
    from sglang_vericache.hooks import SUPPORTED_SGLANG

    found = {"python": platform.python_version()}
    for name in ("torch", "sglang", "sglang-vericache", "sgl-kernel-ext"):
        found[name] = metadata.version(name)
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    if found["sglang"] != SUPPORTED_SGLANG:
        raise RuntimeError(f"{text}: sglang {SUPPORTED_SGLANG} is supported")
    return text


def interpreter_start() -> str:
    """Whether ``sglang_vericache.pth`` prepared this interpreter, as it will any other."""
    from sglang_vericache.platform import bootstrap, shims

    if not shims.needed():
        return "nothing to prepare: an NVIDIA driver is present"
    if not any(finder is bootstrap._PlainCpuFinder for finder in sys.meta_path):
        raise RuntimeError(
            "sglang_vericache.pth did not run: `sglang serve` and spawned processes cannot import "
            "sgl_kernel here; install the package instead of putting it on PYTHONPATH"
        )
    return "prepared by sglang_vericache.pth"


def entry_point() -> str:
    found = [e for e in metadata.entry_points(group=ENTRY_POINT_GROUP) if e.name == ENTRY_POINT]
    if not found:
        raise RuntimeError(f"{ENTRY_POINT_GROUP} has no entry {ENTRY_POINT!r}: is it installed?")
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and ENTRY_POINT not in {name.strip() for name in allowed.split(",")}:
        raise RuntimeError(f"SGLANG_PLUGINS={allowed} leaves {ENTRY_POINT} out")
    return found[0].value


def signature_table() -> str:
    from sglang_vericache import hooks, plugin

    table = plugin.table()
    if found := hooks.problems(table):
        raise RuntimeError("\n".join(found))
    return f"{len(table)} functions of SGLang are as expected"


def hooks_applied() -> str:
    """Load the plugin the way a server does."""
    from sglang.srt.plugins import load_plugins

    from sglang_vericache import hooks, plugin

    load_plugins()
    table = plugin.table()
    hooks.assert_applied()
    return f"{len(table)} applied"


def shims_applied() -> str:
    from sglang_vericache.platform import shims

    report = shims.report()
    text = ", ".join(f"{name}: {state}" for name, state in report.items())
    if "missing" in report.values():
        raise RuntimeError(text)
    return text


def cpu_features() -> str:
    import torch

    try:
        with open("/proc/cpuinfo") as file:
            lines = dict(line.split(":", 1) for line in map(str.strip, file) if ":" in line)
    except OSError:
        lines = {}
    info = {key.strip(): value.strip() for key, value in lines.items()}
    flags = set(info.get("flags", "").split())
    present = [flag for flag in CPU_FLAGS if flag in flags]
    model = info.get("model name", platform.machine())
    return f"{model}, {torch.get_num_threads()} threads, {' '.join(present) or 'no vector flags'}"


def kernels() -> str:
    from sgl_kernel_ext import active

    found = active()
    text = ", ".join(f"{key}: {value}" for key, value in found.items())
    if found["cpu_backend"] == "reference":
        raise Warn(f"{text}\nthe C++ kernels are not built or not used: same results, much slower")
    return text
