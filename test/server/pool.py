"""A session's server processes: few alive at a time, the next one started ahead."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from server.harness import LiveServer, ServerSpec
from servers import ServerFailed

# How many servers may be alive: the one tested, its reference, the next one. Each takes 4 to 5 GB.
LIMIT = "VERICACHE_TEST_SERVERS"
# Variables for every server, as "NAME=VALUE NAME=VALUE", e.g. SGLang's fault injectors.
EXTRA_ENV = "VERICACHE_TEST_SERVER_ENV"
# An idle server has nothing to finish; SGLang's own orderly end takes 15 s.
GRACE_SECONDS = 1.0


class ServerPool:
    """Servers by specification; to make room, the least recently used one is stopped.

    A third of a session would be starts, most of them imports on one core: while a server is
    tested, the next one starts.

    Args:
        references: by specification, the server that its tests compare with; in the order in which
            tests ask for them.
    """

    def __init__(self, references: Mapping[ServerSpec, ServerSpec] | None = None) -> None:
        self.limit = int(os.environ.get(LIMIT, "3"))
        if self.limit < 1:
            raise ValueError(f"{LIMIT} must be at least 1, not {self.limit}")
        words = os.environ.get(EXTRA_ENV, "").split()
        self._env = dict(word.split("=", 1) for word in words)
        self._references = dict(references or {})
        self._ahead = list(self._references)
        # Those that a test runs on or will soon: not stopped to make room.
        self._needed: set[ServerSpec] = set()
        # Started or starting, least recently used first.
        self._alive: OrderedDict[ServerSpec, Future[LiveServer]] = OrderedDict()
        self._failed: dict[ServerSpec, ServerFailed] = {}
        # One thread for the whole session: a server ends with the thread that started it.
        self._starter = ThreadPoolExecutor(1)

    def get(self, spec: ServerSpec) -> LiveServer:
        """The server of ``spec``, started if it is not alive.

        Raises:
            ServerFailed: it does not start, or did not before; with the tail of its log.
        """
        if spec in self._failed:
            raise self._failed[spec]
        if spec in self._alive and _died(self._alive[spec]):
            self.stop(spec)  # the test it died in has failed; the others need not
        soon: list[ServerSpec] = []
        if spec in self._ahead:  # tests of those before it are over
            self._ahead = self._ahead[self._ahead.index(spec) + 1 :]
            soon = [self._references[spec], *self._ahead[:1]][: self.limit - 1]
            self._needed = {spec, *soon}
        self._start(spec)
        self._alive.move_to_end(spec)
        try:
            server = self._alive[spec].result()
        except ServerFailed as failed:
            del self._alive[spec]
            self._failed[spec] = failed
            raise
        for following in soon:
            if following not in self._failed:
                self._start(following)
        return server

    def stop(self, spec: ServerSpec) -> None:
        """End a server and everything it spawned."""
        starting = self._alive.pop(spec)
        if not starting.cancel() and starting.exception() is None:
            process = starting.result().process
            process.stop(GRACE_SECONDS)
            process.log.unlink(missing_ok=True)

    def close(self) -> None:
        """End all servers."""
        while self._alive:
            self.stop(next(iter(self._alive)))
        self._starter.shutdown()

    def _start(self, spec: ServerSpec) -> None:
        if spec in self._alive:
            return
        while len(self._alive) >= self.limit:
            unneeded = [old for old in self._alive if old not in self._needed]
            self.stop((unneeded or list(self._alive))[0])
        self._alive[spec] = self._starter.submit(spec.start, self._env)


def _died(starting: Future[LiveServer]) -> bool:
    if not starting.done() or starting.exception() is not None:
        return False  # whoever asks for it learns why
    return not starting.result().is_alive()
