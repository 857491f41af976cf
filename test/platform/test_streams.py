"""Copies run beside the caller, in order, and events tell the truth about them."""

import threading
import time

import pytest

from sglang_vericache.platform.streams import Event, Stream, current_stream, stream


def test_work_runs_beside_the_caller_and_in_order():
    copies, gate, done = Stream(), threading.Event(), []
    copies.launch(gate.wait)
    for i in range(5):
        copies.launch(lambda i=i: done.append(i))
    event = Event()
    event.record(copies)
    assert not event.query() and done == []
    gate.set()
    event.synchronize()
    assert event.query() and done == [0, 1, 2, 3, 4]


def test_an_event_that_was_never_recorded_counts_as_reached():
    assert Event().query()
    Event().synchronize()


def test_a_block_launches_on_its_stream():
    copies, names = Stream(), []
    default = current_stream()
    with stream(copies):
        assert current_stream() is copies
        current_stream().launch(lambda: names.append(threading.current_thread().name))
        event = Event()
        event.record()
    assert current_stream() is default
    event.synchronize()
    assert names == ["copy-stream"]


def test_a_stream_waits_for_what_another_had():
    first, second, order = Stream(), Stream(), []
    first.launch(lambda: time.sleep(0.05))
    first.launch(lambda: order.append("first"))
    second.wait_stream(first)
    second.launch(lambda: order.append("second"))
    second.synchronize()
    assert order == ["first", "second"]


def test_a_wait_is_for_the_event_as_it_was_then():
    first, second, gate = Stream(), Stream(), threading.Event()
    event = Event()
    event.record(first)
    event.wait(second)
    first.launch(gate.wait)
    event.record(first)
    second.synchronize()  # not held by the later record
    gate.set()
    first.synchronize()


def test_a_failed_copy_is_reported():
    copies = Stream()
    copies.launch(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="copy between KV tiers failed"):
        copies.synchronize()


def test_events_measure_the_time_between_them():
    copies = Stream()
    first, last = Event(enable_timing=True), Event(enable_timing=True)
    first.record(copies)
    copies.launch(lambda: time.sleep(0.02))
    last.record(copies)
    last.synchronize()
    assert 20 <= first.elapsed_time(last) < 2000
