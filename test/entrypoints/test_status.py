"""``GET /vericache`` and the counts in ``meta_info``."""

import json
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from sglang_vericache import __version__
from sglang_vericache.config import VeriCacheConfig, attach
from sglang_vericache.core import Counters
from sglang_vericache.entrypoints import status
from sglang_vericache.scheduler import Planner


class Manager:
    """Stands in for the tokenizer manager of a server with several data-parallel ranks."""

    def __init__(self, config, states):
        self.server_args = SimpleNamespace()
        if config is not None:
            attach(self.server_args, config)
        self.states = json.loads(json.dumps(states))  # what arrives from another process

    async def get_internal_state(self):
        return self.states


def get(manager):
    app = FastAPI()
    status.install_route(app, manager)
    return TestClient(app).get("/vericache")


def worker(rounds):
    counters = Counters()
    for drafted, accepted in rounds:
        counters.record_verify(drafted, accepted)
    req = SimpleNamespace(
        rid="a", origin_input_ids=[1] * 900, output_ids=[2] * 5, finished=lambda: False
    )
    state = SimpleNamespace(req=req, drafts=[7, 8], limit=4, view_kept=90.0, view_length=880)
    requests = [state]
    use = {"int4": {"tokens": 100, "bytes": 720_000, "used": 60}}
    chooser = SimpleNamespace(packed=SimpleNamespace(usage=lambda: use))
    return SimpleNamespace(
        counters=counters,
        requests=requests,
        planner=Planner.fixed(4),
        tiers=None,
        chooser=chooser,
    )


def test_state_of_the_ranks():
    ranks = [
        status.worker_status(worker([(4, 4), (4, 1), (0, 0)])),
        status.worker_status(worker([(2, 0)])),
    ]
    response = get(Manager(VeriCacheConfig(draft_len=4), [{"vericache": r} for r in ranks]))
    assert response.status_code == 200
    found = response.json()
    assert found["version"] == __version__
    assert found["config"]["compressor"] == "snapkv" and found["config"]["draft_len"] == 4
    assert found["counters"] == {
        "drafted": 10,
        "accepted": 5,
        "acceptance": 0.5,
        "acceptance_by_position": [2 / 3, 1 / 3, 1 / 2, 1 / 2],
        "verify_passes": 3,
        "plain_passes": 1,
        "committed": 9,
        "kv_bytes_read": 0,
        "offloads": 0,
        "stages": 0,
        "staged_tokens": 0,
        "copied_ahead": 0,
        "waits": 0,
        "late": 0,
        "host_reads": 0,
        "returns": 0,
        "provisional": 0,
        "proposed": 0,
        "unpacked": 0,
        "looked_up": 0,
        "looked_up_accepted": 0,
        "probed": 0,
        "probed_agreed": 0,
        "rounds_by_length": {"0": 1, "2": 1, "4": 2},
    }
    first = found["ranks"][0]
    assert len(found["ranks"]) == 2
    assert first["phases"] == [0] * 5
    assert first["running"] == [
        {
            "rid": "a",
            "context": 905,
            "drafts": 2,
            "draft_len_limit": 4,
            "view_kept": 90.0,
            "view_length": 880,
        }
    ]
    assert first["packed"]["int4"]["used"] == 60
    assert set(first["cost_seconds"]) == set(status.COST_TERMS)


def test_server_with_drafting_off_has_no_worker():
    kernels = {"cpu_backend": "cpp"}
    manager = Manager(VeriCacheConfig(mode="off"), [{"vericache": {"kernels": kernels}}])
    found = get(manager).json()
    assert found["config"]["mode"] == "off"
    assert found["counters"]["drafted"] == found["counters"]["committed"] == 0
    assert found["ranks"] == [{"kernels": kernels}]


def test_stock_server_says_so():
    response = get(Manager(None, [{}]))
    assert response.status_code == 404
    assert "--vericache" in response.json()["error"]["message"]


def output(passes, cap, correct):
    return SimpleNamespace(
        spec_verify_ct=[passes], spec_num_cap_tokens=[cap], spec_num_correct_drafts=[correct]
    )


def test_meta_info():
    manager = Manager(VeriCacheConfig(), [])
    meta = {"spec_accept_rate": 0.1, "spec_num_proposed_drafts": 160}
    status.add_meta_info(None, manager, meta, output(10, 20, 15), 0)
    assert meta["vericache"] == {"drafted": 20, "accepted": 15, "verify_passes": 10}
    assert meta["spec_accept_rate"] == 0.75
    assert meta["spec_num_proposed_drafts"] == 20


def test_meta_info_of_plain_decoding():
    manager, meta = Manager(VeriCacheConfig(), []), {"spec_accept_rate": 0.0}
    status.add_meta_info(None, manager, meta, output(10, 0, 0), 0)
    assert meta["vericache"] == {"drafted": 0, "accepted": 0, "verify_passes": 10}
    assert meta["spec_accept_rate"] == 0.0


@pytest.mark.parametrize("config", [None, VeriCacheConfig(mode="off")])
def test_no_meta_info_without_drafting(config):
    meta = {}
    status.add_meta_info(None, Manager(config, []), meta, output(10, 0, 0), 0)
    assert meta == {}
