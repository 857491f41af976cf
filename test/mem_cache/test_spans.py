"""Compressed copies as bytes, and their way through a store."""

import itertools
import threading
import time
from dataclasses import replace

import pytest
import torch

from sgl_kernel_ext import CODECS
from sgl_kernel_ext.reference.packed import pack
from sglang_vericache.config import VeriCacheConfig
from sglang_vericache.core import DraftView
from sglang_vericache.mem_cache.span_store import MAX_PENDING, SpanStore, namespace_of
from sglang_vericache.mem_cache.spans import cut, join, span_tokens

LAYERS, HEADS, DIM, TOKENS = 3, 2, 8, 16
SLOTS = 100

DIVISIBLE = {name: codec for name, codec in CODECS.items() if codec.tokens == 1}


def copied(lists, length, dtype=torch.bfloat16, seed=0, codec=None):
    """A pool, packed or not, a view of random positions and what the view lists."""
    make = torch.Generator().manual_seed(seed)
    pool = [
        tuple(torch.randn(SLOTS, HEADS, DIM, generator=make).to(dtype) for _ in "kv")
        for _ in range(LAYERS)
    ]
    if codec:
        packed = CODECS[codec]
        pool = [(pack(keys, packed.keys), pack(values, packed.values)) for keys, values in pool]
    layers = []
    for layer in range(LAYERS):
        kept = 5 + layer
        rows = [torch.randperm(length, generator=make)[:kept].sort()[0] for _ in range(lists)]
        layers.append(torch.stack(rows).int())
    view = DraftView(tuple(layers), length)
    view.check_integrity()
    slots = torch.randperm(SLOTS, generator=make)[:length]
    rows = [[], []]
    for positions, pair in zip(layers, pool, strict=True):
        for found, buffer in zip(rows, pair, strict=True):
            listed = slots[positions.long()]
            heads = torch.arange(lists)[:, None]
            found.append(buffer[listed].flatten(2) if lists == 1 else buffer[listed, heads])
    return pool, view, slots, *rows


