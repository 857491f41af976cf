"""X0 and X1 over many prompts, prefix hits and batch neighbours (cases E1, E2, K6)."""

import itertools
import random
import string

import pytest

from server.comparing import assert_identical
from server.harness import Ask
from server.specs import ADAPTIVE, COMPRESSORS, DRAFTING

DRAFT_LENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)
SERVERS = [
    pytest.param(dtype, id=f"{kind}-{dtype}", marks=pytest.mark.server(spec))
    for kind, specs in (("fixed", DRAFTING), ("adaptive", ADAPTIVE))
    for dtype, spec in specs.items()
]


def opaque_id(rng):
    return "-".join(
        "".join(rng.choices(string.ascii_lowercase + string.digits, k=4)) for _ in "abc"
    )


def tokens_of(tokenizer, text):
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.server(DRAFTING["bfloat16"])
def test_200_prompts(server, off, make_corpus):
    """E1: every compressor and draft length in turn, all of them running beside each other."""
    rng, corpus = random.Random(1), make_corpus()
    settings = itertools.cycle(itertools.product(COMPRESSORS, DRAFT_LENS))
    asks = []
    for _ in range(200):
        compressor, draft_len = next(settings)
        vericache = {"compressor": compressor, "draft_len": draft_len}
        asks.append(Ask(tuple(corpus.prompt(rng.randint(20, 60))), 12, vericache))
    found = server.concurrently(asks)
    assert_identical(found, off["bfloat16"].answers(asks))
    drafted, accepted = sum(a.drafted for a in found), sum(a.accepted for a in found)
    assert drafted > 1000 and accepted < 0.9 * drafted, (drafted, accepted)


@pytest.mark.parametrize("dtype", SERVERS[:2])
def test_verbatim_copies(dtype, server, off, tokenizer, make_corpus):
    """E2: quotes, versions and opaque ids from the middle of a text that views mostly drop."""
    rng, corpus = random.Random(2), make_corpus()
    asks = []
    for i, compressor in enumerate(COMPRESSORS * 2):
        secret = f'"{opaque_id(rng)}" (version 3.{i}.17-rc{i + 1}+b{rng.randint(1000, 9999)})'
        head, rest = corpus.prompts(2, 150)
        middle = tokens_of(tokenizer, f"\n\nThe release key is {secret}.\n\n")
        end = tokens_of(tokenizer, "\n\nTo repeat: The release key is ")
        asks.append(Ask((*head, *middle, *rest, *end), 24, {"compressor": compressor}))
    found = server.concurrently(asks)
    assert_identical(found, off[dtype].answers(asks))
    by_name = [(ask.vericache["compressor"], a) for ask, a in zip(asks, found, strict=True)]
    assert all(a.accepted == a.drafted > 0 for name, a in by_name if name == "identity")
    assert sum(a.accepted for a in found) < sum(a.drafted for a in found)
    copied = [tokenizer.decode(list(ask.prompt)).split('"')[-2] in a.text for ask, a in
              zip(asks, found, strict=True)]  # fmt: skip
    assert any(copied), "nothing was copied, so this tested nothing"


@pytest.mark.server(DRAFTING["bfloat16"])
def test_every_draft_length_on_opaque_ids(server, off, tokenizer):
    """K6: an echo prompt where a single wrong row shows at once."""
    rng = random.Random(3)
    prompts = []
    for _ in range(50):
        lines = "\n".join(f"{name} = {opaque_id(rng)}" for name in ("alpha", "beta", "gamma"))
        prompts.append(
            tokens_of(tokenizer, f"{lines}\n\nThe same again:\n{lines}\n\nThe same again:\n")
        )
    asks = [
        Ask(prompt, 24, {"compressor": "snapkv", "draft_len": draft_len})
        for draft_len in DRAFT_LENS
        for prompt in prompts
    ]
    found = server.concurrently(asks)
    assert_identical(found, off["bfloat16"].answers(asks), [ask.vericache for ask in asks])
    for i in range(0, len(found), len(prompts)):
        group = found[i : i + len(prompts)]
        accepted, drafted = (sum(getattr(a, n) for a in group) for n in ("accepted", "drafted"))
        assert 0 < accepted < drafted, asks[i].vericache


@pytest.mark.parametrize("dtype", SERVERS)
def test_prefix_hits(dtype, server, off, make_corpus):
    """Cold, whole, part and beyond: the same answers from cached KV, whatever cut the chunks."""
    corpus = make_corpus()
    corpus.prompt(3000)
    first = tuple(corpus.prompt(700))
    other = first[:517] + tuple(corpus.prompt(150))
    server.flush()
    cold = server.ask(first, 24)
    longer = first + cold.ids + tuple(corpus.prompt(30))
    asks = [Ask(prompt, 24) for prompt in (first, other, longer, first[:-1])]
    warm = [server.answer(ask) for ask in asks]
    assert_identical([cold, *warm], off[dtype].answers([asks[0], *asks]))
    page = server.get("/server_info")["page_size"]
    assert cold.meta["cached_tokens"] == 0
    shared = (len(first) - 1, 517, len(first) + len(cold.ids) - 1, len(first) - 2)
    for answer, length in zip(warm, shared, strict=True):
        assert answer.meta["cached_tokens"] == length // page * page


@pytest.mark.parametrize("dtype", SERVERS)
def test_batch_neighbours(dtype, server, off, make_corpus):
    """Lengths, compressors, phases, plain, unverified-free and sampled requests side by side."""
    corpus = make_corpus()
    corpus.prompt(5000)
    rng = random.Random(4)
    adaptive = server.get("/vericache")["config"]["draft_len"] is None
    asks = []
    for i in range(16):
        vericache = {"compressor": COMPRESSORS[i % 5]}
        if i % 7 == 3:
            vericache = {"enabled": False}
        elif not adaptive:
            vericache["draft_len"] = rng.choice(DRAFT_LENS)
        sampling = {"temperature": 0.8, "sampling_seed": i} if i % 3 == 1 else {}
        prompt = tuple(corpus.prompt(rng.randint(5, 400)))
        asks.append(Ask(prompt, rng.randint(4, 32), vericache, sampling))
    together = server.concurrently(asks)
    assert_identical(together, off[dtype].answers(asks))
    alone = [server.answer(ask) for ask in asks[:4]]
    assert_identical(alone, together[:4])
    if not adaptive:
        assert 0 < sum(a.accepted for a in together) < sum(a.drafted for a in together)
