"""Calls into a store that may fail, hang or be slow: bounded in time, counted, skipped when futile.

A call runs on a thread of its own and touches only memory of that thread (a lane). One that
outlasts its deadline is left alone, and its lane is used again only when it returns.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

logger = logging.getLogger(__name__)
T = TypeVar("T")
# How long a wait goes on after ``Guard.interrupted`` began, at most.
POLL_SECONDS = 0.1


class Fault(Exception):
    """A call brought nothing; ``kind`` is one of those of ``StorageCounters.errors``."""

    def __init__(self, kind: str):
        super().__init__(kind)
        self.kind = kind


@dataclass(frozen=True)
class Options:
    """Key ``vericache`` of ``--hicache-storage-backend-extra-config``.

    Attributes:
        timeout_s: longest a call may take; calls move at most a few MiB, or one page.
        failures: consecutive failed calls after which the store is left alone.
        retry_s: for how long.
        link_gb_per_s: pretend that the store's link has no more than 10^9 bytes a second of this;
            0 for no limit.
        link_latency_ms: pretend that a call takes as much longer.
    """

    timeout_s: float = 3.0
    failures: int = 3
    retry_s: float = 10.0
    link_gb_per_s: float = 0.0
    link_latency_ms: float = 0.0

    @classmethod
    def parse(cls, given: Any) -> Options:
        """From JSON.

        Raises:
            ValueError: an unknown key or a value out of range.
        """
        where = "--hicache-storage-backend-extra-config: vericache"
        known = cls.__dataclass_fields__
        if not isinstance(given, dict) or not given.keys() <= known.keys():
            raise ValueError(f"{where} must be an object with keys among {', '.join(known)}")
        for key, value in given.items():
            least = 1 if key == "failures" else 0
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least:
                raise ValueError(f"{where}.{key} must be a number of at least {least}: {value!r}")
        return cls(**given)


@dataclass
class StorageCounters:
    """What was asked of a store.

    Attributes:
        queried, found: objects asked for, and how many of them were there.
        read, written: objects that arrived whole, and that were stored.
        bytes_read, bytes_written: of those.
        seconds: in calls to the store, by operation (``query``, ``read``, ``write``, ``remove``).
        errors: calls and objects that failed, as ``operation_reason``: ``missing`` (gone since it
            was asked for), ``corrupt`` (not what was stored), ``error`` (the store failed, or
            refused to store), ``timeout``, ``busy`` (earlier calls still hang), ``skipped`` (left
            alone after failures).
    """

    queried: int = 0
    found: int = 0
    read: int = 0
    written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    errors: Counter[str] = field(default_factory=Counter)


class Breaker:
    """Leaves a store alone for a while after it failed several times in a row, or hung once."""

    def __init__(self, options: Options):
        self._options = options
        self._failures = 0
        self._closed_until = 0.0

    def allows(self) -> bool:
        return time.monotonic() >= self._closed_until

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, hung: bool) -> None:
        self._failures += 1
        # After the pause one more failure is enough.
        if hung or self._failures >= self._options.failures:
            self._closed_until = time.monotonic() + self._options.retry_s


class Link:
    """Makes a store seem to be behind a slower link, shared by all calls."""

    def __init__(self, options: Options, stop: threading.Event):
        self._bytes_per_s = options.link_gb_per_s * 1e9
        self._latency = options.link_latency_ms / 1e3
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._stop = stop

    def carry(self, nbytes: int, began: float) -> None:
        """Wait until a call that began then would have moved its bytes."""
        until = began + self._latency
        if self._bytes_per_s:
            with self._lock:
                self._free_at = max(began, self._free_at) + nbytes / self._bytes_per_s
                until = self._free_at + self._latency
        self._stop.wait(max(0.0, until - time.monotonic()))


class Lane:
    """One thread and the records that its calls may touch.

    Attributes:
        records: uint8, one object each.
        task: the latest call since the lane was taken.
    """

    def __init__(self, records: list[Tensor]):
        self.records = records
        self.task: Future[Any] | None = None
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, daemon=True, name="vericache-store").start()

    def begin(self) -> None:
        """Forget the last call."""
        self.task = None

    def submit(self, function: Callable[[], T]) -> Future[T]:
        task: Future[T] = Future()
        self.task = task
        self._work.put((function, task))
        return task

    def close(self) -> None:
        """End the thread, once its call has returned."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            function, task = work
            try:
                task.set_result(function())
            except BaseException as error:
                task.set_exception(error)


