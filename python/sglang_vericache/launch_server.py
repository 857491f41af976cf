"""``python -m sglang_vericache.launch_server``: an SGLang server with VeriCache on.

Takes every flag of SGLang. Without ``--model-path`` it serves the embedded model.
"""

from __future__ import annotations

import os
import sys

from sglang_vericache import hooks
from sglang_vericache.platform import prepare


def server_argv(argv: list[str]) -> list[str]:
    """``argv`` with the defaults of this entry point filled in."""
    argv = list(argv)
    given = {word.split("=", 1)[0] for word in argv}
    if given & {"-h", "--help"}:
        return argv
    if not given & {"--model-path", "--model"} and "--config" not in given:
        from sglang_vericache.embedded_model import ensure_embedded_model

        argv += ["--model-path", str(ensure_embedded_model())]
    if "--vericache" not in given:
        argv += ["--vericache", "on"]
    return argv


def main(argv: list[str] | None = None) -> None:
    """Start the server and serve until it is stopped."""
    prepare()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if not hooks.registered():
        sys.exit(
            "error: SGLang did not load the plugin vericache; does SGLANG_PLUGINS leave it out?"
        )
    try:
        server_args = prepare_server_args(server_argv(sys.argv[1:] if argv is None else argv))
    except ValueError as error:
        sys.exit(f"error: {error}")
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
