"""The ``vericache`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sglang_vericache import __version__

EPILOG = """\
Servers are started with `python -m sglang_vericache.launch_server`, or with `sglang serve` and any
--vericache-* flag; both list the flags with --help.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Returns:
        Its exit code: 0, or 1 if anything it checks failed.
    """
    from sglang_vericache.cli import calibrate, doctor, verify

    parser = argparse.ArgumentParser(
        prog="vericache",
        description="Exact decoding from compressed KV caches: tools beside the server.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (doctor, verify, calibrate):
        module.add_command(commands)
    options = parser.parse_args(argv)
    code: int = options.run(options)
    return code