class Guard:
    """Runs calls; see the module."""

    def __init__(self, options: Options, lanes: list[list[Tensor]]):
        self.counters = StorageCounters()
        self._options = options
        self._stop = threading.Event()
        self._link = Link(options, self._stop)
        self._breakers = {"read": Breaker(options), "write": Breaker(options)}
        self._idle: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._lanes = [Lane(records) for records in lanes]
        for lane in self._lanes:
            self._idle.put(lane)

    def close(self) -> None:
        """End the threads of all lanes; calls that begin later find none."""
        while not self._idle.empty():
            self._idle.get()
        for lane in self._lanes:
            lane.close()

    def count(self, **amounts: int) -> None:
        """Add to counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self.counters, name, getattr(self.counters, name) + amount)

    def snapshot(self) -> dict[str, Any]:
        """Counters as JSON-ready values."""
        with self._lock:
            values = vars(self.counters)
            return {k: dict(v) if isinstance(v, dict) else v for k, v in values.items()}

    def fault(self, operation: str, kind: str) -> Fault:
        """Count one."""
        with self._lock:
            self.counters.errors[f"{operation}_{kind}"] += 1
        return Fault(kind)

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Calls that run or begin meanwhile return soon, with a fault that is not counted."""
        self._stop.set()
        try:
            yield
        finally:
            self._stop.clear()

    def check(self) -> None:
        """Raise ``Fault`` while interrupted."""
        if self._stop.is_set():
            raise Fault("interrupted")

    @contextmanager
    def lane(self, operation: str) -> Iterator[Lane]:
        """A lane for calls of one operation.

        Raises:
            Fault: there is none, or no use in calling.
        """
        self.check()
        if not self._breaker(operation).allows():
            raise self.fault(operation, "skipped")
        try:
            lane = self._idle.get(timeout=self._options.timeout_s)
        except queue.Empty:
            raise self.fault(operation, "busy") from None
        lane.begin()
        try:
            yield lane
        finally:
            if lane.task is None:
                self._idle.put(lane)
            else:  # at once, unless its last call hangs
                lane.task.add_done_callback(lambda _: self._idle.put(lane))

    def call(
        self,
        lane: Lane,
        operation: str,
        function: Callable[[], T],
        moved: Callable[[T], int] = lambda result: 0,
    ) -> T:
        """Run a function of the store on a lane.

        Args:
            moved: bytes that it moved, by its result; for the pretended link.

        Raises:
            Fault: it raised, or did not return in time.
        """
        self.check()
        breaker, began = self._breaker(operation), time.monotonic()
        task = lane.submit(function)
        try:
            self._wait(task, began + self._options.timeout_s)
            result = task.result()
        except TimeoutError:
            breaker.failed(hung=True)
            logger.warning("The store did not %s in %g s", operation, self._options.timeout_s)
            raise self.fault(operation, "timeout") from None
        except Fault:
            raise
        except Exception as error:
            breaker.failed(hung=False)
            logger.warning("The store failed to %s: %s: %s", operation, type(error).__name__, error)
            raise self.fault(operation, "error") from error
        else:
            breaker.succeeded()
            self._link.carry(moved(result), began)
            return result
        finally:
            with self._lock:
                self.counters.seconds[operation] += time.monotonic() - began

    def _wait(self, task: Future[Any], deadline: float) -> None:
        while not task.done():
            self.check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            wait([task], min(left, POLL_SECONDS))

    def _breaker(self, operation: str) -> Breaker:
        return self._breakers["write" if operation == "write" else "read"]
