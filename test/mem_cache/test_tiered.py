"""The real tree, pools and copies of HiCache under requests that come, offload, stage and go.

Cases K9 and H4, and H14 for full and compressed KV; see ``tiering.py``.
"""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mem_cache.tiering import LONGEST, SLOTS, EvictParams, Model

EVENTS = [
    *("start", "start", "decode", "offload", "stage", "release", "finish", "abort", "evict"),
    *("copy_ahead", "verify", "read_host", "retract", "lend", "take_back", "flush"),
]


# The least host pool holds little more than one request of the longest.
LITTLE = 1.1 * LONGEST / SLOTS


@pytest.mark.parametrize(("page", "host_ratio"), [(1, 4.0), (4, 4.0), (1, 1.1), (1, LITTLE)])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_order_of_events(page, host_ratio, data):
    model = Model(page, host_ratio)
    prompts: list[list[int]] = []
    for step in range(data.draw(st.integers(1, 40))):
        event = data.draw(st.sampled_from(EVENTS))
        model.events()
        if event == "start":
            base = data.draw(st.sampled_from(prompts)) if prompts else []
            cut = data.draw(st.integers(0, len(base) // page)) * page
            fresh = data.draw(st.integers(1, 20 // page)) * page
            ids = (base[:cut] + [100 * (step + 1) + i for i in range(fresh)])[:32]
            prompts.append(ids)
            model.start(ids)
        elif event == "flush":
            if not model.running:
                model.cache.reset()  # takes back what was lent
                assert not model.cache.lent
                model.allocator.clear()
                prompts = []
        elif event == "evict":
            model.evict(data.draw(st.integers(1, SLOTS)))
        elif event == "lend":
            model.lend(data.draw(st.integers(1, SLOTS // 4)))
        elif event == "take_back":
            model.take_back_all()
        elif model.running:
            req = data.draw(st.sampled_from(model.running))
            if event == "retract":
                prompts.append([*req.origin_input_ids, *req.output_ids])  # starts again later
            if event in ("finish", "abort"):
                model.finish(req, aborted=event == "abort")
            else:
                getattr(model, event)(req)
        if data.draw(st.booleans()):  # waits for copies, which hides those that nobody waited for
            model.check()
    while model.running:
        model.finish(model.running[0], aborted=False)
        model.check()
    model.take_back_all()
    model.events()
    model.sync()
    model.events()
    model.cache.evict(EvictParams(num_tokens=SLOTS))
    assert model.allocator.available_size() == model.total
    assert not model.cache.holdings


def test_slots_in_two_transfers_are_noticed():
    """Negative control of H4: the host slots of a copy are given to another one."""
    model = Model(1)
    req = host_only(model, list(range(1, 33)))
    stream = model.cache.cache_controller.l2_transfer_engine.host_to_device_stream
    stream.launch(lambda: time.sleep(0.1))
    model.copy_ahead(req)
    assert model.transfers.most >= 2 * 32 and not model.transfers.clashes
    slots = model.cache.host_slots(req)
    buffers = [layer.keys for layer in model.cache.host_buffers()]
    model.transfers.copy(
        src_layers=buffers[:1],
        dst_layers=buffers[:1],
        src_indices=slots + 40,
        dst_indices=slots,
        page_size=1,
    )
    assert model.transfers.clashes
    model.sync()


def test_full_kv_comes_back_as_it_was():
    """Precondition of the above: prefixes do leave the device, and come back."""
    model = Model(1)
    req = host_only(model, list(range(1, 33)))
    assert model.allocator.available_size() == model.total - model.cache.compressed_size()
    model.stage(req)
    assert 0 < model.staged == 32 - len(model.kept[req])  # the others are in the compressed copy
    model.check()


@pytest.mark.parametrize("page", [1, 4])
def test_what_the_compressed_copy_has_is_not_copied(page):
    """Negative control: with another copy the full KV that comes back is another one."""
    model = Model(page)
    req = host_only(model, list(range(1, 33)))
    model.pool.get_kv_buffer(1)[0][model.cache.holdings[req].slots] += 1
    with pytest.raises(AssertionError, match="another token's key"):
        model.stage(req)
    assert 0 < model.staged < 32
    model.sync()


@pytest.mark.parametrize(("page", "kept"), [(1, {18, 21, *range(24, 32)}), (4, range(24, 32))])
def test_a_part_of_a_prefix_comes_back(page, kept):
    model = Model(page)
    req = host_only(model, list(range(1, 33)))
    model.start([*range(1, 17), 99, 98, 97, 96])  # brings the first half, and keeps it
    model.stage(req)
    assert set(model.kept[req]) >= set(kept)
    assert model.staged == 16 - len(kept)
    model.check()


def test_full_kv_is_read_on_the_host_as_it_was():
    model = Model(1)
    req = host_only(model, list(range(1, 33)))
    model.read_host(req)
    assert model.read_in_place == 32
    keys = model.cache.host_buffers()[1].keys
    keys[model.cache.host_slots(req)[9]] += 1
    with pytest.raises(AssertionError, match="another token's key"):  # negative control
        model.read_host(req)


def test_a_retracted_request_is_found_on_the_host():
    model, ids = Model(1), list(range(1, 17))
    model.start(ids)
    (req,) = model.running
    model.decode(req)
    known = [*req.origin_input_ids, *req.output_ids]
    assert len(known) == 17
    model.retract(req)
    model.evict(SLOTS)
    assert model.allocator.available_size() == model.total
    model.start([*known, 99])
    assert model.running[0].prefix_len == len(known)
    model.check()


def host_only(model, ids):
    """A request whose prefix is on the host alone."""
    model.start(ids)
    (req,) = model.running
    model.offload(req)
    model.events()
    model.sync()
    model.events()
    model.evict(SLOTS)
    return req


def test_a_prefill_waits_for_a_copy_ahead():
    """It finds the prefix on the device before all of it has arrived."""
    model, ids = Model(1), list(range(1, 30))
    host_only(model, ids)
    model.copy_ahead(None)
    model.start([*ids, 31, 32])
    assert model.running[1].prefix_len == len(ids)
    model.check()


@pytest.mark.parametrize("begun", [True, False], ids=["runs", "queued"])
def test_a_verify_pass_waits_for_the_copy_of_another(begun):
    model, ids = Model(1), list(range(1, 30))
    first = host_only(model, ids)
    model.stage(first)
    model.start(ids)
    second = model.running[1]
    model.offload(second)
    model.release(first)
    model.events()
    model.sync()
    model.events()
    model.evict(SLOTS)
    stream = model.cache.cache_controller.l2_transfer_engine.host_to_device_stream
    stream.launch(lambda: time.sleep(0.05))
    assert model.cache.copy_ahead([first]) > 0 if begun else model.cache.stage(first) > 0
    assert model.cache.stage(second) == 0, "precondition: another's copy brings it"
    assert (model.cache.start_copies() < 0) == begun
    assert model.cache.holdings[second].copied_by == model.cache.holdings[first].copied_by >= 0
    model.verify(second)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_publishing_waits_for_the_copy_of_a_twin(waits, monkeypatch):
    """A request that generated what another one did gets that one's slots, perhaps too early."""
    model, ids = Model(1), list(range(1, 20))
    for _ in "ab":
        model.start(ids)
    first, second = model.running
    for req in model.running:
        model.started = 1  # equal tokens
        for _ in range(4):
            model.decode(req)
    model.offload(first)
    model.cache.holdings[first].parts = None  # all of it comes from the host
    for _ in range(2):
        model.events()
        model.sync()
    model.evict(SLOTS)
    stream = model.cache.cache_controller.l2_transfer_engine.host_to_device_stream
    stream.launch(lambda: time.sleep(0.1))
    assert model.cache.copy_ahead([first]) == 4, "precondition: the generated tokens are copied"
    if not waits:
        monkeypatch.setattr(model.cache, "shares_copies", lambda node: False)
    model.cache.publish(second)
    row = model.rows.req_to_token[second.kv.req_pool_idx]
    shared = model.rows.req_to_token[first.kv.req_pool_idx]
    assert torch.equal(row[:23], shared[:23]), "precondition: the slots are those of the tree"
    if waits:
        model.compare(second, range(23), row, ())
    else:
        with pytest.raises(AssertionError, match="another token"):
            model.compare(second, range(23), row, ())


def test_how_long_a_copy_still_takes():
    model, ids = Model(1), list(range(1, 30))
    first = host_only(model, ids)
    assert model.cache.copy_seconds_left(first) == 0.0, "nothing was begun"
    stream = model.cache.cache_controller.l2_transfer_engine.host_to_device_stream
    stream.launch(lambda: time.sleep(0.05))
    model.cache._copied_tokens = model.cache._copied_seconds = 1.0
    tokens = model.cache.copy_ahead([first])
    assert 0.5 * tokens < model.cache.copy_seconds_left(first) <= tokens
    stream.synchronize()
    assert model.cache.copy_seconds_left(first) == 0.0, "it took less than expected"


def test_a_host_pool_without_room_leaves_everything_resident():
    model = Model(1, host_ratio=1.0)
    for i in range(4):
        model.start([100 * i + j for j in range(1, 24)])
    assert len(model.running) == 4
    for req in model.running:
        model.offload(req)
        model.check()
    assert len(model.cache.holdings) < 4, "precondition: the host has room for some only"
    left = [req for req in model.running if req not in model.cache.holdings]
    assert all(req.lock is not None for req in left)
