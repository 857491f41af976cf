"""Entry point of SGLang's plugin loader; runs in every process SGLang starts."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from sglang_vericache import hooks
from sglang_vericache.compressors import create
from sglang_vericache.config import PREFIX, add_cli_args, attach, config_of, from_options
from sglang_vericache.hooks import Hook
from sglang_vericache.platform import shims


def register() -> None:
    """Register everything; ends the process with a reason if this SGLang is not supported.

    The loader only logs an exception and would go on without VeriCache, so failure exits.
    """
    try:
        shims.apply_all()
        from sglang.srt.entrypoints.engine import Engine

        from sglang_vericache.attention.backend import register_backend
        from sglang_vericache.mem_cache import tiered
        from sglang_vericache.speculative.algorithm import register_algorithm

        entries = table()
        register_algorithm(check=hooks.assert_applied)
        register_backend()
        tiered.register()
        Engine.server_args_class = staticmethod(engine_server_args)
        hooks.register(entries)
    except Exception as error:
        print(f"sglang-vericache cannot start: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def table() -> tuple[Hook, ...]:
    """Every hook of this package into SGLang."""
    from sglang_vericache.entrypoints import admission, status
    from sglang_vericache.mem_cache import reserve, span_store, storage_hooks
    from sglang_vericache.platform import allocation, model
    from sglang_vericache.sampling import hooks as sampling
    from sglang_vericache.speculative import algorithm, provisional, sessions, zero_commit

    return (
        Hook(
            "sglang.srt.server_args.ServerArgs.add_cli_args",
            ("parser",),
            "after",
            _add_flags,
            "no door for flags of a plugin",
        ),
        Hook(
            "sglang.srt.server_args.ServerArgs.from_cli_args",
            ("args",),
            "around",
            _server_args_from_cli,
            "the record has no place for settings of a plugin",
        ),
        *algorithm.HOOKS,
        *zero_commit.HOOKS,
        *sessions.HOOKS,
        *sampling.HOOKS,
        *model.HOOKS,
        *allocation.HOOKS,
        *reserve.HOOKS,
        *span_store.HOOKS,
        *storage_hooks.HOOKS,
        *provisional.HOOKS,
        *admission.HOOKS,
        *status.HOOKS,
    )


def _add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    add_cli_args(parser)


def _server_args_from_cli(original: Any, cls: type, args: argparse.Namespace) -> Any:
    config = from_options(vars(args))
    server_args = original(cls, args)
    configure(server_args, config)
    return server_args


def engine_server_args(**kwargs: Any) -> Any:
    """Takes the place of ``Engine.server_args_class``, the door for keywords of ``sgl.Engine``.

    The plugin is loaded inside ``Engine.__init__``, too late for a hook around it.
    """
    from sglang.srt.server_args import ServerArgs

    options = {key: kwargs.pop(key) for key in list(kwargs) if key.startswith(PREFIX)}
    config = from_options(options)
    server_args = ServerArgs(**kwargs)
    configure(server_args, config)
    return server_args


def configure(server_args: Any, config: Any) -> None:
    """Attach the configuration to a fresh record and set the SGLang fields it needs.

    Raises:
        ValueError: the record asks for something VeriCache does not support; names the flag.
        RuntimeError: SGLang has not applied all hooks in this process; names them.
    """
    from sglang_vericache import calibrations, defaults

    if config is None or config_of(server_args) is not None:
        return
    hooks.assert_applied()
    config = config.calibrated(calibrations.of_server(server_args, config.calibration))
    try:
        create(config.compressor, config.compressor_settings)
    except ValueError as error:
        raise ValueError(f"--vericache-compressor: {error}") from None
    attach(server_args, config)
    defaults.apply(server_args, config)
