"""Real clients, unchanged: the openai package, an SGLang program, SGLang's benchmark."""

import json
import subprocess
import sys

import openai
import pytest
import sglang as sgl

from server.serving import SERVING, TOOL

pytestmark = pytest.mark.server(SERVING)
CHAT = {
    "model": "default",
    "messages": [{"role": "user", "content": "Count from one to ten in words."}],
    "max_tokens": 32,
    "temperature": 0,
}
PLAIN = {"vericache": {"enabled": False}}
DRAFTED = {"vericache": {"compressor": "snapkv", "draft_len": 6}}


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


@pytest.fixture(autouse=True)
def _drafts_were_made(server):
    before = server.counters()["drafted"]
    yield
    assert server.counters()["drafted"] > before


def test_chat(client):
    plain, drafted = (
        client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3, extra_body=extra)
        for extra in (PLAIN, DRAFTED)
    )
    assert drafted.choices[0].message.content == plain.choices[0].message.content != ""
    assert drafted.choices[0].finish_reason == plain.choices[0].finish_reason
    assert drafted.usage.completion_tokens == plain.usage.completion_tokens
    assert drafted.choices[0].logprobs == plain.choices[0].logprobs
    assert len(drafted.choices[0].logprobs.content) == drafted.usage.completion_tokens


def test_chat_stream(client):
    whole = client.chat.completions.create(**CHAT, extra_body=PLAIN)
    chunks = list(
        client.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}, extra_body=DRAFTED
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [r for r in reasons if r] == [whole.choices[0].finish_reason]


def test_completions(client):
    asked = {"model": "default", "prompt": ["Once upon a time", "def add(a, b):"], "max_tokens": 24}
    answers = [
        client.completions.create(**asked, temperature=0, logprobs=2, extra_body=extra)
        for extra in (PLAIN, DRAFTED)
    ]
    plain, drafted = ([(c.index, c.text, c.logprobs) for c in a.choices] for a in answers)
    assert drafted == plain and len(plain) == 2
    stream = client.completions.create(**asked, temperature=0, stream=True, extra_body=DRAFTED)
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answers[0].choices]


def test_seed(client):
    asked = CHAT | {"temperature": 1.0, "seed": 11}
    plain, drafted, other = (
        client.chat.completions.create(**(asked | more), extra_body=extra)
        .choices[0]
        .message.content
        for more, extra in (({}, PLAIN), ({}, DRAFTED), ({"seed": 12}, DRAFTED))
    )
    assert drafted == plain != other


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_tools(client, choice):
    asked = {**CHAT, "tools": [TOOL], "tool_choice": choice, "max_tokens": 80}
    asked["messages"] = [{"role": "user", "content": "Add 17 and 25."}]
    plain, drafted = (
        client.chat.completions.create(**asked, extra_body=extra).choices[0]
        for extra in (PLAIN, DRAFTED)
    )
    calls = [
        [(c.function.name, c.function.arguments) for c in answer.message.tool_calls]
        for answer in (plain, drafted)
    ]
    assert calls[0] == calls[1]
    assert calls[1][0][0] == "add"
    assert set(json.loads(calls[1][0][1])) == {"a", "b"}
    assert drafted.finish_reason == plain.finish_reason


def test_an_unknown_option_is_a_bad_request(client):
    with pytest.raises(openai.BadRequestError, match="enabeld"):
        client.chat.completions.create(**CHAT, extra_body={"vericache": {"enabeld": 1}})
    client.chat.completions.create(**CHAT, extra_body=DRAFTED)


@sgl.function
def advise(s, topic):
    s += f"Two short tips about {topic}.\n"
    forks = s.fork(2)
    for number, fork in enumerate(forks, 1):
        fork += f"Tip {number}:" + sgl.gen("tip", max_tokens=16, stop="\n")
    s += "Tip 1:" + forks[0]["tip"] + "\nTip 2:" + forks[1]["tip"] + "\nThe topic is "
    s += sgl.select("kind", choices=["cooking", "sailing", "gardening"])
    s += ". In one word:" + sgl.gen("word", max_tokens=4)


def test_a_frontend_program(server):
    """fork, gen and select; the answers are the same every time, prefix hits or not."""
    backend = sgl.RuntimeEndpoint(server.url)
    runs = []
    for _ in range(2):
        server.flush()
        state = advise.run(topic="gardening with herbs", temperature=0, backend=backend)
        runs.append((state.text(), state["kind"], state["word"]))
    assert runs[0] == runs[1]
    assert runs[0][1] in ("cooking", "sailing", "gardening") and runs[0][2]


def test_bench_serving(server, tmp_path):
    """``sglang.bench_serving`` on random token ids: every request completes."""
    out = tmp_path / "bench.jsonl"
    model = server.get("/model_info")["model_path"]
    options = {
        "backend": "sglang", "base-url": server.url, "model": model, "tokenizer": model,
        "dataset-name": "random-ids", "num-prompts": 6, "random-input-len": 64,
        "random-output-len": 12, "random-range-ratio": 1.0, "output-file": out,
    }  # fmt: skip
    command = [sys.executable, "-m", "sglang.bench_serving"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    figures = json.loads(out.read_text().splitlines()[-1])
    assert figures["completed"] == 6
    assert figures["total_output_tokens"] == 6 * 12
