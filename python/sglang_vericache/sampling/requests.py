"""What a request brings along: its seed, and what settling cannot give it."""

from __future__ import annotations

import copy
import hashlib
import secrets
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_SEED_BITS = 63
# Request fields that settling does not honour.
_UNSUPPORTED_FIELDS = (
    "return_hidden_states",
    "return_sampling_mask",
    "return_routed_experts",
    "return_indexer_topk",
    "return_entropy",
    "watermark",
)


class ServerConfig(Protocol):
    """The part of the server's configuration that a refusal names."""

    @property
    def mode(self) -> str: ...


def check_supported(request: Any, config: ServerConfig) -> None:
    """Refuse a request that would not get exactly what it asks for.

    Args:
        request: one ``GenerateReqInput`` or ``TokenizedGenerateReqInput``; its ``sampling_params``
            may be a dict or ``SamplingParams``.

    Raises:
        ValueError: naming the parameter and what to do (the HTTP server answers 400).
    """
    params = request.sampling_params or {}
    asked = [
        name for name in _UNSUPPORTED_FIELDS if getattr(request, name, None) or _get(params, name)
    ]
    if (_get(params, "beam_width") or 1) > 1:
        asked.append("beam_width")
    if asked:
        raise ValueError(
            f"{', '.join(asked)}: not supported with --vericache {config.mode}, whatever "
            "custom_params.vericache says; leave it out, or start a server without --vericache "
            "options"
        )


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


def stop_tokens(req: Req) -> set[int]:
    """Token ids that end a request: its own, and those of its model and tokenizer."""
    tokens = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if req.tokenizer is not None:
        tokens |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
    return tokens - {None}


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
