"""Clients of a soak: they ask what a catalogue holds in changing ways and compare every answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from _catalogue import Answer, Conversation, Request
from _client import events
from _sweep import say

PLAIN = {"enabled": False}
# Conversations and ways to ask are drawn with these weights.
KINDS = {"chat": 3, "document": 4, "short": 3}
WAYS = {"whole": 55, "stream": 15, "leave": 15, "abort": 15}
SALTS = (None, None, None, "a", "b")
PLAIN_SHARE, DEFAULT_SHARE = 0.12, 0.12
# A client leaves after at most so many chunks.
CHUNKS = 8
# Mismatches that are described.
EXAMPLES = 20


@dataclass(frozen=True)
class Way:
    """How a request is asked.

    Attributes:
        kind: ``whole``, ``stream``, ``leave`` (a stream that is not read to its end) or ``abort``
            (by id).
        vericache: ``custom_params.vericache``.
        salt: ``cache_salt``.
        rid: the request's id.
        after: chunks before leaving, or seconds before the abort.
    """

    kind: str = "whole"
    vericache: Mapping[str, Any] = field(default_factory=lambda: PLAIN)
    salt: str | None = None
    rid: str | None = None
    after: float = 0.0


@dataclass
class Tally:
    """What the clients saw.

    Attributes:
        requests: answers compared in full, by kind of conversation.
        cut: requests that were aborted or left, by way; what they brought was compared too.
        mismatches, failed: answers unlike the reference, and refusals nobody asked for.
        retractions: as the server counts them in its answers.
        host_hits: prompt tokens found in host memory.
        examples: the first mismatches and refusals, described.
        seconds: mean time of an answer, lately.
    """

    requests: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    mismatches: int = 0
    failed: int = 0
    retractions: int = 0
    host_hits: int = 0
    examples: list[str] = field(default_factory=list)
    seconds: float = 1.0

    def describe(self, text: str) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(text)
            say(text)


class Refused(RuntimeError):
    """Any status but 200."""


class Client:
    """Asks one server."""

    def __init__(self, http: aiohttp.ClientSession, url: str):
        self._http, self._url = http, url

    async def get(self, path: str) -> Any:
        async with self._http.get(self._url + path) as response:
            response.raise_for_status()
            return await response.json()

    async def post(self, path: str, body: Mapping[str, Any]) -> str:
        async with self._http.post(self._url + path, json=body) as response:
            text = await response.text()
            if response.status != 200:
                raise Refused(f"HTTP {response.status}: {text[:500]}")
            return text

    async def reference(self, request: Request) -> Answer:
        """The answer without drafts."""
        return await self.ask(request, Way())

    async def ask(self, request: Request, way: Way) -> Answer:
        """The answer, or what there was of it when it was cut.

        Raises:
            Refused: any status but 200, unless the request was aborted.
            aiohttp.ClientError: the server is gone.
        """
        if way.kind != "abort":
            return await self._ask(request, way)
        aborting = asyncio.create_task(self._abort(way))
        try:
            return await self._ask(request, way)
        except Refused as error:
            if "abort" not in str(error).lower():
                raise
            return Answer((), (), "", None, {})
        finally:
            aborting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await aborting

    async def _abort(self, way: Way) -> None:
        await asyncio.sleep(way.after)
        await self.post("/abort_request", {"rid": way.rid})

    async def _ask(self, request: Request, way: Way) -> Answer:
        path, body = _body(request, way)
        if way.kind in ("stream", "leave"):
            return await self._stream(path, body, way)
        async with self._http.post(self._url + path, json=body) as response:
            if response.status != 200:
                raise Refused(f"HTTP {response.status}: {(await response.text())[:500]}")
            found = await response.json()
        if not request.is_chat:
            return Answer.of(found["output_ids"], found["text"], found["meta_info"])
        choice = found["choices"][0]
        text = choice["message"]["content"]
        return Answer.of(choice["response_token_ids"], text, choice["meta_info"])

    async def _stream(self, path: str, body: Mapping[str, Any], way: Way) -> Answer:
        answer = Answer((), (), "", None, {})
        async with self._http.post(self._url + path, json=body) as response:
            if response.status != 200:
                raise Refused(f"HTTP {response.status}: {(await response.text())[:500]}")
            chunks = 0
            async for event in events(response):
                later = Answer.of(event["output_ids"], event["text"], event["meta_info"])
                if later.ids[: len(answer.ids)] != answer.ids:
                    raise Refused(f"a chunk took back tokens: {answer.ids}, then {later.ids}")
                answer, chunks = later, chunks + 1
                if way.kind == "leave" and chunks > way.after:
                    break
            response.close()
        return answer


def _body(request: Request, way: Way) -> tuple[str, dict[str, Any]]:
    """Route and body."""
    common = {"custom_params": {"vericache": dict(way.vericache)}, "ignore_eos": not request.stops}
    common |= {"temperature": 0} if request.seed is None else {"temperature": 0.8, "top_p": 0.95}
    fields = {"rid": way.rid, "cache_salt": way.salt}
    fields = {name: value for name, value in fields.items() if value is not None}
    if request.is_chat:
        shown = {"logprobs": True, "return_token_ids": True, "return_meta_info": True}
        limits = {"max_tokens": request.tokens, "seed": request.seed}
        body = {"model": "soak", "messages": list(request.prompt), **common, **shown, **limits}
        return "/v1/chat/completions", body | fields
    sampling = {**common, "max_new_tokens": request.tokens, "sampling_seed": request.seed}
    body = {"input_ids": list(request.prompt), "sampling_params": sampling, "return_logprob": True}
    return "/generate", body | fields | {"stream": way.kind in ("stream", "leave")}


class Traffic:
    """Many clients at once, until told to stop.

    Args:
        compressors, draft_len: what a request may ask for, and the most drafts.
    """

    def __init__(
        self,
        client: Client,
        conversations: Sequence[Conversation],
        seed: int,
        compressors: Sequence[str],
        draft_len: int,
    ):
        self.tally = Tally()
        self._client, self._seed = client, seed
        self._compressors, self._draft_len = compressors, draft_len
        self._by_kind = {kind: [c for c in conversations if c.kind == kind] for kind in KINDS}
        self._ids = itertools.count()
        self._open, self._ended, self._running = asyncio.Event(), False, 0
        self._open.set()

    async def work(self, number: int) -> None:
        """One client: a conversation after the other; who is cut off leaves it."""
        rng = random.Random(f"{self._seed} {number}")
        while not self._ended:
            (kind,) = rng.choices([*KINDS], [*KINDS.values()])
            conversation, salt = rng.choice(self._by_kind[kind]), rng.choice(SALTS)
            for request in conversation.requests:
                await self._open.wait()
                if self._ended:
                    return
                self._running += 1
                try:
                    answered = await self._one(kind, request, self._way(rng, request, salt))
                finally:
                    self._running -= 1
                if not answered:
                    break

    async def drain(self) -> None:
        """Begin nothing and wait until everything begun has ended."""
        self._open.clear()
        while self._running:
            await asyncio.sleep(0.05)

    def resume(self) -> None:
        self._open.set()

    def end(self) -> None:
        """Have the clients stop."""
        self._ended = True
        self._open.set()

    def _way(self, rng: random.Random, request: Request, salt: str | None) -> Way:
        (kind,) = rng.choices([*WAYS], [*WAYS.values()])
        if request.is_chat and kind in ("stream", "leave"):
            kind = "whole"  # its streams bring no token ids
        vericache: Mapping[str, Any] = {
            "compressor": rng.choice(self._compressors),
            "draft_len": rng.randint(1, self._draft_len),
        }
        share = rng.random()
        if share < PLAIN_SHARE + DEFAULT_SHARE:
            vericache = PLAIN if share < PLAIN_SHARE else {}
        after = rng.randrange(CHUNKS) if kind == "leave" else rng.uniform(0, self.tally.seconds)
        # SGLang aborts every request whose id starts with the given one: all are of one length.
        return Way(kind, vericache, salt, f"soak-{next(self._ids):08d}", after)

    async def _one(self, kind: str, request: Request, way: Way) -> bool:
        """Ask and compare; whether the answer was complete."""
        tally, started = self.tally, time.monotonic()
        assert request.expected is not None
        try:
            answer = await self._client.ask(request, way)
        except RuntimeError as error:
            tally.failed += 1
            tally.describe(f"{request.name} {way}: {error}")
            return False
        tally.seconds += 0.05 * (time.monotonic() - started - tally.seconds)
        tally.retractions += answer.meta.get("num_retractions") or 0
        tally.host_hits += (answer.meta.get("cached_tokens_details") or {}).get("host", 0)
        if (difference := answer.difference(request.expected)) is not None:
            tally.mismatches += 1
            keys = ("cached_tokens", "cached_tokens_details", "num_retractions", "vericache")
            found = {key: answer.meta.get(key) for key in keys}
            tally.describe(f"{request.name} {way}: {difference}; {found}")
        if answer.is_cut:
            tally.cut[way.kind] += 1
            if way.kind in ("whole", "stream"):
                tally.failed += 1
                tally.describe(f"{request.name} {way}: ended as {answer.finish}")
            return False
        tally.requests[kind] += 1
        return True
