"""Real servers for tests: what runs, what is asked, and how answers are compared.

A test names its server with ``@pytest.mark.server(ServerSpec(...))`` and takes the fixture
``server`` (a ``LiveServer``); ``conftest.py`` starts as few processes as possible.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests

from servers import Server
from sglang_vericache.embedded_model import ensure_embedded_model

REQUEST_SECONDS = 300.0
IDLE_SECONDS = 60.0
MAX_CONNECTIONS = 64
# Requests of a 30 s start share servers, so pools are sized for this many tokens unless a test says
# otherwise.
POOL_TOKENS = "32768"
# SGLang's own checks: after every iteration every KV slot is accounted for, no owner's page is in
# the free list; a violation ends the scheduler.
CHECKS = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}


@dataclass(frozen=True)
class ServerSpec:
    """What one server process is.

    Attributes:
        flags: command line; ``--max-total-tokens`` has a default here.
        env: added to the environment, e.g. SGLang's fault injectors.
        stock: run plain ``sglang.launch_server`` on the embedded model instead of ours.
    """

    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    stock: bool = False

    def command(self) -> list[str]:
        module = "sglang.launch_server" if self.stock else "sglang_vericache.launch_server"
        command = [sys.executable, "-m", module, "--model-path", str(ensure_embedded_model())]
        if "--max-total-tokens" not in self.flags:
            command += ["--max-total-tokens", POOL_TOKENS]
        return [*command, *self.flags]

    def start(self, extra_env: Mapping[str, str]) -> LiveServer:
        """Start it and wait until it answers.

        Raises:
            ServerFailed: with the tail of the log.
        """
        server = Server(self.command(), env={**CHECKS, **dict(self.env), **extra_env}, name="test")
        server.start()
        return LiveServer(server)


@dataclass(frozen=True)
class Result:
    """One answer of ``/generate``.

    Attributes:
        ids: output token ids.
        logprobs: of those ids, as sent; empty unless asked for.
        text: decoded output.
        finish: ``finish_reason`` of ``meta_info``.
        meta: the whole ``meta_info``.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: Mapping[str, Any] | None
    meta: Mapping[str, Any]

    @property
    def drafted(self) -> int:
        return self.meta["vericache"]["drafted"]

    @property
    def accepted(self) -> int:
        return self.meta["vericache"]["accepted"]

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Result:
        meta = answer["meta_info"]
        entries = meta.get("output_token_logprobs") or ()
        ids = tuple(answer["output_ids"])
        if entries:
            assert tuple(entry[1] for entry in entries) == ids, "logprobs of other tokens"
        return cls(ids, tuple(e[0] for e in entries), answer["text"], meta["finish_reason"], meta)


@dataclass(frozen=True)
class Ask:
    """One request of ``/generate``: greedy, with logprobs, to the full length by default.

    Attributes:
        prompt: token ids or text.
        tokens: ``max_new_tokens``.
        vericache: ``custom_params.vericache``; None leaves it out.
        sampling: further sampling parameters.
        fields: further fields of the request.
    """

    prompt: tuple[int, ...] | str
    tokens: int = 16
    vericache: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_new_tokens": self.tokens, "ignore_eos": True}
        sampling |= self.sampling
        if self.vericache is not None:
            sampling["custom_params"] = {"vericache": dict(self.vericache)}
        prompt = self.prompt
        given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        return {**given, "sampling_params": sampling, "return_logprob": True, **self.fields}


class RequestFailed(RuntimeError):
    """The server answered with an error; ``status`` and ``text`` are its answer."""

    def __init__(self, status: int, text: str):
        super().__init__(f"HTTP {status}: {text[:2000]}")
        self.status, self.text = status, text


