"""What a request may ask for, checked in the tokenizer manager before a scheduler sees it.

A ``ValueError`` raised there is HTTP 400 on every endpoint and reaches the caller of ``Engine``.
On a stock server all of this is inert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from sglang_vericache.compressors import FAMILY, create
from sglang_vericache.compressors.settings import NARROWABLE
from sglang_vericache.config import VeriCacheConfig, config_of
from sglang_vericache.hooks import Hook
from sglang_vericache.sampling.requests import assign_seed, check_supported
from sglang_vericache.speculative.state import CHOICES

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

KEY = "vericache"
WHERE = f"custom_params.{KEY}"
OPTIONS = (*CHOICES, *NARROWABLE)
MAX_SAMPLES = 1024
"""Most samples (``n``) of one prompt; stock queues any number, and nobody else is served for hours,
also after their client left: it aborts one by one, each with a look at all that wait."""


def check_options(asked: Any, config: VeriCacheConfig) -> None:
    """Check a request's own ``custom_params.vericache``.

    Args:
        asked: the value as it came: ``enabled`` and ``unverified`` (bool), ``draft_len`` (int),
            ``compressor`` (a name as the flag takes it) and the settings ``NARROWABLE``.
        config: of the server; no number may exceed its own.

    Raises:
        ValueError: names the key and what is supported.
    """
    if not isinstance(asked, Mapping):
        raise ValueError(f"{WHERE} must be an object, not {asked!r}")
    for key in asked:
        if key not in OPTIONS:
            raise ValueError(f"{WHERE}: unknown key {key!r}; supported: {', '.join(OPTIONS)}")
    for key in ("enabled", "unverified"):
        if not isinstance(asked.get(key, False), bool):
            raise ValueError(f"{WHERE}.{key} must be true or false, not {asked[key]!r}")
    if asked.get("unverified"):
        if not config.enabled:
            raise ValueError(f"{WHERE}.unverified is refused here: the server runs --vericache off")
        if not config.allow_unverified:
            raise ValueError(
                f"{WHERE}.unverified is refused here: start the server with "
                "--vericache-allow-unverified"
            )
        if not asked.get("enabled", True):
            raise ValueError(f"{WHERE}.unverified needs drafts; leave out enabled: false")
    _check_draft_len(asked.get("draft_len", 0), config.reserved_draft_len)
    try:
        narrowed = {key: asked[key] for key in NARROWABLE if key in asked}
        compressor = str(asked.get("compressor", config.compressor))
        if _is_press(compressor) and not _is_press(config.compressor):
            # Importing that package takes seconds in which nobody else is served.
            raise ValueError(
                f"compressor {compressor!r} is refused here: start the server with "
                f"--vericache-compressor {FAMILY}:PRESS"
            )
        create(compressor, config.compressor_settings.narrowed(narrowed))
    except ValueError as error:
        raise ValueError(f"{WHERE}: {error}") from None


def _is_press(compressor: str) -> bool:
    return re.split("[+:]", compressor, maxsplit=1)[0] == FAMILY


def _check_draft_len(value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(
            f"{WHERE}.draft_len must be a whole number in 0..{most} on this server, not {value!r}"
        )


def check_token_ids(name: str, token_ids: Iterable[int] | None, vocab_size: int) -> None:
    """Raise ``ValueError`` for a token outside the vocabulary.

    Stock looks such a token up, in the embedding or in the logits, which ends the scheduler.
    """
    for token in token_ids or ():
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}: token {token} is outside the vocabulary of {vocab_size}")


def check_processor(text: str | None) -> None:
    """Raise ``ValueError`` for a custom logit processor that cannot be loaded.

    Stock loads it in the scheduler, which an error there ends.
    """
    if text is None:
        return
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    try:
        CustomLogitProcessor.from_str(text)
    except Exception as error:
        raise ValueError(f"custom_logit_processor cannot be loaded: {error}") from error


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Raise ``ValueError`` for a number that would end or block stock's scheduler."""
    if not least <= value <= most:
        raise ValueError(f"{name} must be in {least}..{most}, not {value}")


