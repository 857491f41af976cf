"""X0 and X1 with drafts that read packed copies, of all tokens or of some."""

import pytest

from server.comparing import assert_identical, difference
from server.harness import Ask
from server.specs import DRAFTING, TIERED

METHODS = (
    *("int8", "int4", "snapkv+int4", "snapkv-per-head+int8"),
    *("turbo4", "turbo4v2", "kivi4", "snapkv+kivi2"),
)
CONTEXT = 700
# So that those of two or three fit on the device of a server with tiers.
TIER_CONTEXT = 420


def asks(make_corpus, count, tokens, methods=METHODS, context=CONTEXT):
    """Methods and draft lengths in turn."""
    return [
        Ask(tuple(p), tokens, {"compressor": methods[i % len(methods)], "draft_len": 3 + i % 6})
        for i, p in enumerate(make_corpus().prompts(count, context))
    ]


def packed(server):
    return server.get("/vericache")["ranks"][0]["packed"]


def acceptance(answers):
    return sum(a.accepted for a in answers) / sum(a.drafted for a in answers)


@pytest.mark.server(DRAFTING["bfloat16"])
def test_nothing_changes(server, off, make_corpus):
    given = asks(make_corpus, 16, 48)
    found = server.concurrently(given)
    assert_identical(found, off["bfloat16"].answers(given))
    rates = [acceptance(found[i :: len(METHODS)]) for i in range(len(METHODS))]
    assert all(rate > 0 for rate in rates) and min(rates) < 1, rates
    assert rates[0] > 0.8 and rates[1] > 0.6, rates
    use = packed(server)
    codecs = {"int8", "int4", "turbo4", "turbo4v2", "kivi4", "kivi2"}
    assert codecs <= set(use) and not any(pool["used"] for pool in use.values())
    assert use["int4"]["bytes"] < 0.6 * use["int8"]["bytes"]


@pytest.mark.server(DRAFTING["bfloat16"])
def test_packed_copies_are_what_drafts_read(server, off, make_corpus):
    """Negative control: let through unverified they change the output. They are fewer bytes."""
    prompts = [tuple(prompt) for prompt in make_corpus().prompts(4, CONTEXT)]
    lossy = [Ask(prompt, 32, {"compressor": "int4", "unverified": True}) for prompt in prompts]
    expected = off["bfloat16"].answers(lossy)
    for found, exact in zip(server.concurrently(lossy), expected, strict=True):
        assert difference(found, exact) is not None
    read = []
    for compressor in ("identity", "int4"):
        before = server.counters()["kv_bytes_read"]
        server.answer(Ask(prompts[0], 32, {"compressor": compressor, "draft_len": 8}))
        read.append(server.counters()["kv_bytes_read"] - before)
    # 8 rows of 9 read 0.31 of the bytes, and rejected drafts cost something.
    assert 0.35 * read[0] < read[1] < 0.7 * read[0]


@pytest.mark.server(TIERED["bfloat16"])
def test_with_full_kv_on_the_host(server, off, make_corpus):
    """No slot of the KV pool is left to an offloaded request."""
    given = asks(make_corpus, 8, 24, ("int4", "snapkv+int4", "int4", "kivi4"), TIER_CONTEXT)
    before = server.counters()
    running = [server.submit(ask) for ask in given]
    seen = []
    while not all(each.done() for each in running):
        seen.append(server.get("/vericache")["ranks"][0])
    found = [each.result() for each in running]
    assert_identical(found, off["bfloat16"].answers(given))
    after = server.counters()
    assert after["offloads"] > before["offloads"]
    copied = ("staged_tokens", "copied_ahead")
    assert sum(after[name] - before[name] for name in copied) > 2 * TIER_CONTEXT
    assert 0 < sum(a.accepted for a in found) < sum(a.drafted for a in found)
    most = max(seen, key=lambda rank: rank["tiers"]["offloaded"])
    assert most["tiers"]["offloaded"] > 2 and most["tiers"]["compressed"] == 0
    assert max(rank["packed"]["int4"]["used"] for rank in seen if rank["packed"]) > 2 * TIER_CONTEXT


@pytest.mark.server(TIERED["float32"])
def test_without_room_a_request_decodes_plainly(server, off, make_corpus):
    """Two of four copies fit; the others draft once somebody has ended."""
    given = asks(make_corpus, 4, 24, ("int4",), TIER_CONTEXT)
    before = server.counters()["unpacked"]
    found = server.concurrently(given)
    assert_identical(found, off["float32"].answers(given))
    use = packed(server)["int4"]
    assert 2 * TIER_CONTEXT < use["tokens"] < 3 * TIER_CONTEXT, "precondition"
    assert server.counters()["unpacked"] - before >= 2
    assert sum(a.drafted for a in found) > 0
