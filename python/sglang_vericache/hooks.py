"""The table of every place where SGLang is changed without a door of its own.

SGLang's plugin loader logs and swallows the errors of a plugin, so this module checks instead:
``problems`` compares each target's parameters with the ones the hook was written for, and
``assert_applied`` is called where a server is configured, and in the scheduler before it drafts.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SUPPORTED_SGLANG = "0.5.23"
_registered: list[str] = []


@dataclass(frozen=True)
class Hook:
    """One hooked function of SGLang.

    Attributes:
        target: dotted path of the function.
        parameters: names of its parameters in the supported version, in order.
        kind: ``before``, ``after``, ``around`` or ``replace``.
        function: our part; see SGLang's ``HookType`` for its arguments.
        why: what stock SGLang lacks there.
    """

    target: str
    parameters: tuple[str, ...]
    kind: str
    function: Callable[..., Any]
    why: str


def problems(hooks: Sequence[Hook]) -> list[str]:
    """Differences between the installed SGLang and the one the hooks were written for."""
    found = []
    import sglang

    if sglang.__version__ != SUPPORTED_SGLANG:
        found.append(f"sglang {sglang.__version__} is installed, {SUPPORTED_SGLANG} is supported")
    for hook in hooks:
        try:
            target = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            found.append(f"{hook.target}: {error}")
            continue
        parameters = tuple(inspect.signature(inspect.unwrap(target)).parameters)
        if parameters != hook.parameters:
            found.append(f"{hook.target}{parameters}, expected {hook.parameters}")
    return found


def register(hooks: Sequence[Hook]) -> None:
    """Check the table and hand it to SGLang's registry.

    Raises:
        RuntimeError: the installed SGLang differs; lists every difference.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if found := problems(hooks):
        raise RuntimeError("this SGLang is not supported:\n  " + "\n  ".join(found))
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
        _registered.append(hook.target)


def registered() -> bool:
    """Whether this process has registered any hook, that is, loaded the plugin."""
    return bool(_registered)


def assert_applied() -> None:
    """Raise ``RuntimeError`` naming every registered hook that SGLang did not apply."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [target for target in _registered if target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(f"hooks were not applied: {', '.join(missing)}")