@pytest.mark.parametrize("lists", [1, HEADS])
@pytest.mark.parametrize("codec", [None, *DIVISIBLE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_copy_survives(lists, codec, dtype):
    """H3: a compressed copy comes back bit for bit, codes and their scales as well."""
    pool, view, slots, keys, values = copied(lists, 5 * TOKENS, dtype, codec=codec)
    blobs = cut(view, keys, values, TOKENS)
    assert len(blobs) == 5
    copy = join(blobs, TOKENS)
    assert copy.length == view.length
    assert copy.counts.tolist() == [[len(row) for row in layer] for layer in view.layers]
    device = [tuple(torch.zeros_like(buffer) for buffer in pair) for pair in pool]
    own = torch.arange(copy.longest) + 40
    copy.write(device, own)
    for layer, positions in enumerate(view.layers):
        for head in range(HEADS):
            row = positions[head if lists > 1 else 0].long()
            for source, target in zip(pool[layer], device[layer], strict=True):
                assert torch.equal(target[own[: len(row)], head], source[slots[row], head])


def test_lists_of_different_lengths_survive():
    """A shorter list takes the bytes of its own tokens only, span by span."""
    _, view, _, keys, values = copied(HEADS, 5 * TOKENS)
    layers, counts = list(view.layers), [(n,) * HEADS for n in view.kept]
    layers[1] = layers[1].clone()
    layers[1][1, 2:] = layers[1][1, 1]
    counts[1] = (view.kept[1], 2)
    uneven = DraftView(tuple(layers), view.length, tuple(counts))
    uneven.check_integrity()
    copy = join(cut(uneven, keys, values, TOKENS), TOKENS)
    assert copy.counts.tolist() == [list(lists) for lists in counts]
    assert torch.equal(copy.keys[1][1], keys[1][1, :2])
    assert torch.equal(copy.values[1][0], values[1][0])


def test_codes_are_fewer_bytes():
    """What a span takes is what its rows take, and some text about them."""
    sizes = {}
    for codec in (None, *DIVISIBLE):
        _, view, _, keys, values = copied(1, 2 * TOKENS, codec=codec)
        rows = sum(piece.nbytes for piece in (*keys, *values))
        sizes[codec] = rows / (2 * sum(view.kept) * HEADS)
        assert 0 < sum(map(len, cut(view, keys, values, TOKENS))) - rows < 2 * 600
    assert sizes == {None: 2 * DIM} | {n: c.row_bytes(DIM) / 2 for n, c in DIVISIBLE.items()}
    assert sizes["int8"] == DIM + 4 and sizes["turbo2"] == DIM / 4 + 2


def test_the_beginning_of_a_copy():
    """Whoever shares two spans finds what was listed in those."""
    _, view, _, keys, values = copied(1, 5 * TOKENS + 3)
    blobs = cut(view, keys, values, TOKENS)
    assert len(blobs) == 5
    copy = join(blobs[:2], TOKENS)
    for layer, positions in enumerate(view.layers):
        count = int((positions < 2 * TOKENS).sum())
        assert copy.counts[layer].tolist() == [count]
        assert torch.equal(copy.keys[layer][0], keys[layer][0, :count])


@pytest.mark.parametrize("blob", [b"", b"nonsense", b"\0" * 64])
def test_other_bytes_are_refused(blob):
    _, view, _, keys, values = copied(1, 2 * TOKENS)
    good = cut(view, keys, values, TOKENS)
    with pytest.raises(ValueError, match="not a compressed span"):
        join([good[0], blob], TOKENS)


def test_other_layers_are_refused():
    _, view, _, keys, values = copied(1, 2 * TOKENS)
    shallow = DraftView(view.layers[:2], view.length)
    blobs = cut(view, keys, values, TOKENS)[:1] + cut(shallow, keys, values, TOKENS)[1:]
    with pytest.raises(ValueError, match="not a compressed span"):
        join(blobs, TOKENS)


class Memory(dict):
    """A store that may be slow, refuse or break."""

    delay = 0.0
    broken = False
    identity = "a"

    def put(self, key, data):
        time.sleep(self.delay)
        if self.broken:
            raise RuntimeError("broken")
        self[key] = bytes(data)
        return True

    def get_first(self, keys):
        time.sleep(self.delay)
        if self.broken:
            raise RuntimeError("broken")
        return list(map(self.__getitem__, itertools.takewhile(self.__contains__, keys)))


def wait_for(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


PAGE = 64


def published(memory, tokens, cache_bytes=0, namespace="model", **options):
    store = SpanStore(lambda: memory, PAGE, namespace, cache_bytes)
    names = store.names(tokens, options.get("extra_key"), options.get("salt"))
    _, view, _, keys, values = copied(1, SLOTS)
    view = DraftView(view.layers, len(tokens))
    assert store.publish(names, view, keys, values)
    return store, names


def test_names_are_those_of_prefixes():
    store = SpanStore(lambda: None, PAGE, "model")
    tokens = list(range(1000))
    names = store.names(tokens, None, None)
    assert span_tokens(PAGE) == 128 and len(names) == 7
    assert store.names(tokens[:300], None, None) == names[:2]
    assert store.names([7, *tokens[1:]], None, None)[6] != names[6]
    assert not set(names) & set(store.names(tokens, None, "salt"))
    assert not set(names) & set(store.names(tokens, "adapter", None))
    assert not set(names) & set(SpanStore(lambda: None, PAGE, "other").names(tokens, None, None))
    assert store.names(tokens[:100], None, None) == []


CONFIG = VeriCacheConfig(compressor="snapkv", ratio=0.25)


@pytest.mark.parametrize(
    "other",
    [
        {"compressor": "streaming"},
        {"compressor": "snapkv+int4"},
        {"ratio": 0.2},
        {"settings": {"window": 8}},
        {"settings": {"min_tokens": 16}},
    ],
    ids=lambda other: str(next(iter(other.values()))),
)
def test_copies_of_another_method_or_settings_are_not_found(other):
    """H10: whoever compresses otherwise finds none of them; a server of the same kind finds all."""
    memory, tokens = Memory(), list(range(700))
    published(memory, tokens, namespace=namespace_of(CONFIG))
    wait_for(lambda: len(memory) == 5)
    found = []
    for config in (CONFIG, replace(CONFIG, **other)):
        reader = SpanStore(lambda: memory, PAGE, namespace_of(config))
        reader.request("a", "A", reader.names(tokens, None, None))
        reader.wait_until_read("A")
        found.append([copy.length for _, copy in reader.arrived()])
    assert found == [[640], []]


def test_a_prefix_is_found_by_another_request():
    memory = Memory()
    tokens = list(range(700))
    writer, names = published(memory, tokens)
    wait_for(lambda: len(memory) == 5)
    assert set(memory) == set(names)
    wait_for(lambda: not writer.wants(names))
    reader = SpanStore(lambda: memory, PAGE, "model")
    reader.request("a", "A", reader.names([*tokens[:400], 1, 2, 3] * 2, None, None))
    reader.request("b", "B", reader.names(tokens[::-1], None, None))
    reader.wait_until_read("A")
    reader.wait_until_read("B")
    found = reader.arrived()
    assert [(handle, copy.length) for handle, copy in found] == [("a", 3 * 128)]
    assert reader.arrived() == []


def test_full_kv_waits_for_copies():
    memory = Memory()
    _, names = published(memory, list(range(700)))
    wait_for(lambda: len(memory) == 5)
    memory.delay = 0.05
    store = SpanStore(lambda: memory, PAGE, "model")
    store.request("a", "A", names)
    began = time.monotonic()
    store.wait_until_read("B")
    assert time.monotonic() < began + 0.1, "somebody else's copy"
    assert store.arrived() == []
    store.wait_until_read("A")
    assert len(store.arrived()) == 1


def test_nobody_wants_it_any_more():
    memory = Memory()
    _, names = published(memory, list(range(700)))
    wait_for(lambda: len(memory) == 5)
    memory.delay = 0.05
    store = SpanStore(lambda: memory, PAGE, "model")
    store.request("a", "A", names)
    store.request("b", "B", names)
    store.cancel("a")
    store.wait_until_read("A")
    store.wait_until_read("B")
    assert [reader for reader, _ in store.arrived()] == ["b"]


def test_what_is_known_of_a_store():
    memory = Memory()
    store, names = published(memory, list(range(700)))
    wait_for(lambda: not store.wants(names))
    memory.identity = "b"
    assert store.wants(names), "after weights were updated"
    store.request("a", "A", names)
    store.wait_until_read("A")
    assert not store.wants(names)
    memory.clear()
    store.request("b", "B", names)
    store.wait_until_read("B")
    assert store.wants(names), "found to be gone"
    assert not SpanStore(lambda: None, PAGE, "model").wants(names)


def test_the_next_turn_reads_nothing_from_the_store():
    memory = Memory()
    tokens = list(range(700))
    store, names = published(memory, tokens, cache_bytes=1 << 20)
    wait_for(lambda: not store.wants(names))
    memory.broken = True  # a read would find nothing
    for reader, read in (("a", names), ("b", names[:2])):
        store.request(reader, reader, read)
        store.wait_until_read(reader)
    assert [copy.length for _, copy in store.arrived()] == [640, 256]
    assert store.cache.hits == 7 and store.cache.used == sum(map(len, memory.values()))
    memory.broken, memory.identity = False, "b"
    memory.clear()
    store.request("c", "C", names)
    store.wait_until_read("C")
    assert store.arrived() == [] and store.cache.used == 0, "computed with other weights"


def test_what_was_read_from_the_store_is_kept():
    memory = Memory()
    _, names = published(memory, list(range(700)))
    wait_for(lambda: len(memory) == 5)
    size = sum(map(len, memory.values())) - 1  # all but one fit
    store = SpanStore(lambda: memory, PAGE, "model", cache_bytes=size)
    hits = []
    for reader, read in (("a", names[:2]), ("b", names[:2]), ("c", names), ("d", names)):
        store.request(reader, reader, read)
        store.wait_until_read(reader)
        hits.append(store.cache.hits)
    assert [copy.length for _, copy in store.arrived()] == [256, 256, 640, 640]
    assert hits == [0, 2, 4, 4], "the first span had to make room for the last"
    assert store.cache.used <= size


def test_a_store_that_raises_ends_nothing(caplog):
    """H8 for compressed copies."""
    memory = Memory()
    memory.broken = True
    store, names = published(memory, list(range(700)))
    store.request("a", "A", names)
    store.wait_until_read("A")
    wait_for(lambda: "could not be stored" in caplog.text)
    assert store.arrived() == [] and "could not be read" in caplog.text
    memory.broken = False
    _, view, _, keys, values = copied(1, SLOTS)
    assert store.publish(names, DraftView(view.layers, 700), keys, values)
    wait_for(lambda: len(memory) == 5)


def test_a_slow_store_costs_no_memory():
    memory = Memory()
    memory.delay = 10.0
    threads = threading.active_count()
    store, names = published(memory, list(range(700)))
    _, view, _, keys, values = copied(1, SLOTS)
    view = DraftView(view.layers, 700)
    taken = sum(store.publish(names, view, keys, values) for _ in range(2 * MAX_PENDING))
    assert taken <= MAX_PENDING
    assert not store.publish(names, view, keys, values)
    assert threading.active_count() <= threads + 2
