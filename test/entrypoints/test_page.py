"""``/vericache/ui`` in a real browser, against the real routes of a server whose state is given."""

import shutil
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import FastAPI

from sgl_kernel_ext import active
from sglang_vericache.config import VeriCacheConfig, attach
from sglang_vericache.core import Counters
from sglang_vericache.entrypoints import status
from sglang_vericache.scheduler import Planner

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here (Debian: apt install chromium)"
)
USAGE = {
    **{"device": 16384, "device_free": 1384, "device_evictable": 5000, "compressed": 4000},
    **{"host": 96000, "host_free": 48000, "offloaded": 7, "staged": 1},
}


PACKED = {"int4": {"tokens": 5000, "bytes": 33_000_000, "used": 2000}}
STORE = {
    **{"identity": "ab", "queried": 90, "found": 70, "read": 60, "written": 5},
    **{"bytes_read": 8_000_000, "bytes_written": 700_000},
    **{"seconds": {"read": 0.5}, "errors": {"read_corrupt": 2}},
}


class Manager:
    """Stands in for the tokenizer manager."""

    def __init__(self, tier):
        self.server_args = SimpleNamespace()
        attach(self.server_args, VeriCacheConfig(tier=tier))
        self.tier = tier

    async def get_internal_state(self):
        counters = Counters(offloads=11, stages=60, staged_tokens=360_000, waits=3)
        counters.record_verify(8, 6)
        req = SimpleNamespace(
            rid="request-a", origin_input_ids=[1] * 900, output_ids=[2], finished=lambda: False
        )
        state = SimpleNamespace(req=req, drafts=[7, 8], limit=16, view_kept=90.4, view_length=880)
        resident = self.tier == "resident"
        tiers = None if resident else SimpleNamespace(usage=lambda: USAGE)
        worker = SimpleNamespace(
            counters=counters,
            requests=[state],
            planner=Planner.fixed(8),
            tiers=tiers,
            chooser=SimpleNamespace(
                packed=SimpleNamespace(usage=dict if resident else PACKED.copy)
            ),
        )
        storage = {"storage": None if resident else STORE}
        return [{"vericache": {"kernels": active(), **storage, **status.worker_status(worker)}}]


@pytest.fixture
def serve():
    servers = []

    def start(manager):
        app = FastAPI()
        status.install_route(app, manager)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        servers.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/vericache/ui"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join()


def text_of(url):
    """The page's document after its scripts have run for some seconds."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=4000")
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", url], capture_output=True, text=True, timeout=60
    )
    return done.stdout.split("<script>")[0]


@needs_chromium
def test_it_draws_both_tiers_and_the_rings(serve):
    page = text_of(serve(Manager("host")))
    for shown in (
        *("compressed copies 4K", "cached 5K", "free 1.4K", "in use 48K"),
        *("7 requests offloaded, 1 staged", "Device slots reserved for copies", "request-a"),
        *("90 of 880", "2 of 16", "75.0 %", "tier host", "360K"),
        *("Packed int4", "copies 2K", "Store", "8M", "read_corrupt 2", "offloads", "proposed"),
    ):
        assert shown in page, shown
    assert f"Rank 0: kernels {active()['isa'] or 'reference'}" in page
    assert "no answer" not in page


@needs_chromium
def test_without_a_host_tier_there_is_none_to_draw(serve):
    page = text_of(serve(Manager("resident")))
    assert "Verify passes booked" in page and "Acceptance by place" in page
    assert "compressed copies" not in page and "no answer" not in page
    assert "Packed" not in page and "Store" not in page and "offloads" not in page


@needs_chromium
def test_it_says_so_when_the_server_does_not_answer(serve):
    manager = Manager("host")

    async def fail():
        raise RuntimeError

    manager.get_internal_state = fail
    assert "no answer from the server" in text_of(serve(manager))


def test_the_page_is_served_and_asks_for_what_exists(serve):
    import requests

    url = serve(Manager("host"))
    response = requests.get(url, timeout=10)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert response.text == status.PAGE.read_text()
