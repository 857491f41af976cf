"""X0 and X1 (case E1): drafting, however poorly, changes no token and no bit of a logprob."""

import os
from dataclasses import dataclass
from itertools import pairwise

import pytest

from server.comparing import assert_identical
from server.covering import covering, pairs, product
from server.harness import Ask
from server.specs import ADAPTIVE, COMPRESSORS, DRAFTING

TOKENS = 20
PROMPTS = 8
TAIL = 64
FACTORS = {
    "compressor": COMPRESSORS,
    "draft_len": (1, 2, 4, 8, 16, "auto"),
    "batch": (1, 4, 8),
    "context": (10, 500, 2000, 7000),
    "dtype": ("bfloat16", "float32"),
}
# Set to run all 720 combinations instead of a sample that holds every pair of values.
FULL = "VERICACHE_TEST_FULL"


@dataclass(frozen=True)
class Case:
    """One combination of ``FACTORS``."""

    compressor: str
    draft_len: int | str
    batch: int
    context: int
    dtype: str

    @property
    def adaptive(self):
        return self.draft_len == "auto"

    @property
    def spec(self):
        return (ADAPTIVE if self.adaptive else DRAFTING)[self.dtype]

    @property
    def param(self):
        words = (self.compressor, f"k{self.draft_len}", f"b{self.batch}", f"n{self.context}")
        mark = pytest.mark.server(self.spec)
        return pytest.param(self, id="-".join((*words, self.dtype)), marks=mark)

    def asks(self, prompts):
        vericache = {"compressor": self.compressor}
        if not self.adaptive:
            vericache["draft_len"] = self.draft_len
        return [Ask(prompt, TOKENS, vericache) for prompt in prompts]


CHOICES = product(FACTORS) if os.environ.get(FULL) else covering(FACTORS)
CASES = [Case(**choice) for choice in CHOICES]


@pytest.fixture(scope="module")
def questions(make_corpus):
    """By context length, ``PROMPTS`` prompts; the long ones ask about the same text."""
    corpus = make_corpus()
    found = {}
    for context in FACTORS["context"]:
        shared = corpus.prompt(context - TAIL) if context > 1000 else []
        tails = corpus.prompts(PROMPTS, context - len(shared))
        found[context] = [tuple(shared + tail) for tail in tails]
    return found


def test_the_sample_holds_every_pair_of_values():
    wanted = set().union(*(pairs(choice) for choice in product(FACTORS)))
    assert set().union(*(pairs(vars(case)) for case in CASES)) == wanted


@pytest.mark.parametrize("case", [case.param for case in CASES])
def test_drafting_changes_nothing(case, server, without_drafts, off, questions):
    start = CASES.index(case) % PROMPTS
    prompts = [questions[case.context][(start + i) % PROMPTS] for i in range(case.batch)]
    asks = case.asks(prompts)
    server.warm(prompts[0])
    found = server.batch(asks)

    assert_identical(found, without_drafts.answers(asks))
    assert_identical(found, off[case.dtype].answers(asks))
    drafted = sum(answer.drafted for answer in found)
    accepted = sum(answer.accepted for answer in found)
    if not case.adaptive:
        assert drafted >= case.batch
    if case.compressor == "identity" and not case.adaptive:  # lookup may be wrong
        assert accepted == drafted
    if case.compressor == "random-kv" and drafted > 4 * case.batch:
        assert accepted < drafted


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=pytest.mark.server(spec)) for d, spec in ADAPTIVE.items()]
)
def test_adaptive_lengths_draft_where_it_pays(dtype, server, off, questions):
    """Whether drafting pays at 7,000 tokens is up to the machine, but it is tried there."""
    short, *long = questions[10][0], *questions[7000]
    groups = [[Ask(short, 32)], [Ask(prompt, 64) for prompt in long]]
    server.warm(long[0])
    counters, found = [server.counters()], []
    for asks in groups:
        found.append(server.batch(asks))
        counters.append(server.counters())
        assert_identical(found[-1], off[dtype].answers(asks))
    looked_up = [after["looked_up"] - before["looked_up"] for before, after in pairwise(counters)]
    drafted = [sum(answer.drafted for answer in answers) for answers in found]
    assert drafted[0] == looked_up[0], "drafted below the least context"
    assert drafted[1] > looked_up[1], "never drafted on 7,000 tokens"


@pytest.mark.server(DRAFTING["bfloat16"])
def test_random_views_accept_little(server, questions):
    """The negative control drafts from garbage, so its equal output owes nothing to its drafts."""
    rates = {}
    for compressor in ("snapkv", "random-kv"):
        vericache = {"compressor": compressor, "draft_len": 4}
        found = server.batch([Ask(prompt, TOKENS, vericache) for prompt in questions[2000]])
        rates[compressor] = sum(a.accepted for a in found) / sum(a.drafted for a in found)
    assert rates["random-kv"] < 0.5 * rates["snapkv"] and rates["random-kv"] < 0.3, rates


@pytest.mark.server(DRAFTING["bfloat16"])
def test_a_view_is_really_smaller(server, questions):
    """And drafting reads less of the cache than decoding plainly would."""
    prompt, vericache = questions[7000][0], {"compressor": "snapkv", "draft_len": 16}
    server.warm(prompt)
    before = server.counters()
    running = server.submit(Ask(prompt, 48, vericache))
    seen = []
    while not running.done():
        seen += [r for r in server.get("/vericache")["ranks"][0]["running"] if r["view_length"]]
    assert seen and all(r["view_kept"] <= 0.11 * r["view_length"] for r in seen)
    assert all(r["view_length"] <= r["context"] for r in seen)
    after = server.counters()
    drafted, verified = (after[n] - before[n] for n in ("drafted", "verify_passes"))
    read = after["kv_bytes_read"] - before["kv_bytes_read"]
    full_pass = 30 * 2 * 3 * 64 * 2 * len(prompt)  # layers, K and V, heads, head_dim, bf16
    assert drafted > 4 * verified > 0
    assert read < full_pass * (1.05 * (verified + 1) + 0.15 * drafted)
