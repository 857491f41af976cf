"""Hostile clients: every one gets an answer or a clear refusal, and no slot stays taken.

The fixture ``server`` checks after every test that the server is idle and nothing leaked.
"""

import random
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from server.comparing import assert_identical, plain
from server.harness import Ask, RequestFailed
from server.serving import SERVING, alternate

pytestmark = pytest.mark.server(SERVING)
CONTEXT = 8192
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")


def assert_works(server):
    answer = server.ask("The quick brown fox", 12, vericache={"draft_len": 4})
    assert len(answer.ids) == 12 and answer.drafted > 0


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [b"{", b"", b"[1, 2", b'{"text": 3, "prompt": {}, "messages": 3}', b"\xff\xfe\x00", b"null"],
    ids=["open", "empty", "list", "types", "bytes", "null"],
)
def test_malformed_bodies(body, route, server):
    headers = {"Content-Type": "application/json"}
    response = requests.post(server.url + route, data=body, headers=headers, timeout=30)
    # SGLang's own check of a chat request answers 500 to null.
    expected = (500,) if body == b"null" and "chat" in route else (400, 422)
    assert response.status_code in expected, (response.status_code, response.text)
    assert_works(server)


@pytest.mark.parametrize(
    ("prompt", "tokens", "vericache"),
    [
        ("Hello", 10**9, {}),
        ("Hello", -1, {}),
        ("Hello", 4, {"ratio": -0.5}),
        ("Hello", 4, {"ratio": 0}),
        ("Hello", 4, {"ratio": "x"}),
        ("Hello", 4, {"ratio": float("nan")}),
        ("Hello", 4, {"draft_len": -1}),
        ("Hello", 4, {"draft_len": 10**6}),
        ("Hello", 4, {"enabled": "no"}),
        ((), 4, {}),
    ],
)
def test_values_out_of_range(prompt, tokens, vericache, server):
    """HTTP 400, whose text is about the parameter."""
    if vericache.get("ratio") != vericache.get("ratio"):
        body = b'{"text": "a", "sampling_params": {"custom_params": {"vericache": {"ratio": NaN}}}}'
        response = requests.post(server.url + "/generate", data=body, timeout=30)
        assert response.status_code in (400, 422), response.text
    else:
        with pytest.raises(RequestFailed) as refused:
            server.ask(prompt, tokens, vericache=vericache)
        assert refused.value.status == 400, refused.value
        assert not vericache or next(iter(vericache)) in refused.value.text
    assert_works(server)


@pytest.mark.parametrize("token", [10**6, -1])
def test_ids_outside_the_vocabulary(token, server):
    """HTTP 400, as for any other value out of range."""
    with pytest.raises(RequestFailed) as refused:
        server.ask((token,), 4)
    assert refused.value.status == 400
    assert_works(server)


@pytest.mark.parametrize("prompt", ["", ()])
@pytest.mark.parametrize("vericache", [{}, {"enabled": False}])
def test_an_empty_prompt(prompt, vericache, server):
    """Stock's scheduler would end with an error."""
    with pytest.raises(RequestFailed, match="empty") as refused:
        server.ask(prompt, 4, vericache=vericache)
    assert refused.value.status == 400
    assert_works(server)


@pytest.mark.parametrize("token", [-1, 10**9])
def test_stop_tokens_outside_the_vocabulary(token, server):
    with pytest.raises(RequestFailed, match="stop_token_ids") as refused:
        server.ask("Hello", 4, sampling={"stop_token_ids": [token], "min_new_tokens": 1})
    assert refused.value.status == 400
    assert_works(server)


@pytest.mark.parametrize("num", [2**31, 2**63 - 1])
def test_numbers_of_more_than_32_bits(num, server):
    """Stock's scheduler would end with an error."""
    with pytest.raises(RequestFailed, match="top_k") as refused:
        server.ask("Hello", 4, sampling={"temperature": 1.0, "top_k": num})
    assert refused.value.status == 400
    with pytest.raises(RequestFailed, match="top_logprobs_num") as refused:
        server.ask("Hello", 4, fields={"top_logprobs_num": num})
    assert refused.value.status == 400
    assert_works(server)


