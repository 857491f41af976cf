"""Command line flags and settings of one server.

Knows argparse and the compressor registry, not SGLang. The configuration rides on SGLang's
``ServerArgs`` record as one plain attribute (``attach``), so every process that receives the
record can ask ``config_of(server_args)``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from sglang_vericache.compressors import Calibration, Settings, find, supported
from sglang_vericache.compressors.settings import NUMBERS

ATTRIBUTE = "_vericache"
PREFIX = "vericache_"

MODES = {
    "on": "draft from compressed KV, verify against full KV",
    "off": "plain decoding with the same kernels (the reference of exactness level X1)",
}

# The method that drafts best in docs/fidelity.md, at the price of one list a layer: with the layer
# budgets of a calibration file, and without one.
AUTO = "auto"
BEST_CALIBRATED, BEST = "snapkv+calibrated", "snapkv"

TIERS = {
    "resident": "full KV stays on the device",
    "host": "requests that draft leave their full KV to host memory between verify passes",
    "auto": "as resident while requests fit, as host when they do not",
    "remote": "as auto, and a prompt found only in a store (--hicache-storage-backend, default "
    "file) drafts from its compressed copy until its full KV has arrived",
}

LOOKUP = {
    "auto": "where it gains more than drafting does, with an adaptive draft length",
    "off": "never",
}

FURTHER = tuple(sorted(set(NUMBERS) - {"ratio"}))

STAGING = {
    "copy": "copied to the device for the pass",
    "in-place": "read in host memory, on a CPU only",
}


@dataclass(frozen=True)
class VeriCacheConfig:
    """Settings of VeriCache; one field per ``--vericache-*`` flag.

    Attributes:
        mode: see ``MODES``.
        compressor: name of a registered compressor, or of one with budgets and a codec; ``AUTO``
            becomes the one that drafts best once the model is known (``calibrated``).
        ratio: share of the compressed context that a draft view keeps, in (0, 1].
        draft_len: tokens drafted before a verify pass; None adapts it per request.
        max_draft_len: upper limit of an adaptive draft length; sizes the KV reserve.
        lookup: see ``LOOKUP``.
        min_context: adaptive mode drafts nothing from compressed KV below this many tokens.
        refresh: verify passes between two re-scorings of a view from the verify queries;
            0 never, None when acceptance falls.
        tier: see ``TIERS``.
        staging: see ``STAGING``; None is in-place on a CPU, else copy.
        packed_tokens: slots of a pool of packed KV, which drafts of quantizing compressors read;
            None takes as many as the KV pool has.
        span_cache_gb: host memory for compressed copies of prefixes that a store has, GiB.
        allow_unverified: whether a request may ask for the lossy output.
        calibration: file from ``vericache calibrate``; None looks for one of the server's model
            beside it and in this package.
        settings: further compressor settings (``Settings`` fields), as JSON.
    """

    mode: str = "on"
    compressor: str = "snapkv"
    ratio: float = 0.1
    draft_len: int | None = None
    max_draft_len: int = 16
    lookup: str = "auto"
    min_context: int = 512
    refresh: int | None = None
    tier: str = "resident"
    staging: str | None = None
    packed_tokens: int | None = None
    span_cache_gb: float = 0.25
    allow_unverified: bool = False
    calibration: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"--vericache: unknown mode {self.mode!r}; supported: {list(MODES)}")
        if self.tier not in TIERS:
            raise ValueError(
                f"--vericache-tier: unknown tier {self.tier!r}; supported: {', '.join(TIERS)}"
            )
        if self.lookup not in LOOKUP:
            raise ValueError(
                f"--vericache-lookup: unknown mode {self.lookup!r}; supported: {', '.join(LOOKUP)}"
            )
        if self.staging is not None and self.staging not in STAGING:
            raise ValueError(
                f"--vericache-staging: unknown way {self.staging!r}; "
                f"supported: {', '.join(STAGING)}"
            )
        if self.mode == "off" and self.tier != "resident":
            raise ValueError(f"--vericache-tier {self.tier} does nothing with --vericache off")
        if self.draft_len is not None and not 1 <= self.draft_len <= 64:
            raise ValueError(
                f"--vericache-draft-len must be auto or in 1..64, not {self.draft_len} "
                "(--vericache off decodes plainly)"
            )
        if not 1 <= self.max_draft_len <= 64:
            raise ValueError(
                f"--vericache-max-draft-len must be in 1..64, not {self.max_draft_len}"
            )
        if self.min_context < 0:
            raise ValueError(f"--vericache-min-context must be at least 0, not {self.min_context}")
        if self.refresh is not None and self.refresh < 0:
            raise ValueError(f"--vericache-refresh must be at least 0, not {self.refresh}")
        if self.packed_tokens is not None and self.packed_tokens < 1:
            raise ValueError(
                f"--vericache-packed-tokens must be at least 1, not {self.packed_tokens}"
            )
        if not 0 <= self.span_cache_gb < math.inf:
            raise ValueError(
                f"--vericache-span-cache-gb must be at least 0, not {self.span_cache_gb}"
            )
        for key, value in self.settings.items():
            if key not in FURTHER and not isinstance(value, Calibration):
                raise ValueError(
                    f"--vericache-settings: unknown key {key!r}; supported: {', '.join(FURTHER)}"
                )
        try:
            divisible = self.compressor == AUTO or find(self.compressor).divisible
        except ValueError as error:
            raise ValueError(f"--vericache-compressor: {error}") from None
        if self.tier == "remote" and not divisible:
            raise ValueError(
                f"--vericache-compressor: copies of {self.compressor} cannot be read in parts, "
                "as --vericache-tier remote reads them"
            )
        try:
            _ = self.compressor_settings
        except ValueError as error:
            flag = "ratio" if str(error).startswith("ratio") else "settings"
            raise ValueError(f"--vericache-{flag}: {error}") from None

    @property
    def enabled(self) -> bool:
        """Whether the server drafts at all."""
        return self.mode == "on"

    @property
    def offloads(self) -> bool:
        """Whether full KV may leave the device."""
        return self.enabled and self.tier != "resident"

    @property
    def span_cache_bytes(self) -> int:
        """``span_cache_gb`` in bytes."""
        return int(self.span_cache_gb * 2**30)

    @property
    def reserved_draft_len(self) -> int:
        """Largest number of drafts a request may hold."""
        return self.max_draft_len if self.draft_len is None else self.draft_len

    @property
    def compressor_settings(self) -> Settings:
        return Settings(ratio=self.ratio, **self.settings)

    def calibrated(self, calibration: Calibration | None) -> VeriCacheConfig:
        """This configuration for the server's model, with what was found for that."""
        compressor = self.compressor
        if compressor == AUTO:
            compressor = BEST if calibration is None else BEST_CALIBRATED
        settings = dict(self.settings)
        if calibration is not None:
            settings["calibration"] = calibration
        return replace(self, compressor=compressor, settings=settings)

    def as_dict(self) -> dict[str, Any]:
        """The effective values as JSON; ``draft_len`` and ``refresh`` None mean ``auto``."""
        settings = self.compressor_settings
        return asdict(self) | {"settings": {name: getattr(settings, name) for name in NUMBERS}}


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add the ``--vericache-*`` group; every default is None so that presence can be seen."""
    default = VeriCacheConfig()
    group = parser.add_argument_group(
        "VeriCache", "Draft from a compressed KV cache, verify against the full one."
    )
    add = group.add_argument
    add(
        "--vericache",
        dest="vericache_mode",
        choices=list(MODES),
        help="; ".join(f"{k}: {v}" for k, v in MODES.items()) + f" (default: {default.mode})",
    )
    add(
        "--vericache-compressor",
        metavar="NAME",
        help=f"Method that chooses the draft view: {AUTO} ({BEST_CALIBRATED} for a model with a "
        f"calibration file, else {BEST}); {supported()} (default: {default.compressor})",
    )
    add(
        "--vericache-ratio",
        type=float,
        metavar="R",
        help=f"Share of the context a draft view keeps, in (0, 1] (default: {default.ratio})",
    )
    add(
        "--vericache-draft-len",
        metavar="auto|N",
        help="Tokens drafted before each verify pass (1 to 64); auto adapts it per request from "
        "measured acceptance and cost, down to plain decoding (default: auto)",
    )
    add(
        "--vericache-max-draft-len",
        type=int,
        metavar="N",
        help=f"Upper limit of an adaptive draft length, 1 to 64 (default: {default.max_draft_len})",
    )
    add(
        "--vericache-min-context",
        type=int,
        metavar="N",
        help="With an adaptive draft length, draft nothing from compressed KV below this many "
        f"tokens (default: {default.min_context})",
    )
    add(
        "--vericache-lookup",
        choices=list(LOOKUP),
        help="Verify what followed the latest tokens earlier in the request's own text. "
        + "; ".join(f"{k}: {v}" for k, v in LOOKUP.items())
        + f" (default: {default.lookup})",
    )
    add(
        "--vericache-refresh",
        metavar="auto|off|N",
        help="Re-score a draft view from the queries of verify passes: when fewer than half of its "
        "drafts were accepted, not for that reason, or after every N passes (default: auto)",
    )
    add(
        "--vericache-tier",
        choices=list(TIERS),
        help="Where full KV is between verify passes. "
        + "; ".join(f"{k}: {v}" for k, v in TIERS.items())
        + f" (default: {default.tier}). Host memory is sized by --hicache-ratio or --hicache-size",
    )
    add(
        "--vericache-staging",
        choices=list(STAGING),
        help="How a verify pass reads full KV that is in host memory. "
        + "; ".join(f"{k}: {v}" for k, v in STAGING.items())
        + " (default: in-place on a CPU, else copy)",
    )
    add(
        "--vericache-packed-tokens",
        type=int,
        metavar="N",
        help="Tokens of a pool of packed KV, which lies beside the KV pool and holds what drafts "
        "of a quantizing compressor read; a request that finds no room there decodes plainly "
        "(default: as many as the KV pool)",
    )
    add(
        "--vericache-span-cache-gb",
        type=float,
        metavar="GB",
        help="Host memory in GiB for compressed copies of prompts, with --vericache-tier remote: "
        "those used last need not be read from the store again "
        f"(default: {default.span_cache_gb})",
    )
    add(
        "--vericache-allow-unverified",
        action="store_const",
        const=True,
        help="Let a request ask for the lossy, unverified output (default: refused)",
    )
    add(
        "--vericache-calibration",
        metavar="FILE",
        help="What `vericache calibrate` found out about the model, for compresskv and +calibrated "
        "(default: the file beside the model, or one that comes with this package)",
    )
    add(
        "--vericache-settings",
        metavar="JSON",
        help=f"Further settings of the compressor (default: '{json.dumps(_further_settings())}')",
    )


def _further_settings() -> dict[str, Any]:
    return {key: getattr(Settings(), key) for key in NUMBERS if key != "ratio"}


def from_options(options: Mapping[str, Any]) -> VeriCacheConfig | None:
    """Configuration from ``vericache_*`` options (CLI namespace or ``Engine`` keywords).

    Returns:
        None when no option was given: the server is stock SGLang then.

    Raises:
        ValueError: an unknown option or a value out of range; names the flag.
    """
    given = {
        key.removeprefix(PREFIX): value
        for key, value in options.items()
        if key.startswith(PREFIX) and value is not None
    }
    if not given:
        return None
    known = {f.name for f in fields(VeriCacheConfig)}
    for key in given:
        if key not in known:
            supported = ", ".join(PREFIX + name for name in sorted(known))
            raise ValueError(f"unknown option {PREFIX}{key}; supported: {supported}")
    given["draft_len"] = _count(given.get("draft_len"), "draft-len", none="auto")
    given["refresh"] = _count(given.get("refresh"), "refresh", none="auto", zero="off")
    if isinstance(given.get("settings"), str):
        try:
            given["settings"] = json.loads(given["settings"])
        except json.JSONDecodeError as error:
            raise ValueError(f"--vericache-settings is not valid JSON: {error}") from None
        if not isinstance(given["settings"], dict):
            raise ValueError("--vericache-settings must be a JSON object")
    return VeriCacheConfig(**given)


def _count(value: Any, flag: str, *, none: str, zero: str | None = None) -> int | None:
    if value is None or value == none:
        return None
    if zero is not None and value == zero:
        return 0
    try:
        return int(str(value))  # of a keyword of ``Engine`` too: int() would cut 3.7 to 3
    except ValueError:
        words = f"{none}, {zero}" if zero else none
        raise ValueError(
            f"--vericache-{flag} must be {words} or a whole number, not {value!r}"
        ) from None


def attach(server_args: Any, config: VeriCacheConfig) -> None:
    """Put the configuration on SGLang's record; it is pickled along to every process."""
    setattr(server_args, ATTRIBUTE, config)


def config_of(server_args: Any) -> VeriCacheConfig | None:
    """The configuration on the record, or None for a stock server."""
    return getattr(server_args, ATTRIBUTE, None)
