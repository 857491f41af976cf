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
    given = {word.split("=", 1)[0].replace("_", "-") for word in _with_config_file(argv)}
    if given & {"-h", "--help"}:
        return argv
    if not given & {"--model-path", "--model"}:
        from sglang_vericache.embedded_model import ensure_embedded_model

        argv += ["--model-path", str(ensure_embedded_model())]
    if "--vericache" not in given:
        argv += ["--vericache", "on"]
    return argv


def _with_config_file(argv: list[str]) -> list[str]:
    """``argv`` with what the file of ``--config`` says, which flags take precedence over.

    Raises:
        ValueError: there is no such file, or it is no YAML.
    """
    if "--config" not in argv:
        return argv
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    merged: list[str] = ConfigArgumentMerger(boolean_actions=[]).merge_config_with_args(argv)
    return merged


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
