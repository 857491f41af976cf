"""Runs tests of one server together; see ``harness.py``."""

import functools
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from prompts import Corpus, load_tokenizer
from server.comparing import PLAIN, Reference
from server.harness import ServerSpec
from server.pool import ServerPool
from server.specs import OFF, STORE_DIRECTORY
from sglang_vericache.embedded_model import ensure_embedded_model

HERE = Path(__file__).parent
# Modules that take too long for every run: `make test` leaves them out, `make test-all` runs them.
LONG = {
    *("test_kits.py", "test_kv_slots.py", "test_limits.py"),
    *("test_prompts.py", "test_stock.py", "test_views.py"),
}


def pytest_configure(config):
    config.addinivalue_line("markers", "server(spec): the ServerSpec that fixture `server` runs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    places = [i for i, item in enumerate(items) if HERE in item.path.parents]
    ours = [items[i] for i in places]
    order: dict[ServerSpec | None, int] = {}
    for item in ours:
        item.add_marker(pytest.mark.slow)
        if item.path.name in LONG:
            item.add_marker(pytest.mark.long)
        order.setdefault(_spec(item), len(order))
    # One dtype after the other, so that each has its reference started once.
    ours.sort(key=lambda item: (_is_float32(_spec(item)), order[_spec(item)]))
    for place, item in zip(places, ours, strict=True):
        items[place] = item


def _is_float32(spec):
    return spec is not None and "float32" in spec.flags


def _spec(item):
    mark = item.get_closest_marker("server")
    return mark.args[0] if mark else None


@pytest.fixture(scope="session")
def pool(request):
    """The session's server processes; they end with it, SIGTERM included."""
    pool = ServerPool(_references(request.session.items))
    previous = signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated", 1))
    yield pool
    pool.close()
    shutil.rmtree(STORE_DIRECTORY, ignore_errors=True)
    signal.signal(signal.SIGTERM, previous)


def _references(items):
    """The reference of every server of ``items``, in their order."""
    specs = filter(None, map(_spec, items))
    return {spec: OFF["float32" if _is_float32(spec) else "bfloat16"] for spec in specs}


@pytest.fixture
def server(request, pool):
    """The server of the test's mark; idle and without a leaked slot before and after."""
    server = pool.get(_spec(request.node))
    yield server
    server.check_idle()


@pytest.fixture(scope="session")
def off(pool):
    """Answers by dtype of servers with VeriCache off, as in ``off["bfloat16"].answers(asks)``."""
    return {dtype: Reference(pool, spec) for dtype, spec in OFF.items()}


@pytest.fixture(scope="session")
def _plain_answers(pool):
    return functools.cache(lambda spec: Reference(pool, spec, PLAIN))


@pytest.fixture
def without_drafts(request, _plain_answers):
    """Answers of the test's own server to requests that ask for plain decoding."""
    return _plain_answers(_spec(request.node))


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory):
    """A checkpoint that differs from the embedded model's in one tensor; its folder."""
    folder = tmp_path_factory.mktemp("other-weights")
    for file in ensure_embedded_model().iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            weights = load_file(file)
            weights["model.layers.3.mlp.down_proj.weight"] *= 0.5
            save_file(weights, folder / file.name, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    """The embedded model's tokenizer."""
    return load_tokenizer(ensure_embedded_model())


@pytest.fixture(scope="session")
def make_corpus(tokenizer):
    """A fresh source of real prompts of exact token lengths, the same ones every time."""
    return lambda: Corpus(tokenizer)
