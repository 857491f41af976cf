"""Pages and other bytes in a directory of files that somebody damages (SGLang's real backend).

Case H8 for a store that returns part, something else or nothing, and H14 for what it returns whole.
"""

import errno
from pathlib import Path

import pytest
import torch

from mem_cache.storing import PAGE, Pool, indices
from sglang_vericache.platform import bootstrap

bootstrap.install()

from sglang.srt.mem_cache import hicache_storage  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorageConfig,
)

from sglang_vericache.mem_cache.storage import SafeStorage  # noqa: E402
from sglang_vericache.mem_cache.storage_guard import Options  # noqa: E402
from sglang_vericache.mem_cache.storage_record import TRAILER_BYTES  # noqa: E402
from sglang_vericache.mem_cache.storage_stores import FileStore  # noqa: E402

KEYS = [f"{i:064x}" for i in range(6)]
EVERY = indices(*range(len(KEYS)))


def open_storage(path, pool=None, identity="0011223344556677"):
    ranks = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1)
    config = HiCacheStorageConfig(
        **ranks,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="m",
    )
    store = FileStore(HiCacheFile(config, str(path)))
    return SafeStorage(store, identity, pool or Pool(), Options())


@pytest.fixture
def filled(tmp_path):
    """Pages 0 to 5, all stored."""
    pool = Pool().fill()
    storage = open_storage(tmp_path, pool)
    assert storage.batch_set_v1(KEYS, EVERY) == [True] * 6
    return pool


def file_of(path: Path, key):
    (found,) = path.glob(f"*{key}*.bin")
    return found


def read_all(path):
    """What another server gets: pages that arrived, its pool, its counters."""
    pool = Pool()
    pool.kv_buffer.fill_(-1)
    storage = open_storage(path, pool)
    assert storage.batch_exists(KEYS) == sum(bool([*path.glob(f"*{k}*")]) for k in KEYS)
    arrived = storage.batch_get_v1(KEYS, EVERY)
    return arrived, pool, storage.usage()


