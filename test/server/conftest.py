"""Runs tests of one server together; see ``harness.py``."""

from pathlib import Path

import pytest

from prompts import Corpus, load_tokenizer
from server.comparing import Reference
from server.harness import ServerSpec
from server.pool import ServerPool
from sglang_vericache.embedded_model import ensure_embedded_model

HERE = Path(__file__).parent
OFF = ("--vericache", "off")


def pytest_configure(config):
    config.addinivalue_line("markers", "server(spec): the ServerSpec that fixture `server` runs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    places = [i for i, item in enumerate(items) if HERE in item.path.parents]
    ours = [items[i] for i in places]
    order: dict[ServerSpec | None, int] = {}
    for item in ours:
        item.add_marker(pytest.mark.slow)
        order.setdefault(_spec(item), len(order))
    ours.sort(key=lambda item: order[_spec(item)])
    for place, item in zip(places, ours, strict=True):
        items[place] = item


def _spec(item):
    mark = item.get_closest_marker("server")
    return mark.args[0] if mark else None


@pytest.fixture(scope="session")
def pool():
    """The session's server processes."""
    pool = ServerPool()
    yield pool
    pool.close()


@pytest.fixture
def server(request, pool):
    """The server of the test's mark; idle and without a leaked slot before and after."""
    server = pool.get(_spec(request.node))
    yield server
    server.check_idle()


@pytest.fixture(scope="session")
def references(pool):
    """Plain answers by dtype: ``references["bfloat16"]``, of servers with VeriCache off."""
    return {
        "bfloat16": Reference(pool, ServerSpec(OFF)),
        "float32": Reference(pool, ServerSpec((*OFF, "--dtype", "float32"))),
    }


@pytest.fixture(scope="session")
def tokenizer():
    """The embedded model's tokenizer."""
    return load_tokenizer(ensure_embedded_model())


@pytest.fixture(scope="session")
def make_corpus(tokenizer):
    """A fresh source of real prompts of exact token lengths, the same ones every time."""
    return lambda: Corpus(tokenizer)
