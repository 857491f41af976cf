"""Streams and events for copies on a CPU, with the names of ``torch.cuda``.

``torch.cpu`` has classes of these names that do nothing, so HiCache's copies would run inside the
scheduler's loop. A ``Stream`` here runs them in order on a thread of its own, as the copy engine of
a GPU does, and events tell when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue


class Event:
    """Marks a place in a stream; one that was never recorded counts as reached."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._time = 0.0
        self._reached = threading.Event()
        self._reached.set()
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the present end of ``stream``, by default the current one."""
        stream = stream or current_stream()
        reached = threading.Event()
        self._reached, self._stream = reached, stream

        def reach() -> None:
            self._time = time.perf_counter()
            reached.set()

        stream.launch(reach)

    def elapsed_time(self, later: Event) -> float:
        """Milliseconds from here to ``later``, both reached."""
        return 1e3 * (later._time - self._time)

    def query(self) -> bool:
        """Whether the stream has got there."""
        return self._reached.is_set()

    def synchronize(self) -> None:
        """Block until the stream has got there.

        Raises:
            RuntimeError: a copy of the stream failed.
        """
        self._reached.wait()
        if self._stream is not None:
            self._stream.check()

    def wait(self, stream: Stream | None = None) -> None:
        """Hold ``stream`` until the event is reached."""
        (stream or current_stream()).wait_event(self)


class Stream:
    """Runs what is launched on it in order, on its own thread."""

    def __init__(self, priority: int = 0) -> None:
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="copy-stream", daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except BaseException as error:
                self._error = error

    def launch(self, work: Callable[[], object]) -> None:
        """Append ``work``."""
        self._work.put(work)

    def check(self) -> None:
        """Raise ``RuntimeError`` if anything launched so far has failed."""
        if self._error is not None:
            raise RuntimeError("a copy between KV tiers failed") from self._error

    def wait_event(self, event: Event) -> None:
        """Go on only after ``event``, as recorded now, is reached."""
        self.launch(event._reached.wait)

    def wait_stream(self, stream: object) -> None:
        """Go on only after what was launched on ``stream`` so far.

        A stream of ``torch.cpu`` has run everything already.
        """
        if not isinstance(stream, Stream):
            return
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        """Block until everything launched so far is done."""
        event = Event()
        event.record(self)
        event.synchronize()


class _Inline(Stream):
    """The default stream: the calling thread itself."""

    def __init__(self) -> None:
        self._error = None

    def launch(self, work: Callable[[], object]) -> None:
        work()

    def wait_event(self, event: Event) -> None:
        event.synchronize()


_default = _Inline()
_current = threading.local()


def current_stream() -> Stream:
    """The stream that this thread launches on."""
    found: Stream = getattr(_current, "stream", _default)
    return found


@contextmanager
def stream(used: Stream) -> Iterator[None]:
    """Launch on ``used`` inside the block."""
    before = current_stream()
    _current.stream = used
    try:
        yield
    finally:
        _current.stream = before
