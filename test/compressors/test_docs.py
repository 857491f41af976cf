"""Follows docs/compressors.md literally: its code blocks, in order, make a working method."""

import re
import textwrap
from pathlib import Path

import pytest
import torch

from sglang_vericache import compressors
from sglang_vericache.compressors import Settings, registry

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "compressors.md").read_text()
STEPS = PAGE.split("## Add one in six steps")[1]


def code_blocks(markdown: str) -> list[str]:
    blocks = re.findall(r"^ *```python\n(.*?)^ *```$", markdown, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]


@pytest.fixture
def documented(monkeypatch):
    """Run the page's code in an empty namespace; forget what it registers afterwards."""
    others = {name: cls for name, cls in registry._CLASSES.items() if name != "smallest-norm"}
    monkeypatch.setattr(registry, "_CLASSES", others)
    namespace: dict[str, object] = {"__name__": "smallest_norm"}
    for block in code_blocks(STEPS):
        exec(compile(block, "docs/compressors.md", "exec"), namespace)
    namespace["register_method"]()
    return namespace


def test_there_are_six_steps():
    assert re.findall(r"^(\d)\. ", STEPS, re.MULTILINE) == list("123456")
    assert len(code_blocks(STEPS)) == 2


def test_the_example_becomes_selectable_and_compresses(documented, context):
    assert "smallest-norm" in compressors.names()
    settings = Settings(ratio=0.25, min_tokens=0, window=8)
    dropper = compressors.create("smallest-norm", settings)
    assert dropper.window == 8, "fields are set from Settings"
    ctx = context(400)
    view = compressors.compress(dropper, [ctx, ctx], settings.budget)
    view.check_integrity()
    assert view.kept == (100, 100) and not view.is_full
    kept = set(view.layers[0][0].tolist())
    assert {*range(4), *range(392, 400)} <= kept
    norms = ctx.keys().norm(dim=-1).amax(dim=1)
    free = torch.tensor(sorted(kept - {*range(4), *range(392, 400)}))
    dropped = torch.tensor(sorted(set(range(400)) - kept))
    assert norms[free].max() <= norms[dropped].min()


def test_without_the_steps_it_is_unknown():
    with pytest.raises(ValueError, match="unknown compressor 'smallest-norm'"):
        compressors.create("smallest-norm", Settings())


def test_the_page_lists_every_method():
    listed = re.findall(r"^\| `([a-z0-9-]+)` \| ", PAGE, re.MULTILINE)
    assert sorted(set(listed) & set(compressors.names())) == compressors.names()


def test_method_files_keep_to_sixty_lines():
    folder = REPOSITORY / "python" / "sglang_vericache" / "compressors"
    shared = {"__init__.py", "base.py", "rotary.py", "select.py", "settings.py", "registry.py"}
    shared |= {"composition.py", "kvpress.py"}  # of many methods
    lengths = {
        path.name: len(path.read_text().splitlines())
        for path in folder.glob("*.py")
        if path.name not in shared
    }
    assert len(lengths) >= 5
    assert max(lengths.values()) <= 60, lengths
