"""A session's server processes: started when needed, few alive at a time."""

from __future__ import annotations

import os
from collections import OrderedDict

from server.harness import LiveServer, ServerSpec
from servers import ServerFailed

# How many servers may be alive: the one tested, and references of comparisons.
LIMIT = "VERICACHE_TEST_SERVERS"
# Variables for every server, as "NAME=VALUE NAME=VALUE", e.g. SGLang's fault injectors.
EXTRA_ENV = "VERICACHE_TEST_SERVER_ENV"
# An idle server has nothing to finish; SGLang's own orderly end takes 15 s.
GRACE_SECONDS = 1.0


class ServerPool:
    """Servers by specification; the least recently used one is stopped to make room."""

    def __init__(self) -> None:
        self.limit = int(os.environ.get(LIMIT, "3"))
        if self.limit < 1:
            raise ValueError(f"{LIMIT} must be at least 1, not {self.limit}")
        words = os.environ.get(EXTRA_ENV, "").split()
        self._env = dict(word.split("=", 1) for word in words)
        self._alive: OrderedDict[ServerSpec, LiveServer] = OrderedDict()
        self._failed: dict[ServerSpec, ServerFailed] = {}

    def get(self, spec: ServerSpec) -> LiveServer:
        """The server of ``spec``, started if it is not alive.

        Raises:
            ServerFailed: it does not start, or did not before; with the tail of its log.
        """
        if spec in self._failed:
            raise self._failed[spec]
        if spec in self._alive and not self._alive[spec].is_alive():
            self.stop(spec)  # the test it died in has failed; the others need not
        if spec not in self._alive:
            while len(self._alive) >= self.limit:
                self.stop(next(iter(self._alive)))
            try:
                self._alive[spec] = spec.start(self._env)
            except ServerFailed as failed:
                self._failed[spec] = failed
                raise
        self._alive.move_to_end(spec)
        return self._alive[spec]

    def stop(self, spec: ServerSpec) -> None:
        """End a server and everything it spawned."""
        process = self._alive.pop(spec).process
        process.stop(GRACE_SECONDS)
        process.log.unlink(missing_ok=True)

    def close(self) -> None:
        """End all servers."""
        while self._alive:
            self.stop(next(iter(self._alive)))