def test_pages_come_back(filled, tmp_path):
    """H14: every bit of them."""
    arrived, pool, usage = read_all(tmp_path)
    assert arrived == [True] * 6
    assert torch.equal(pool.get_data_page(0), filled.get_data_page(0))
    assert torch.equal(pool.kv_buffer[:, :, : 6 * PAGE], filled.kv_buffer[:, :, : 6 * PAGE])
    assert (pool.kv_buffer[:, :, 6 * PAGE :] == -1).all()
    assert usage["read"] == 6 and usage["errors"] == {}
    sizes = {path.stat().st_size for path in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 6, "one object a page"
    assert sizes == {filled.get_data_page(0).nbytes + TRAILER_BYTES}


def test_pages_in_other_slots(filled, tmp_path):
    pool = Pool()
    assert open_storage(tmp_path, pool).batch_get_v1(KEYS[1:3], indices(9, 4)) == [True] * 2
    assert torch.equal(pool.get_data_page(9 * PAGE), filled.get_data_page(1 * PAGE))
    assert torch.equal(pool.get_data_page(4 * PAGE), filled.get_data_page(2 * PAGE))


def flip(at):
    def damage(path):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return damage


DAMAGE = {
    "first byte": flip(0),
    "last byte of the payload": flip(-TRAILER_BYTES - 1),
    "magic": flip(-TRAILER_BYTES),
    "length": flip(-TRAILER_BYTES + 4),
    "checksum": flip(-1),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_a_miss_from_there_on(damage, filled, tmp_path):
    """The pages before arrive, those after are not even looked at; the object can be replaced."""
    path = file_of(tmp_path, KEYS[2])
    DAMAGE[damage](path)
    arrived, pool, usage = read_all(tmp_path)
    assert arrived == [True, True, False, False, False, False]
    assert torch.equal(pool.kv_buffer[:, :, : 2 * PAGE], filled.kv_buffer[:, :, : 2 * PAGE])
    assert (pool.kv_buffer[:, :, 2 * PAGE :] == -1).all(), "unchecked bytes reached the pool"
    assert usage["errors"] == {"read_corrupt": 1}
    assert not path.exists()
    assert open_storage(tmp_path, filled).batch_set_v1(KEYS, EVERY) == [True] * 6
    assert read_all(tmp_path)[0] == [True] * 6


def test_a_page_of_another_name(filled, tmp_path):
    """A store that answers with the wrong object."""
    file_of(tmp_path, KEYS[2]).write_bytes(file_of(tmp_path, KEYS[1]).read_bytes())
    arrived, _, usage = read_all(tmp_path)
    assert arrived[:3] == [True, True, False] and usage["errors"]["read_corrupt"] == 1


def test_gone_since_it_was_asked_for(filled, tmp_path):
    storage = open_storage(tmp_path)
    assert storage.batch_exists(KEYS) == 6
    file_of(tmp_path, KEYS[4]).unlink()
    assert storage.batch_get_v1(KEYS, EVERY) == [True] * 4 + [False] * 2
    assert storage.usage()["errors"] == {"read_missing": 1}
    assert storage.batch_exists(KEYS) == 4


def test_another_identity_finds_nothing(filled, tmp_path):
    other = open_storage(tmp_path, identity="7766554433221100")
    assert other.batch_exists(KEYS) == 0
    # Not even under its own name.
    path = file_of(tmp_path, KEYS[0])
    path.rename(tmp_path / path.name.replace("0011223344556677", other.identity))
    assert other.batch_exists(KEYS) == 1
    assert other.batch_get_v1(KEYS[:1], indices(0)) == [False]
    assert other.usage()["errors"] == {"read_corrupt": 1}


def test_new_weights_share_nothing(filled, tmp_path):
    storage = open_storage(tmp_path)
    assert storage.batch_exists(KEYS) == 6
    storage.renew_identity()
    assert storage.batch_exists(KEYS) == 0


def test_a_full_disk(filled, tmp_path, monkeypatch):
    """Nothing is stored, nothing is left behind, what is there is read."""
    storage = open_storage(tmp_path, filled)

    def replace(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hicache_storage.os, "replace", replace)
    assert storage.batch_set_v1(["a" * 64], indices(1)) == [False]
    assert storage.put("key", b"x") is False
    assert storage.usage()["errors"] == {"write_error": 2}
    assert len(list(tmp_path.iterdir())) == 6
    assert storage.batch_get_v1(KEYS, EVERY) == [True] * 6


def test_a_store_that_is_removed(filled, tmp_path):
    storage = open_storage(tmp_path, filled)
    for path in tmp_path.iterdir():
        path.unlink()
    tmp_path.rmdir()
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_get_v1(KEYS, EVERY) == [False] * 6
    assert storage.batch_set_v1(KEYS, EVERY) == [False] * 6
    assert storage.get("key") is None
    assert storage.usage()["errors"] == {"read_missing": 1, "write_error": 1}


SIZE = Pool().get_data_page(0).nbytes


@pytest.mark.parametrize("length", [0, 1, SIZE - 1, SIZE, SIZE + 1, 5 * SIZE, 90 * SIZE + 7])
def test_other_bytes(length, tmp_path):
    """They take no more room than they need."""
    data = torch.randint(256, (length,), dtype=torch.uint8).numpy().tobytes()
    key = f"any/key\n{length}"
    assert open_storage(tmp_path).put(key, data)
    storage = open_storage(tmp_path)
    assert storage.get(key) == data
    files = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(files) == length + len(files) * TRAILER_BYTES
    assert len(files) == max(1, -(-length // SIZE))
    assert storage.get("any") is None
    assert storage.usage()["errors"] == {}


@pytest.mark.parametrize("part", [0, 1, 3])
@pytest.mark.parametrize("damage", [flip(5), lambda path: path.unlink()], ids=["flip", "remove"])
def test_other_bytes_come_whole_or_not_at_all(part, damage, tmp_path):
    data = bytes(range(256)) * (4 * SIZE // 256)
    storage = open_storage(tmp_path)
    assert storage.put("key", memoryview(data)) and storage.get("key") == data
    damage(next(tmp_path.glob(f"*.{part}_m_*")))
    assert storage.get("key") is None
    assert storage.put("key", data) and storage.get("key") == data


def test_parts_of_two_different_puts(tmp_path):
    """A key whose bytes change is misuse; it must not be answered with a mixture."""
    storage = open_storage(tmp_path)
    assert storage.put("key", bytes(3 * SIZE))
    next(tmp_path.glob("*.1_m_*")).unlink()
    assert storage.put("key", b"\1" * (3 * SIZE))
    assert storage.get("key") is None


@pytest.mark.parametrize("spoilt", [None, 0, 2, 3])
def test_several_keys_up_to_the_first_that_is_not_there(spoilt, tmp_path):
    """Some are in one piece, some in several; what is behind the first that is damaged stays."""
    storage = open_storage(tmp_path)
    stored = {f"key {i}": bytes([i]) * size for i, size in enumerate((3, 2 * SIZE, SIZE, 5, SIZE))}
    for i, (key, data) in enumerate(stored.items()):
        before = set(tmp_path.iterdir())
        assert storage.put(key, data)
        if i == spoilt:
            flip(1)((set(tmp_path.iterdir()) - before).pop())
    expected = list(stored.values())[:spoilt]
    assert storage.get_first([*stored, "another"]) == expected
    assert storage.get("key 4") == stored["key 4"]