class LiveServer:
    """A running server and its client."""

    def __init__(self, process: Server):
        self.process = process
        self.url = process.url
        self._threads = ThreadPoolExecutor(MAX_CONNECTIONS)

    def is_alive(self) -> bool:
        """Whether the launcher runs; it ends when one of its processes does."""
        return psutil.Process(self.process.pid).status() != psutil.STATUS_ZOMBIE

    def post(self, path: str, body: Mapping[str, Any], **options: Any) -> requests.Response:
        """``POST`` without a check of the status; ``options`` go to ``requests``."""
        return requests.post(self.url + path, json=body, **{"timeout": REQUEST_SECONDS, **options})

    def ask(self, prompt: Sequence[int] | str, tokens: int = 16, **fields: Any) -> Result:
        """One request; ``fields`` are those of ``Ask``."""
        prompt = prompt if isinstance(prompt, str) else tuple(prompt)
        return self.answer(Ask(prompt, tokens, **fields))

    def answer(self, ask: Ask) -> Result:
        """Send one request.

        Raises:
            RequestFailed: any status but 200.
        """
        return Result.of(_checked(self.post("/generate", ask.body())))

    def submit(self, ask: Ask) -> Future[Result]:
        """Send one request from another thread."""
        return self._threads.submit(self.answer, ask)

    def concurrently(self, asks: Iterable[Ask]) -> list[Result]:
        """Send all at once, each on its own connection; answers in order."""
        return [future.result() for future in [self.submit(ask) for ask in asks]]

    def warm(self, prompt: tuple[int, ...]) -> None:
        """Have the KV of a prompt computed and cached, unless it is."""
        self.answer(Ask(prompt, tokens=1))

    def stream(self, ask: Ask) -> list[Result]:
        """Send one request and read its stream: the output so far after every chunk.

        Raises:
            RequestFailed: any status but 200.
        """
        response = self.post("/generate", ask.body() | {"stream": True}, stream=True)
        if response.status_code != 200:
            raise RequestFailed(response.status_code, response.text)
        data = (line[6:] for line in response.iter_lines() if line.startswith(b"data: "))
        return [Result.of(json.loads(chunk)) for chunk in data if chunk != b"[DONE]"]

    def streams(self, asks: Iterable[Ask]) -> list[list[Result]]:
        """Stream all at once; see ``stream``."""
        return list(self._threads.map(self.stream, asks))

    def abort(self, rid: str) -> None:
        """Cancel a request by its id, which ``Ask.fields`` set."""
        self.post("/abort_request", {"rid": rid})

    def batch(self, asks: Iterable[Ask]) -> list[Result]:
        """Send all in one HTTP request, so that the scheduler receives them together.

        ``fields`` must be the same in all of them.
        """
        bodies = [ask.body() for ask in asks]
        body = dict(bodies[0])
        for name in ("input_ids", "text", "sampling_params"):
            if name in body:
                body[name] = [each[name] for each in bodies]
        return [Result.of(answer) for answer in _checked(self.post("/generate", body))]

    def get(self, path: str) -> Any:
        return _checked(requests.get(self.url + path, timeout=60))

    def counters(self) -> dict[str, Any]:
        """Counters of ``GET /vericache``."""
        return self.get("/vericache")["counters"]

    def load(self) -> dict[str, Any]:
        """The scheduler's own report of requests and KV slots (``/v1/loads``)."""
        return self.get("/v1/loads")["loads"][0]

    def flush(self) -> None:
        """Empty the radix cache."""
        response = self.post("/flush_cache?timeout=30", {})
        assert response.status_code == 200, response.text

    def update_weights(self, checkpoint: Path, **options: Any) -> None:
        """Replace the weights in place by those of a folder; ``options`` go to ``requests``."""
        response = self.post(
            "/update_weights_from_disk", {"model_path": str(checkpoint)}, **options
        )
        assert response.json()["success"], response.text

    def check_idle(self) -> None:
        """Wait until nothing runs, then assert that every KV slot is free or evictable.

        ``num_used_tokens`` is total - free - evictable: locked and leaked slots alike. When idle,
        the scheduler itself also compares its pools and request rows, and ends on a mismatch.

        Raises:
            AssertionError: slots in use, or the server is gone; with the tail of its log.
        """
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            try:
                load = self.load()
            except (requests.RequestException, RequestFailed) as error:
                raise AssertionError(f"server is gone: {error}\n{self.process.tail()}") from None
            busy = {
                name: load[name]
                for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
                if load[name]
            }
            if not busy:
                return
            if time.monotonic() > deadline:
                raise AssertionError(f"not idle: {busy}\n{self.process.tail()}")
            time.sleep(0.05)


def _checked(response: requests.Response) -> Any:
    if response.status_code != 200:
        raise RequestFailed(response.status_code, response.text)
    return response.json()
