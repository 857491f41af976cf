"""X0 and X1 with every tier, dtype and page size.

Full KV that stays on the device is the matter of ``test_exactness.py``. Every request is asked
twice, the second time with another compressor and draft length, when the device has lost its
prompt; greedy, sampled and penalised requests share the batches.
"""

from array import array
from pathlib import Path

import pytest

from server.comparing import assert_identical
from server.covering import pairs
from server.harness import Ask
from server.specs import FP32, STORE_DIRECTORY, TIERS
from server.storing import flush, stored, usage
from server.test_tiers import CONTEXT, DROPPERS, moved
from sglang_vericache.platform import bootstrap

bootstrap.install()

from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

# `make test` leaves out the servers that hold no new pair of tier, dtype and page size.
LONG = {
    *(("auto", "bfloat16", 16), ("auto", "float32", 1)),
    *(("remote", "bfloat16", 1), ("remote", "float32", 16)),
}
CELLS = [
    pytest.param(
        *cell,
        id="-".join(map(str, cell)),
        marks=(pytest.mark.server(spec), *[pytest.mark.long] * (cell in LONG)),
    )
    for cell, spec in TIERS.items()
]
KINDS = (
    {},
    {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 7},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "min_new_tokens": 12},
)
COUNT, TOKENS = 8, 18
LAST = ("remote", "float32", 16)


@pytest.fixture(scope="module")
def prompts(make_corpus):
    """Prompts of this module alone, and one more for servers to store."""
    return [tuple(prompt) for prompt in make_corpus().prompts(COUNT + 31, CONTEXT)[30:]]


def asks(prompts, shift):
    return [
        Ask(
            prompt,
            TOKENS,
            {"compressor": DROPPERS[(i + shift) % 4], "draft_len": 3 + (i + 2 * shift) % 6},
            KINDS[i % 3],
        )
        for i, prompt in enumerate(prompts[:COUNT])
    ]


def details(answers):
    """Tokens of each prompt that were found on the device, the host and in the store."""
    found = [answer.meta["cached_tokens_details"] or {} for answer in answers]
    return [tuple(each.get(tier, 0) for tier in ("device", "host", "storage")) for each in found]


def enumerated(cell):
    return dict(enumerate(cell))


def test_every_combination_has_a_server():
    assert len(set(TIERS.values())) == len(TIERS) == 12
    for (tier, dtype, page), spec in TIERS.items():
        flags = dict(zip(spec.flags, spec.flags[1:], strict=False))  # the last one counts
        assert flags["--vericache-tier"] == tier
        assert flags.get("--page-size", "1") == str(page)
        assert (dtype == "float32") == (FP32[1] in spec.flags)
    every = set().union(*map(pairs, map(enumerated, TIERS)))
    short = set().union(*(pairs(enumerated(cell)) for cell in TIERS if cell not in LONG))
    assert short == every


@pytest.mark.parametrize(("tier", "dtype", "page"), CELLS)
def test_nothing_changes(tier, dtype, page, server, off, prompts):
    first, again = asks(prompts, 0), asks(prompts, 1)
    assert all(a.vericache != b.vericache for a, b in zip(first, again, strict=True))
    expected = off[dtype].answers(first)

    before = server.counters()
    empty = usage(server) if tier == "remote" else None
    found = server.concurrently(first)
    assert_identical(found, expected)
    assert 0 < sum(a.accepted for a in found) < sum(a.drafted for a in found)
    moved(server, before)
    assert {storage for _, _, storage in details(found)} == {0}

    if tier == "remote":
        if (tier, dtype, page) != LAST:
            server.warm(prompts[COUNT])
        stored(server, empty)
        flush(server)
    before = server.counters()
    found = server.concurrently(again)
    assert_identical(found, expected)
    if tier != "remote":  # whose prompts may come too late to meet
        moved(server, before)
    whole = (CONTEXT - 1) // page * page
    place = (0, 0, whole) if tier == "remote" else (0, whole, 0)
    assert place in details(found), details(found)
    drafted_meanwhile = server.counters()["provisional"] - before["provisional"]
    assert (drafted_meanwhile > 0) == (tier == "remote")


def objects(prompt, page):
    """Names under which servers have stored a late page of a prompt."""
    keys = get_storage_hash_str(RadixKey(array("q", prompt)), None, page_size=page)
    key = keys[(CONTEXT - 1) // page - 1]
    return {path.name for path in Path(STORE_DIRECTORY).glob(f"*-{key}_*.bin")}


@pytest.mark.long
@pytest.mark.server(TIERS[LAST])
def test_another_dtype_or_page_size_finds_nothing(server, pool, prompts):
    """H10: servers that differ in either share a store, and find nothing of each other's there.

    The digest itself is tested in ``test_storage_identity.py``.
    """
    ask = Ask(prompts[COUNT], 4)
    for cell in (("remote", "bfloat16", 16), ("remote", "float32", 1)):
        if not objects(ask.prompt, cell[2]):  # the matrix has not run
            other = pool.get(TIERS[cell])
            other.answer(ask)
            stored(other)
        assert objects(ask.prompt, cell[2]), "precondition: somebody has stored it"
    before = objects(ask.prompt, 16)
    assert server.answer(ask).meta["cached_tokens"] == 0
    stored(server)
    assert len(objects(ask.prompt, 16) - before) == 1
    flush(server)
    assert details([server.answer(ask)]) == [(0, 0, (CONTEXT - 1) // 16 * 16)]
