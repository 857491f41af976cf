"""A streaming client that notes when which token arrived, and the rates computed from that."""

from __future__ import annotations

import asyncio
import bisect
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Stream:
    """One streamed answer.

    Attributes:
        times: ``time.perf_counter()`` of every chunk that brought tokens.
        counts: tokens received up to and including each chunk.
        ids: token ids of the answer; empty where the API does not give them.
        cached: prompt tokens that the server took from its prefix cache.
        retractions: how often SGLang threw the request's KV away for want of room.
    """

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    cached: int = 0
    retractions: int = 0

    @property
    def tokens(self) -> int:
        return self.counts[-1] if self.counts else 0

    def tokens_at(self, moment: float) -> int:
        """Tokens received up to ``moment``."""
        chunks = bisect.bisect_right(self.times, moment)
        return self.counts[chunks - 1] if chunks else 0

    def received(self, tokens: int) -> None:
        if tokens > self.tokens:
            self.times.append(time.perf_counter())
            self.counts.append(tokens)


def decode_rate(streams: Sequence[Stream]) -> float:
    """Tokens per second of the decode phase, over all streams.

    The phase begins when the last stream gets its first token (every prompt has been processed)
    and ends with the last token of any stream. Tokens that came earlier are not counted.
    """
    start = max(stream.times[0] for stream in streams)
    end = max(stream.times[-1] for stream in streams)
    return sum(stream.tokens - stream.tokens_at(start) for stream in streams) / (end - start)


async def _stream_generate(
    http: aiohttp.ClientSession, url: str, prompt: Sequence[int], max_tokens: int
) -> Stream:
    """SGLang's native API; chunks carry all token ids so far."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True},
        "stream": True,
    }
    stream = Stream()
    async with http.post(f"{url}/generate", json=body) as response:
        async for event in events(response):
            stream.received(len(event["output_ids"]))
            stream.ids = event["output_ids"]
            stream.cached = event["meta_info"]["cached_tokens"]
            stream.retractions = event["meta_info"].get("num_retractions") or 0
    return stream


async def _stream_completion(
    http: aiohttp.ClientSession, url: str, prompt: Sequence[int], max_tokens: int
) -> Stream:
    """OpenAI's completions API with vLLM's per-chunk usage."""
    async with http.get(f"{url}/v1/models") as response:
        model = (await response.json())["data"][0]["id"]
    body = {
        "model": model,
        "prompt": list(prompt),
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    stream = Stream()
    async with http.post(f"{url}/v1/completions", json=body) as response:
        async for event in events(response):
            if usage := event.get("usage"):
                stream.received(usage["completion_tokens"])
                stream.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return stream


_APIS = {"sglang": _stream_generate, "openai": _stream_completion}


def stream_all(
    url: str, api: str, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[Stream]:
    """Decode all prompts at once, greedily, exactly ``max_tokens`` tokens each.

    Raises:
        RuntimeError: an answer has another length.
        aiohttp.ClientError: the server refused or broke off.
    """

    async def run() -> list[Stream]:
        limits = aiohttp.TCPConnector(limit=0)
        wait = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=limits, timeout=wait, raise_for_status=True, read_bufsize=1 << 20
        ) as http:
            send = _APIS[api]
            return await asyncio.gather(*(send(http, url, p, max_tokens) for p in prompts))

    streams = asyncio.run(run())
    if wrong := [stream.tokens for stream in streams if stream.tokens != max_tokens]:
        raise RuntimeError(f"answers of {wrong} tokens instead of {max_tokens}")
    return streams


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Decoded ``data:`` lines of a server-sent event stream.

    Raises:
        RuntimeError: the server sent an error event.
    """
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise RuntimeError(f"server: {event['error']}")
        yield event
