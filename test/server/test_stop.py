"""Stops, ends of sequence and streams, with many tokens committed at once (cases S1-S12)."""

import itertools
import json
from dataclasses import replace

import pytest

from server.comparing import assert_identical, plain
from server.harness import Ask, Result
from server.serving import CHAT_EOS, EOS, INCREMENTAL, SERVING, TOOL, alternate, assert_same

pytestmark = pytest.mark.server(SERVING)
FRUITS = "mango kiwi lemon papaya banana cherry apricot grape peach plum".split()  # noqa: SIM905


def ids_of(tokenizer, text):
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture
def sentence(tokenizer):
    """Ids of a line that ends with the stop word, EOS and a newline."""
    return ids_of(tokenizer, f"Shopping: {', '.join(FRUITS[:6])} STOP{CHAT_EOS}\n")


@pytest.mark.parametrize("draft_len", [1, 4, 8, 16])
def test_stops_beside_the_length_limit(draft_len, server, without_drafts, make_corpus, tokenizer):
    """S1: a stop and max_tokens inside one accepted run."""
    prompt = tuple(make_corpus().prompt(60))
    full = without_drafts.answers([Ask(prompt, 24)])[0]
    word = tokenizer.decode([full.ids[10]])
    assert word.strip() and word not in tokenizer.decode(list(full.ids[:10]))
    token = next(t for t in full.ids[14:] if t not in full.ids[:14])
    asks = []
    for i, vericache in enumerate(alternate(48, draft_len=draft_len)):
        stop = {"stop": [word]} if i % 2 else {"stop_token_ids": [token]}
        asks.append(Ask(prompt, i // 2 + 1, vericache, {**stop, "ignore_eos": False}))
    found = server.concurrently(asks)
    assert_same(found, without_drafts.answers(asks), asks)
    assert {a.finish["type"] for a in found} == {"length", "stop"}
    assert {a.finish["matched"] for a in found if a.finish["type"] == "stop"} == {word, token}
    assert all(word not in a.text for a in found[1::2])


@pytest.mark.parametrize(("last", "passes"), [(1, 1), (9, 1), (17, 1), (18, 2)])
def test_a_stop_string_that_ends_on_a_token_of_a_run(
    last, passes, server, without_drafts, tokenizer
):
    """S2: the first, middle and last token of the first run of 17, and the first one behind it.

    The number of verify passes shows which run it was: the first token is the prefill's.
    """
    line, word = ids_of(tokenizer, f"Shopping: {', '.join(FRUITS)}.\n"), FRUITS[5]
    end = next(n for n in range(len(line)) if word in tokenizer.decode(list(line[:n])))
    prompt = (line * 6 + line[:end])[: -1 - last]
    exact = {"compressor": "identity", "draft_len": 16}
    whole = server.ask(prompt, 1 + 17 + 17, vericache=exact)
    assert whole.meta["vericache"]["verify_passes"] == 2 and whole.accepted == whole.drafted == 32
    ask = Ask(prompt, 64, exact, {"stop": [word]})
    found = server.answer(ask)
    assert len(found.ids) == last + 1
    assert found.meta["vericache"]["verify_passes"] == passes
    assert found.text == whole.text[: whole.text.index(word)]
    assert_identical([found], without_drafts.answers([ask]))


def test_stop_strings_anywhere_in_a_run(server, without_drafts, tokenizer):
    """S2: many at once, whose runs begin anywhere."""
    line = f"Shopping: {', '.join(FRUITS)}.\n"
    prompt = ids_of(tokenizer, line * 5 + "Shopping:")
    exact = {"compressor": "identity", "draft_len": 16}
    full = server.ask(prompt, 40, vericache=exact)
    assert full.accepted == full.drafted >= 16, "no long accepted run"
    asks, cut = [], []
    for fruit in FRUITS:
        at = full.text.find(fruit)
        if at >= 0:
            asks.append(Ask(prompt, 64, exact, {"stop": [fruit]}))
            cut.append(full.text[:at])
    found = server.concurrently(asks)
    assert len(asks) == len(FRUITS)
    assert [a.text for a in found] == cut
    expected = without_drafts.answers(asks)
    assert [(a.text, a.ids, a.finish) for a in found] == [
        (a.text, a.ids, a.finish) for a in expected
    ]
    # A stop in the first tokens ends an answer before its first run.
    assert sum(a.accepted > 0 for a in found) > len(found) / 2


def test_the_first_stop_wins(server, without_drafts, sentence, tokenizer):
    """Of several stops in one accepted run the one that plain decoding meets first counts."""
    prompt = sentence * 6 + sentence[:3]
    exact = {"compressor": "identity", "draft_len": 16}
    stops = [
        ["STOP", FRUITS[4], FRUITS[2]],  # the list's order is not the text's
        ["\n", "STOP"],
        ["Shopping"],  # behind the end of sequence
    ]
    asks = [Ask(prompt, 64, exact, {"stop": stop, "ignore_eos": False}) for stop in stops]
    found = server.concurrently(asks)
    assert_identical(found, without_drafts.answers(asks), stops)
    assert [a.finish["matched"] for a in found] == [FRUITS[2], "STOP", EOS]
    assert all(a.accepted > 0 for a in found)


def test_a_stop_string_before_eos(server, without_drafts, sentence):
    """S3: both in one run; the string counts and is not in the text."""
    prompt = sentence * 6 + sentence[:3]
    exact = {"compressor": "identity"}
    eos = server.answer(Ask(prompt, 64, exact, {"ignore_eos": False}))
    assert eos.finish == {"type": "stop", "matched": EOS} and "STOP" in eos.text
    assert eos.accepted >= 8, "no run that holds both"
    asks = [
        Ask(prompt, 64, vericache, {"ignore_eos": False, "stop": ["STOP"]})
        for vericache in alternate(3)
    ]
    found = server.concurrently(asks)
    assert_same(found, without_drafts.answers(asks), asks)
    assert all(a.finish == {"type": "stop", "matched": "STOP"} for a in found)
    assert all("STOP" not in a.text for a in found)


def test_logprobs_end_at_the_stop(server, without_drafts, sentence):
    """S4: ids, logprobs and completion_tokens agree, streaming or not."""
    sampling = {"stop": [" STOP"], "ignore_eos": False}
    asks = [
        Ask(sentence * 6 + sentence[:3], 40, vericache, sampling, {"top_logprobs_num": 2})
        for vericache in alternate(3)
    ]
    for found in (server.concurrently(asks), [c[-1] for c in server.streams(asks)]):
        assert_same(found, without_drafts.answers(asks), asks)
        for answer in found:
            assert answer.finish["type"] == "stop"
            counts = {len(answer.ids), len(answer.logprobs), answer.meta["completion_tokens"]}
            assert counts == {len(answer.meta["output_top_logprobs"])}


def test_eos_anywhere_in_a_block(server, without_drafts, sentence):
    """S6: nothing behind EOS, in the output or in the prefix cache; ignore_eos goes on."""
    at = sentence.index(EOS)
    prompts = [sentence * 6 + sentence[: at + 1 - ahead] for ahead in range(1, 10)]
    asks = [
        Ask(prompt, 24, vericache, {"ignore_eos": ignore})
        for prompt, vericache in zip(prompts, alternate(9), strict=True)
        for ignore in (False, True)
    ]
    found = server.concurrently(asks)
    assert_same(found, without_drafts.answers(asks), asks)
    ended, went_on = found[::2], found[1::2]
    assert [a.ids.index(EOS) + 1 for a in ended] == list(range(1, 10))
    assert all(a.ids[-1] == EOS and a.finish["matched"] == EOS for a in ended)
    assert all(len(a.ids) == 24 and EOS in a.ids[:-1] for a in went_on)

    # The next turn goes on as drafted behind EOS: a longer hit would show that it was kept.
    turns = []
    for vericache in ({"compressor": "identity"}, {"enabled": False}):
        server.flush()
        first = server.answer(Ask(prompts[5], 24, vericache, {"ignore_eos": False}))
        committed = prompts[5] + first.ids
        turns.append(server.ask(committed + sentence[at + 1 :] + sentence[:9], 2))
        assert len(committed) - 1 <= turns[-1].meta["cached_tokens"] <= len(committed)
    assert_identical(turns[:1], turns[1:])


@pytest.mark.parametrize("interval", range(1, 9))
def test_pieces_of_a_stream_add_up(interval, server, without_drafts, make_corpus):
    """S7: whatever a chunk holds; every chunk continues the one before."""
    asks = [
        Ask(tuple(prompt), 40, vericache, {"stream_interval": interval})
        for prompt, vericache in zip(make_corpus().prompts(3, 60), alternate(3), strict=True)
    ]
    streams = server.streams(asks)
    assert_same([chunks[-1] for chunks in streams], without_drafts.answers(asks), asks)
    assert max(len(chunks) for chunks in streams) > 40 / interval / 17
    for chunks in streams:
        for before, after in itertools.pairwise(chunks):
            assert after.text.startswith(before.text.rstrip("\ufffd"))
            assert after.ids[: len(before.ids)] == before.ids


def chat_stream(server, body):
    """Concatenated content, reasoning and tool arguments, and the usage of a chat stream."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    response = server.post("/v1/chat/completions", body, stream=True)
    assert response.status_code == 200, response.text
    joined, usage = {"content": "", "reasoning_content": "", "arguments": ""}, None
    for line in response.iter_lines():
        if not line.startswith(b"data: ") or line.endswith(b"[DONE]"):
            continue
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for key in ("content", "reasoning_content"):
                joined[key] += delta.get(key) or ""
            for call in delta.get("tool_calls") or ():
                joined["arguments"] += call["function"].get("arguments") or ""
    return joined, usage


def chat_whole(server, body):
    """The same of an answer in one piece."""
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls") or ()
    joined = {key: message.get(key) or "" for key in ("content", "reasoning_content")}
    joined["arguments"] = "".join(call["function"]["arguments"] for call in calls)
    return joined, answer["usage"]


def assert_streams_add_up(server, body, *parts):
    """Streamed, whole and plain answers agree, and these parts of them are not empty."""
    expected, usage = chat_whole(server, body | {"vericache": {"enabled": False}})
    assert all(expected[name] for name in parts), expected
    before = server.counters()["drafted"]
    for vericache in ({"compressor": "identity"}, {"compressor": "snapkv"}):
        for ask in (chat_whole, chat_stream):
            found, found_usage = ask(server, body | {"vericache": vericache})
            assert found == expected
            for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
                assert found_usage[name] == usage[name]
    assert server.counters()["drafted"] > before


def test_pieces_of_chat_content_add_up(server):
    """S7 through the chat API."""
    messages = [{"role": "user", "content": "Count from one to twelve in words, then rest. Go!"}]
    body = {"model": "m", "messages": messages, "max_tokens": 40, "temperature": 0}
    assert_streams_add_up(server, body, "content")


def test_pieces_of_tool_arguments_add_up(server):
    """S7 for a tool call."""
    assert_streams_add_up(server, tool_body(), "arguments")


def tool_body():
    return {
        "model": "m",
        "messages": [{"role": "user", "content": "What is 3 plus 4? Use the tool."}],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "max_tokens": 60,
        "temperature": 0,
    }


@pytest.mark.server(INCREMENTAL)
def test_pieces_of_thoughts_add_up(server):
    """S7 for reasoning: the regular expression makes the model think."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "What is two plus two?"}],
        "regex": "<think>[a-z ]{24,32}</think>[a-z ]{12,16}",
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": 60,
        "temperature": 0,
    }
    assert_streams_add_up(server, body, "reasoning_content", "content")


@pytest.mark.parametrize(
    "incremental",
    [
        pytest.param(False, marks=pytest.mark.server(SERVING)),
        pytest.param(True, marks=pytest.mark.server(INCREMENTAL)),
    ],
)
def test_one_logprob_a_token_over_all_chunks(incremental, server, make_corpus):
    """S9: cumulative chunks repeat what came, incremental ones hold what is new."""
    asks = [
        Ask(tuple(prompt), 33, vericache)
        for prompt, vericache in zip(make_corpus().prompts(3, 60), alternate(3), strict=True)
    ]
    whole = [server.answer(plain(ask)) for ask in asks]
    streams = server.streams(asks)
    assert all(len(chunks) > 2 for chunks in streams)
    assert min(len(chunks) for chunks in streams) < 20, "no chunk holds a run"
    for chunks, expected in zip(streams, whole, strict=True):
        if incremental:
            ids = [token for chunk in chunks for token in chunk.ids]
            logprobs = [value for chunk in chunks for value in chunk.logprobs]
        else:
            ids, logprobs = chunks[-1].ids, chunks[-1].logprobs
        assert tuple(ids) == expected.ids and tuple(logprobs) == expected.logprobs
        assert chunks[-1].meta["completion_tokens"] == len(logprobs) == 33
    assert sum(c[-1].accepted for c in streams) < sum(c[-1].drafted for c in streams)


def test_several_choices_of_one_prompt(server, make_corpus):
    """S12: indices, counts, and one text under one seed."""
    prompts = [tuple(prompt) for prompt in make_corpus().prompts(2, 50)]
    sampling = {"temperature": 0.8, "n": 3}
    response = server.post("/generate", Ask(prompts[0], 20, {}, sampling).body())
    three = [Result.of(answer) for answer in response.json()]
    assert len(three) == 3 and {len(a.ids) for a in three} == {20}
    assert len({a.ids for a in three}) == 3, "samples share their noise"
    assert sum(a.drafted for a in three) > sum(a.accepted for a in three)

    seeded = Ask(prompts[0], 20, {}, sampling | {"sampling_seed": 3})
    same = [Result.of(each) for each in server.post("/generate", seeded.body()).json()]
    one = replace(plain(seeded), sampling=seeded.sampling | {"n": 1})
    assert_identical(same, [server.answer(one)] * 3)

    body = Ask(prompts[0], 12, {}, sampling | {"n": 2}).body() | {"input_ids": prompts}
    body["sampling_params"] = [body["sampling_params"]] * 2
    assert len(server.post("/generate", body).json()) == 4

    completion = {"model": "m", "prompt": "Once upon", "n": 3, "max_tokens": 12, "stream": True}
    response = server.post("/v1/completions", completion | {"temperature": 0.8}, stream=True)
    lines = [line[6:] for line in response.iter_lines() if line.startswith(b"data: {")]
    chunks = [choice for line in lines for choice in json.loads(line)["choices"]]
    assert {choice["index"] for choice in chunks} == {0, 1, 2}
    ended = [choice["index"] for choice in chunks if choice["finish_reason"]]
    assert sorted(ended) == [0, 1, 2]


def test_abort_of_several_choices_leaks_nothing(server, make_corpus):
    """S12: every slot is free afterwards.

    SGLang gives choices ids of their own, so neither their client's leaving nor its id ends them.
    """
    body = Ask(tuple(make_corpus().prompt(50)), 7000, {}, {"temperature": 0.8, "n": 3}).body()
    before = server.counters()
    for _ in range(3):
        response = server.post("/generate", body | {"stream": True}, stream=True)
        lines = response.iter_lines()
        for _ in range(20):  # more than the first token of each
            next(lines)
        assert server.post("/abort_request", {"abort_all": True}).status_code == 200
        response.close()
    server.check_idle()
    committed = sum(server.counters()[n] - before[n] for n in ("accepted", "verify_passes"))
    assert 0 < committed < 3 * 3 * 7000, "they ran to their end"