def admit(tokenized: Any, self: TokenizerManager, obj: Any, *args: Any, **kwargs: Any) -> None:
    """``TokenizerManager._create_tokenized_object`` after: refuse what would not be honoured."""
    config = config_of(self.server_args)
    if config is None or not _generates(tokenized):
        return
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    params, vocab_size = tokenized.sampling_params, self.model_config.vocab_size
    custom = params.custom_params
    if custom is not None and not isinstance(custom, Mapping):
        raise ValueError(f"custom_params must be an object, not {custom!r}")
    asked = (custom or {}).get(KEY)
    if asked is not None:
        check_options(asked, config)
        if asked.get("unverified") and tokenized.session_params is not None:
            raise ValueError(f"{WHERE}.unverified: a session would keep its inexact KV")
    if not tokenized.input_ids and tokenized.input_embeds is None:
        raise ValueError("the prompt is empty: it has no token to start from")
    check_token_ids("input_ids", tokenized.input_ids, vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    check_range("n", params.n, 1, MAX_SAMPLES)
    check_range("top_k", params.top_k, 1, TOP_K_ALL)
    check_range("top_logprobs_num", tokenized.top_logprobs_num, 0, vocab_size)
    check_processor(tokenized.custom_logit_processor)
    for request in (obj, tokenized):  # some parameters are only on one of them
        check_supported(request, config)


def seed_one(self: TokenizerManager, tokenized_obj: TokenizedGenerateReqInput) -> None:
    """``TokenizerManager._send_one_request`` before: n > 1 samples are sent, so seeded, each."""
    seed_batch(self, [tokenized_obj])


def seed_batch(self: TokenizerManager, tokenized_objs: Sequence[TokenizedGenerateReqInput]) -> None:
    """``TokenizerManager._send_batch_request`` before: an unseeded request gets its own seed."""
    if config_of(self.server_args) is None:
        return
    for tokenized in tokenized_objs:
        if _generates(tokenized):
            assign_seed(tokenized)


def _generates(tokenized: Any) -> bool:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    return isinstance(tokenized, TokenizedGenerateReqInput)


async def take_extra_body(original: Any, self: Any, request: Any, raw_request: Any) -> Any:
    """``OpenAIServingBase.handle_request`` around: ``vericache`` beside the OpenAI parameters.

    The request classes drop fields they do not know, so it is read from the body, which Starlette
    keeps parsed, and moved to where the native API has it.
    """
    on = config_of(self.tokenizer_manager.server_args) is not None
    if on and hasattr(request, "custom_params") and isinstance(raw_request, Request):
        body = await raw_request.json()
        if KEY in body:
            given = request.custom_params or {}
            if KEY in given:
                message = f"{KEY} was given twice: in custom_params and beside it"
                return self.create_error_response(message)
            request.custom_params = {**given, KEY: body[KEY]}
    return await original(self, request, raw_request)


def check_parameters(original: Any, body: Any) -> str | None:
    """``generate_contract_error`` around: what ``/vertex_generate`` hands on is checked too.

    Stock checks the types of ``/generate`` only; some others end its scheduler.
    """
    from sglang.srt.entrypoints.http_server import get_global_state

    error: str | None = original(body)
    if error is not None or not isinstance(body, Mapping) or "instances" not in body:
        return error
    if config_of(get_global_state().tokenizer_manager.server_args) is None:
        return None
    error = original({"text": "", **(body.get("parameters") or {})})
    return error


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

HOOKS = (
    Hook(
        "sglang.srt.entrypoints.http_server.generate_contract_error",
        ("body",),
        "around",
        check_parameters,
        "/vertex_generate hands its parameters on unchecked",
    ),
    Hook(
        f"{_MANAGER}._create_tokenized_object",
        (
            "self",
            "obj",
            "input_text",
            "input_ids",
            "input_embeds",
            "mm_inputs",
            "token_type_ids",
        ),
        "after",
        admit,
        "no door for a plugin's own checks of a request",
    ),
    Hook(
        f"{_MANAGER}._send_one_request",
        ("self", "tokenized_obj"),
        "before",
        seed_one,
        "unseeded requests share one generator, whose state depends on the batch",
    ),
    Hook(
        f"{_MANAGER}._send_batch_request",
        ("self", "tokenized_objs"),
        "before",
        seed_batch,
        "unseeded requests share one generator, whose state depends on the batch",
    ),
    Hook(
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request",
        ("self", "request", "raw_request"),
        "around",
        take_extra_body,
        "OpenAI request classes drop the unknown field vericache",
    ),
)
