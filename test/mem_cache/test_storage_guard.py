"""A store that raises, hangs or is slow: calls end in time, not made when futile (case H8)."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mem_cache.storing import MemoryStore, Pool, indices
from sglang_vericache.platform import bootstrap

bootstrap.install()

from sglang_vericache.mem_cache.storage import SafeStorage  # noqa: E402
from sglang_vericache.mem_cache.storage_guard import Options  # noqa: E402
from sglang_vericache.mem_cache.storage_objects import LANES  # noqa: E402
from sglang_vericache.mem_cache.storage_stores import (  # noqa: E402
    MooncakeStore,
    StoreError,
)

KEYS = [f"{i:064x}" for i in range(3)]
EVERY = indices(0, 1, 2)
SOON = 0.1


def open_storage(**options):
    store = MemoryStore()
    storage = SafeStorage(store, "00", Pool().fill(), Options(**options))
    assert storage.batch_set_v1(KEYS, EVERY) == [True] * 3
    store.calls.clear()
    return store, storage


def raising(error, only=None):
    def before(operation):
        if only in (None, operation):
            raise error

    return before


ERRORS = [OSError("gone"), StoreError("no"), ValueError("a bug"), MemoryError(), TimeoutError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_it_raises_is_a_miss(error):
    store, storage = open_storage(failures=100, retry_s=0)
    store.before = raising(error)
    reason = "timeout" if isinstance(error, TimeoutError) else "error"
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_get_v1(KEYS, EVERY) == [False] * 3
    assert storage.batch_set_v1(["d" * 64], indices(4)) == [False]
    assert storage.put("k", b"x") is False and storage.get("k") is None
    storage.clear()
    errors = storage.usage()["errors"]
    assert errors == {f"query_{reason}": 3, f"read_{reason}": 2}
    store.before = lambda operation: None
    store.before = raising(error, "write")
    assert storage.batch_set_v1(["d" * 64], indices(4)) == [False]
    assert storage.usage()["errors"][f"write_{reason}"] == 1


def test_left_alone_after_failures_and_tried_again():
    store, storage = open_storage(failures=3, retry_s=SOON)
    store.before = raising(OSError())
    for _ in range(6):
        assert storage.batch_exists(KEYS) == 0
    assert store.calls == ["exists"] * 3
    assert storage.usage()["errors"] == {"query_error": 3, "query_skipped": 3}
    time.sleep(SOON)
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_exists(KEYS) == 0
    assert store.calls == ["exists"] * 4, "one failure is enough after a pause"
    store.before = lambda operation: None
    time.sleep(SOON)
    assert storage.batch_exists(KEYS) == 3
    store.before = raising(OSError())
    storage.batch_exists(KEYS)
    assert storage.usage()["errors"]["query_skipped"] == 4, "a success forgets earlier failures"
    store.before = lambda operation: None
    assert storage.batch_exists(KEYS) == 3


def test_a_store_that_cannot_be_written_is_read():
    store, storage = open_storage(failures=1, retry_s=60)
    store.before = raising(OSError(), "write")
    for i in range(2):
        assert storage.batch_set_v1([f"{i + 7}" * 64], indices(5)) == [False]
    assert store.calls.count("write") == 1
    assert storage.batch_get_v1(KEYS, EVERY) == [True] * 3


@pytest.fixture
def released():
    event = threading.Event()
    yield event
    event.set()


def test_a_call_that_hangs_costs_one_timeout(released):
    store, storage = open_storage(timeout_s=SOON, retry_s=60)
    pool = storage._pool
    pool.kv_buffer.fill_(-1)
    store.before = lambda operation: released.wait()
    began = time.monotonic()
    assert storage.batch_get_v1(KEYS, EVERY) == [False] * 3
    assert SOON <= time.monotonic() - began < SOON + 1
    began = time.monotonic()
    assert storage.batch_exists(KEYS) == 0
    assert time.monotonic() - began < SOON, "no second time-out"
    assert storage.usage()["errors"] == {"read_timeout": 1, "query_skipped": 1}
    released.set()
    time.sleep(SOON)
    assert (pool.kv_buffer == -1).all(), "bytes that came late reached the pool"


def test_hanging_calls_use_up_no_threads(released):
    store, storage = open_storage(timeout_s=SOON, retry_s=0)
    threads = threading.active_count()
    store.before = lambda operation: released.wait()
    for _ in range(LANES + 2):
        assert storage.batch_exists(KEYS) == 0
    assert storage.usage()["errors"] == {"query_timeout": LANES, "query_busy": 2}
    assert threading.active_count() == threads
    released.set()
    store.before = lambda operation: None
    time.sleep(SOON)
    assert storage.batch_get_v1(KEYS, EVERY) == [True] * 3


def test_interrupted_calls_return_and_are_no_fault(released):
    store, storage = open_storage(timeout_s=60)
    store.before = lambda operation: released.wait()
    with ThreadPoolExecutor() as threads:
        call = threads.submit(storage.batch_get_v1, KEYS, EVERY)
        while not store.calls:
            time.sleep(0.001)
        began = time.monotonic()
        with storage.interrupted():
            assert call.result() == [False] * 3
            assert storage.batch_exists(KEYS) == 0
        assert time.monotonic() - began < 1
    released.set()
    assert storage.usage()["errors"] == {}
    assert storage.batch_exists(KEYS) == 3


def test_a_pretended_link_is_shared():
    nbytes = 3 * Pool().get_data_page(0).nbytes
    seconds = 0.2
    store, storage = open_storage(link_gb_per_s=nbytes / seconds / 1e9, link_latency_ms=50)
    began = time.monotonic()
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(storage.batch_get_v1, KEYS, EVERY) for _ in range(2)]
        assert all(call.result() == [True] * 3 for call in calls)
    assert 2 * seconds + 0.05 < time.monotonic() - began < 4 * seconds
    assert storage.usage()["seconds"]["read"] > 3 * seconds
    assert store.calls == ["read"] * 2


@pytest.mark.parametrize(
    "given", [{"timeout": 1}, {"timeout_s": "1"}, {"timeout_s": -1}, {"failures": 0}, [], True]
)
def test_wrong_options_are_named(given):
    with pytest.raises(ValueError, match="--hicache-storage-backend-extra-config: vericache"):
        Options.parse(given)


def test_options():
    assert Options.parse({}) == Options()
    assert Options.parse({"timeout_s": 1, "link_gb_per_s": 0.5}).link_gb_per_s == 0.5


class Client:
    """Mooncake's, with codes to answer."""

    def __init__(self, *codes):
        self.codes = codes

    def batch_is_exist(self, names):
        return list(self.codes)

    def batch_get_into(self, names, places, sizes):
        return list(self.codes)

    batch_put_from = batch_get_into


class Backend:
    def __init__(self, *codes):
        self.store = Client(*codes)


def test_what_mooncake_says():
    names, records = ["a", "b"], [Pool().kv_buffer[0, 0, :2].flatten()] * 2
    size = len(records[0])
    assert MooncakeStore(Backend(1, 0)).exists(names) == [True, False]
    for codes, sizes in {
        (size, size - 1): [size, size - 1],
        (-704, size): [None, size],
        (size, -600): [size, size + 1],
    }.items():
        assert MooncakeStore(Backend(*codes)).read(names, records) == sizes
    MooncakeStore(Backend(0, 0)).write(names, records)
    dead = MooncakeStore(Backend(0, -900))
    for call in (dead.write, dead.read, lambda names, records: dead.exists(names)):
        with pytest.raises(StoreError, match="-900"):
            call(names, records)
