"""What a request brings along: its seed, and what it may ask for."""

from __future__ import annotations

import copy
import hashlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

OPTIONS_KEY = "vericache"
_SEED_BITS = 63
# Request fields that settling does not honour, and the value that means "not asked for".
_UNSUPPORTED_FIELDS = (
    "return_hidden_states",
    "return_sampling_mask",
    "return_routed_experts",
    "return_indexer_topk",
    "return_entropy",
    "watermark",
)


class ServerLimits(Protocol):
    """The part of the server's configuration that requests are checked against."""

    allow_unverified: bool
    ratio: float
    draft_len: int


@dataclass(frozen=True)
class RequestOptions:
    """``custom_params["vericache"]`` of a request; ``None`` leaves a setting to the server.

    Attributes:
        enabled: draft at all; False decodes plainly.
        unverified: emit drafts without verifying them.
        ratio: compression ratio, at most the server's.
        draft_len: longest draft, at most the server's; 0 decodes plainly.
    """

    enabled: bool = True
    unverified: bool = False
    ratio: float | None = None
    draft_len: int | None = None


def check_supported(request: Any, limits: ServerLimits) -> None:
    """Refuse a request that would not get exactly what it asks for.

    Args:
        request: one ``GenerateReqInput`` or ``TokenizedGenerateReqInput``; its ``sampling_params``
            may be a dict or ``SamplingParams``.
        limits: the server's configuration.

    Raises:
        ValueError: naming the parameter and what to do (the HTTP server answers 400).
    """
    params = request.sampling_params or {}
    for name in _UNSUPPORTED_FIELDS:
        if getattr(request, name, None) or _get(params, name):
            raise ValueError(_refusal(name))
    if (_get(params, "beam_width") or 1) > 1:
        raise ValueError(_refusal("beam_width"))
    parse_options(_get(params, "custom_params"), limits)


def parse_options(custom_params: Mapping[str, Any] | None, limits: ServerLimits) -> RequestOptions:
    """Read ``custom_params["vericache"]``.

    Raises:
        ValueError: naming an unknown key, a wrong type, or a value beyond the server's.
    """
    given = (custom_params or {}).get(OPTIONS_KEY)
    if given is None:
        return RequestOptions()
    where = f"custom_params.{OPTIONS_KEY}"
    if not isinstance(given, dict):
        raise ValueError(f"{where} must be an object, got {type(given).__name__}")
    known = RequestOptions.__dataclass_fields__
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"{where}.{key} is unknown; known keys: {', '.join(known)}")
        kinds = {"ratio": (int, float), "draft_len": (int,)}.get(key, (bool,))
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds != (bool,)):
            raise ValueError(f"{where}.{key} must be {kinds[-1].__name__}, got {value!r}")
    options = RequestOptions(**given)
    if options.unverified and not limits.allow_unverified:
        raise ValueError(f"{where}.unverified is not allowed by this server")
    if options.ratio is not None and not 0 < options.ratio <= limits.ratio:
        raise ValueError(f"{where}.ratio must be in (0, {limits.ratio}], got {options.ratio}")
    if options.draft_len is not None and not 0 <= options.draft_len <= limits.draft_len:
        raise ValueError(
            f"{where}.draft_len must be in [0, {limits.draft_len}], got {options.draft_len}"
        )
    return options


def assign_seed(request: Any) -> None:
    """Give an unseeded request a random seed of its own.

    Call it in the tokenizer manager for every object sent to a scheduler: once there, all ranks see
    the same seed, and each of n > 1 samples is sent, and seeded, by itself.

    Args:
        request: ``TokenizedGenerateReqInput`` or ``Req``. Its ``sampling_params``, which n > 1
            samples share, is replaced by a copy.
    """
    if request.sampling_params.sampling_seed is None:
        request.sampling_params = copy.copy(request.sampling_params)
        request.sampling_params.sampling_seed = secrets.randbits(_SEED_BITS)


def install_seeds(info: SamplingBatchInfo, reqs: list[Req]) -> None:
    """Set ``info.sampling_seed``; stock does so only with ``--enable-deterministic-inference``."""
    info.sampling_seed = torch.tensor([seed_of(req) for req in reqs], dtype=torch.int64).to(
        info.device, non_blocking=True
    )


def seed_of(req: Req) -> int:
    """The request's seed; without one, a hash of its id, which is unique and equal on all ranks."""
    seed = req.sampling_params.sampling_seed
    if seed is not None:
        return seed
    digest = hashlib.sha256(req.rid.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - _SEED_BITS)


def adjust_from_schedule_batch(
    info: SamplingBatchInfo, batch: ScheduleBatch, vocab_size: int
) -> None:
    """For ``SamplingBatchInfo.adjusted_from_schedule_batch``, SGLang's placeholder for overrides.

    Seeds every request, and makes the penalties of retracted requests count their whole output.
    """
    from sglang_vericache.sampling.penalties import restore_penalizers

    install_seeds(info, batch.reqs)
    restore_penalizers(info, batch.reqs)


def _get(params: Any, name: str) -> Any:
    return params.get(name) if isinstance(params, dict) else getattr(params, name, None)


def _refusal(name: str) -> str:
    return (
        f"{name} is not supported by VeriCache, with or without "
        f"custom_params.{OPTIONS_KEY}.enabled; drop it, or use a server started without "
        "--vericache-compressor"
    )
