"""A live server started by `sglang serve`: requests, status, metrics, `vericache verify`."""

import json
import re
import sys
from pathlib import Path

import openai
import pytest
import requests

from servers import Server
from sglang_vericache.cli import main
from sglang_vericache.embedded_model import ensure_embedded_model

pytestmark = pytest.mark.slow

SGLANG = Path(sys.executable).with_name("sglang")
FLAGS = ("--vericache-compressor", "streaming", "--vericache-draft-len", "4")
UNKNOWN = {"enabeld": False}
TEXT = "The capital of France is Paris. " * 20


@pytest.fixture(scope="module")
def server():
    command = [str(SGLANG), "serve", "--model-path", str(ensure_embedded_model())]
    limits = ["--max-total-tokens", "32768", "--enable-metrics"]
    with Server([*command, *FLAGS, *limits], name="serve") as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def generate(server, vericache=None, **fields):
    sampling = {"temperature": 0.0, "max_new_tokens": 12}
    if vericache is not None:
        sampling["custom_params"] = {"vericache": vericache}
    body = {"text": TEXT, "sampling_params": sampling, **fields}
    return requests.post(f"{server.url}/generate", json=body, timeout=300)


def status(server):
    return requests.get(f"{server.url}/vericache", timeout=60).json()


def test_counts_in_meta_info_and_status(server):
    before = status(server)["counters"]
    drafting, plain = generate(server).json(), generate(server, {"enabled": False}).json()
    after = status(server)["counters"]
    assert drafting["output_ids"] == plain["output_ids"]
    counts = drafting["meta_info"]["vericache"]
    assert counts["drafted"] > 0
    assert plain["meta_info"]["vericache"] == {"drafted": 0, "accepted": 0, "verify_passes": 11}
    for name in ("drafted", "accepted"):
        assert after[name] - before[name] == counts[name]
    assert after["plain_passes"] - before["plain_passes"] >= 11


def test_status_describes_the_server(server):
    found = status(server)
    assert found["config"]["compressor"] == "streaming" and found["config"]["draft_len"] == 4
    (rank,) = found["ranks"]
    assert len(rank["phases"]) == 5 and rank["kernels"]["cpu_backend"] in ("cpp", "reference")


def test_metrics_equal_the_counters(server):
    generate(server)
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    counters = status(server)["counters"]
    for metric, name in (("drafted_tokens", "drafted"), ("accepted_tokens", "accepted")):
        (value,) = re.findall(rf"^vericache:{metric}_total{{.*}} ([\d.e+]+)$", text, re.MULTILINE)
        assert float(value) == counters[name] > 0


@pytest.mark.parametrize("text", [TEXT, [TEXT, TEXT]])
def test_unknown_key_is_400_in_the_native_api(server, text):
    response = generate(server, UNKNOWN, text=text)
    assert response.status_code == 400
    assert "'enabeld'" in response.text and "draft_len" in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "body", [{"vericache": UNKNOWN}, {"custom_params": {"vericache": UNKNOWN}}]
)
def test_unknown_key_is_400_for_openai_clients(client, body, stream):
    with pytest.raises(openai.BadRequestError, match="enabeld"):
        client.completions.create(model="m", prompt="x", extra_body=body, stream=stream)
    message = {"role": "user", "content": "x"}
    with pytest.raises(openai.BadRequestError, match="enabeld"):
        client.chat.completions.create(
            model="m", messages=[message], extra_body=body, stream=stream
        )


def test_openai_clients_choose_plain_decoding(server, client):
    before = status(server)["counters"]
    for body in ({"vericache": {"enabled": False}}, {"custom_params": {"vericache": {}}}):
        client.completions.create(model="m", prompt=TEXT, max_tokens=8, extra_body=body)
        after = status(server)["counters"]
        assert (after["drafted"] == before["drafted"]) == ("vericache" in body)


def test_unverified_is_refused(server):
    response = generate(server, {"unverified": True})
    assert response.status_code == 400 and "--vericache-allow-unverified" in response.text


def test_samples_have_their_own_seeds(client):
    answer = client.completions.create(
        model="m", prompt="Once upon a time", max_tokens=12, temperature=1.5, n=4
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) > 1


def test_verify_command(server, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(TEXT) + "\n" + json.dumps(TEXT[::-1][:300]) + "\n")
    options = ["--base-url", server.url, "--prompts", str(path), "--max-tokens", "12"]
    code = main(["verify", *options])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and report["identical"] and report["drafted"] > 0
