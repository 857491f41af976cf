"""X1 from a remote store, and from one that is damaged, hangs or is gone (cases H8, H10, H11, H16).

One server on a directory of files; the last test hands it to Mooncake over TCP while it runs.
"""

import importlib
import os
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import requests
import torch

from server.comparing import PLAIN, assert_identical, difference
from server.harness import Ask
from server.specs import REMOTE, STORE_DIRECTORY
from server.storing import ADMIN, PAGE, POLICY, compute, flush, from_store, usage
from servers import free_port
from sglang_vericache.embedded_model import ensure_embedded_model
from sglang_vericache.mem_cache import storage_record
from sglang_vericache.platform import bootstrap

bootstrap.install()

from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

PAGES = 40
SCRIPT = Path(__file__).parents[2] / "scripts" / "mooncake_store.py"
DIRECTORY = Path(STORE_DIRECTORY)

pytestmark = [pytest.mark.slow, pytest.mark.server(REMOTE)]


@pytest.fixture(scope="module")
def prompt(make_corpus):
    """It fills its pages, and is a few tokens longer."""
    return tuple(make_corpus().prompt(PAGES * PAGE + 5))


@pytest.fixture
def ask(prompt, request):
    """A request of this test alone: its first token is its own."""
    first = 1000 + zlib.crc32(request.node.name.encode()) % 10000
    return Ask((first, *prompt[1:]), 24, {"compressor": "snapkv", "draft_len": 4})


def page_files(server, ask):
    """Files of the pages of the prompt, in order."""
    keys = get_storage_hash_str(RadixKey(array("q", ask.prompt)), None, page_size=PAGE)
    identity = usage(server)["identity"]
    files = [list(DIRECTORY.glob(f"{identity}-{key}_*.bin")) for key in keys[:PAGES]]
    assert all(len(found) == 1 for found in files)
    return [path for (path,) in files]


def kv_of(path):
    """The bytes of a page without its proof."""
    return path.read_bytes()[: -storage_record.TRAILER_BYTES]


def forge(path, kv):
    """Put other KV into the file of a page, with a proof that it belongs there."""
    record = torch.frombuffer(bytearray(len(kv) + storage_record.TRAILER_BYTES), dtype=torch.uint8)
    record[: len(kv)] = torch.frombuffer(bytearray(kv), dtype=torch.uint8)
    name = path.name.removesuffix(path.name[path.name.index("_") :])
    storage_record.seal(record, name, storage_record.Part(len(kv), len(kv)))
    path.write_bytes(record.numpy().tobytes())