@pytest.mark.parametrize(
    "parameters", [{"rid": [1]}, {"rid": 7}, {"sampling_params": {"temperature": "hot"}}]
)
def test_wrong_types_by_way_of_vertex_generate(parameters, server):
    """Stock hands them on unchecked; an id that is no string ends its scheduler."""
    url, instances = f"{server.url}/vertex_generate", [{"text": "Hello"}]
    right = {"sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    body = {"instances": instances, "parameters": right}
    answer = requests.post(url, json=body, timeout=60)
    assert answer.status_code == 200 and answer.json()["predictions"], answer.text
    body = {"instances": instances, "parameters": right | parameters}
    refused = requests.post(url, json=body, timeout=60)
    assert refused.status_code == 400 and "invalid type" in refused.text, refused.text
    assert_works(server)


def test_custom_params_of_another_type(server):
    body = Ask("Hello", 4).body()
    body["sampling_params"]["custom_params"] = [1]
    response = server.post("/generate", body)
    assert response.status_code == 400, response.text
    assert "custom_params" in response.text
    assert_works(server)


def test_a_prompt_of_exactly_the_context(server, make_corpus):
    """Refused by length; the longest prompt that the refusal names is answered."""
    prompt = tuple(make_corpus().prompt(CONTEXT))
    with pytest.raises(RequestFailed, match=str(CONTEXT)) as refused:
        server.ask(prompt, 8)
    assert refused.value.status == 400
    with pytest.raises(RequestFailed) as refused:
        server.ask(prompt[:-1], 1)
    longest = int(re.search(r"maximum allowed length \((\d+) tokens\)", refused.value.text)[1])
    assert CONTEXT - 16 < longest < CONTEXT
    last = server.ask(prompt[: longest - 1], 1)
    assert len(last.ids) == 1
    assert_works(server)


def test_1000_aborts(server, without_drafts, make_corpus):
    """At random times, by id and by leaving; requests beside them are untouched."""
    rng = random.Random(7)
    prompts = [tuple(prompt) for prompt in make_corpus().prompts(20, 40)]
    asks = [Ask(prompt, 40, vericache) for prompt, vericache in zip(
        prompts[:4], alternate(4), strict=True)]  # fmt: skip

    def start_and_abort(i):
        # Padded: SGLang aborts every request whose id starts with the given one.
        rid = f"abort-{i:04d}"
        ask = Ask(prompts[i % 20], 400, alternate(3)[i % 3], {}, {"rid": rid})
        body = ask.body() | {"stream": True}
        with server.post("/generate", body, stream=True) as response:
            lines = response.iter_lines()
            # An id is known to the server from the first chunk on.
            for _ in range(rng.randint(i % 2, 3)):
                next(lines, None)
            if i % 2:
                server.abort(rid)
                return any(b'"abort"' in line for line in lines)
        return None

    with ThreadPoolExecutor(12) as threads:
        survivors = [server.submit(ask) for ask in asks]
        ends = list(threads.map(start_and_abort, range(1000)))
        found = [future.result() for future in survivors]
    assert ends.count(True) == 500, "an abort by id was not reported"
    server.check_idle()
    assert_identical(found, without_drafts.answers(asks))
    assert sum(a.accepted for a in found) < sum(a.drafted for a in found)
    assert_works(server)


def test_64_connections(server, without_drafts, make_corpus):
    """All at once: every one gets its own answer."""
    prompts = [tuple(prompt) for prompt in make_corpus().prompts(8, 40)]
    options = alternate(64)
    asks = [Ask(prompts[i % 8], 8 + i // 8, options[i]) for i in range(64)]
    found = server.concurrently(asks)
    assert_identical(found, without_drafts.answers(asks))
    assert sum(a.accepted for a in found) < sum(a.drafted for a in found)


def test_a_client_that_stops_reading(server, make_corpus):
    """Others are served meanwhile; when it hangs up, its slots are free."""
    prompt = list(make_corpus().prompt(40))
    body = Ask(tuple(prompt), 3000, {"compressor": "identity"}).body() | {"stream": True}
    request = requests.Request("POST", server.url + "/generate", json=body).prepare()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((host, int(port)))
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        deaf.sendall(f"POST /generate HTTP/1.1\r\nHost: {host}\r\n{head}\r\n".encode())
        deaf.sendall(request.body)
        while server.load()["num_running_reqs"] == 0:
            time.sleep(0.05)
        ask = Ask(tuple(prompt[:20]), 20, {"compressor": "snapkv"})
        assert_identical([server.answer(ask)], [server.answer(plain(ask))])
        assert server.load()["num_running_reqs"] >= 1, "it was not running beside"
    server.check_idle()


def test_half_a_request(server):
    """A connection that sends half of its headers and waits keeps nobody else out."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /generate HTTP/1.1\r\nContent-Length: 100\r\n")
        assert_works(server)