def test_the_prompt_comes_from_the_store(server, ask):
    expected, written = compute(server, ask)
    assert written >= PAGES
    before = usage(server)
    found, pages = from_store(server, ask)
    assert_identical([found], [expected])
    assert pages == PAGES
    after = usage(server)
    assert after["read"] - before["read"] >= PAGES
    assert after["errors"] == before["errors"]
    assert after["seconds"]["read"] > before["seconds"].get("read", 0)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_prompts_of_whole_pages(more, server, ask):
    """H16: whole pages, one token less and one more; at least one token is computed."""
    whole = replace(ask, prompt=ask.prompt[: PAGES // 2 * PAGE + more])
    expected, _ = compute(server, whole)
    found, pages = from_store(server, whole)
    assert_identical([found], [expected])
    assert pages == (len(whole.prompt) - 1) // PAGE


def test_the_output_depends_on_what_is_stored(server, ask):
    """Negative control: a page with other KV that passes its check changes the answer."""
    expected, _ = compute(server, ask)
    path = page_files(server, ask)[2]
    forge(path, bytes(len(kv_of(path))))
    found, pages = from_store(server, ask)
    assert pages == PAGES
    assert difference(found, expected) is not None


def test_a_damaged_page_is_computed_and_stored_again(server, ask):
    """H8: what is in front of it comes from the store, the rest is computed."""
    expected, _ = compute(server, ask)
    path = page_files(server, ask)[7]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    before = usage(server)["errors"]
    found, pages = from_store(server, ask)
    assert_identical([found], [expected])
    assert pages == 7
    assert usage(server)["errors"]["read_corrupt"] == before.get("read_corrupt", 0) + 1
    found, pages = from_store(server, ask)
    assert_identical([found], [expected])
    assert pages == PAGES


def test_a_store_that_hangs(server, ask):
    """H8: the answer comes without the pages that do not, and the store is used again."""
    expected, _ = compute(server, ask)
    path = page_files(server, ask)[30]
    data = path.read_bytes()
    path.unlink()
    os.mkfifo(path)  # whoever opens it waits for somebody who writes
    before = usage(server)["errors"]
    began = time.monotonic()
    found, pages = from_store(server, ask)
    assert_identical([found], [expected])
    assert 0 < pages <= 30
    assert usage(server)["errors"]["read_timeout"] == before.get("read_timeout", 0) + 1
    assert time.monotonic() - began < 60
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # fails if nobody hangs there
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    assert_used_again(server, ask, expected)


def assert_used_again(server, ask, expected):
    """A store that works again is, once the server tries: at most ``Options.retry_s`` later."""
    pages, deadline = 0, time.monotonic() + 60
    while pages < PAGES:
        assert time.monotonic() < deadline, usage(server)
        found, pages = from_store(server, ask)
        assert_identical([found], [expected])


def test_a_salt_holds_in_the_store(server, ask):
    """H11: one salt's pages are not another's."""
    compute(server, ask)
    salted = Ask(ask.prompt, 8, fields={"cache_salt": "another"})
    _, pages = from_store(server, salted)
    assert pages == 0
    _, pages = from_store(server, salted)
    assert pages == PAGES


def test_updated_weights_use_nothing_of_the_old(server, ask, other_weights):
    """H10: not from the device, the host or the store, nor drafts on a compressed copy."""
    old, _ = compute(server, ask)
    before = server.counters()["provisional"]
    _, pages = from_store(server, ask)
    tiers = server.get("/vericache")["ranks"][0]["tiers"]
    assert pages == PAGES and server.counters()["provisional"] == before + 1, "precondition"
    assert tiers["device_evictable"] >= PAGES * PAGE, "precondition"
    assert tiers["host"] - tiers["host_free"] >= PAGES * PAGE, "precondition"
    old_kv = [kv_of(path) for path in page_files(server, ask)]
    try:
        server.update_weights(other_weights, headers=ADMIN)
        found = server.answer(ask)
        fresh = server.answer(Ask(ask.prompt, ask.tokens, PLAIN, fields={"cache_salt": "fresh"}))
        assert found.meta["cached_tokens"] == fresh.meta["cached_tokens"] == 0
        assert_identical([found], [fresh])
        assert difference(found, old) is not None
        # Negative control: old KV under the new names is read, and noticed.
        compute(server, ask)
        for path, kv in zip(page_files(server, ask), old_kv, strict=True):
            forge(path, kv)
        spoilt, pages = from_store(server, ask)
        assert pages == PAGES and difference(spoilt, fresh) is not None
    finally:
        server.update_weights(ensure_embedded_model(), headers=ADMIN)
    found = server.answer(ask)
    assert found.meta["cached_tokens"] == 0
    assert_identical([found], [old])
    assert server.counters()["provisional"] <= before + 2, "only for the negative control"


def test_a_store_that_is_removed_while_it_runs(server, ask):
    """H8: everything is computed, and stored once there is a place for it again."""
    expected, _ = compute(server, ask)
    before = usage(server)["errors"]
    shutil.rmtree(DIRECTORY)
    for _ in range(2):
        found, pages = from_store(server, ask)
        assert_identical([found], [expected])
        assert pages == 0
    assert usage(server)["errors"]["write_error"] > before.get("write_error", 0)
    server.check_idle()
    DIRECTORY.mkdir()
    assert_used_again(server, ask, expected)


@pytest.fixture
def mooncake(server):
    """A Mooncake store that the server uses instead of its files; the process."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"Mooncake is not installed, or libraries it needs are not: {error}")
    ports = [f"--{name}={free_port()}" for name in ("port", "metrics-port", "segment-port")]
    command = [sys.executable, str(SCRIPT), "--size=256 MB", *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        flags = shlex.split(process.stdout.readline())
        assert flags[:2] == ["--hicache-storage-backend", "mooncake"], process.poll()
        attach(server, None)
        attach(server, "mooncake", flags[3])
        yield process
        process.terminate()
        assert process.wait(20) == 0
    flush(server)  # once nothing is being stored any more
    attach(server, None)
    attach(server, "file", "{}")


def attach(server, backend, config=None):
    """Give a running server another store; None takes it away."""
    url = f"{server.url}/hicache/storage-backend"
    if backend is None:
        response = requests.delete(url, headers=ADMIN, timeout=60)
    else:
        body = {
            "hicache_storage_backend": backend,
            "hicache_storage_backend_extra_config_json": config,
            "hicache_storage_prefetch_policy": POLICY,
        }
        response = requests.put(url, json=body, headers=ADMIN, timeout=60)
    assert response.status_code == 200, response.text


def test_mooncake(server, ask, mooncake):
    """The same from Mooncake, and when it is gone (H8)."""
    expected, written = compute(server, ask)
    assert written >= PAGES
    found, pages = from_store(server, ask)
    assert_identical([found], [expected])
    assert pages == PAGES
    mooncake.terminate()
    mooncake.wait(20)
    found, pages = from_store(server, ask)
    assert_identical([found], [expected])
    assert pages == 0
    assert any(key.startswith("query_") for key in usage(server)["errors"])
