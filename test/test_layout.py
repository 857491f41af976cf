"""Imports of the package point down the table of docs/architecture.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import sglang_vericache

PACKAGE = Path(sglang_vericache.__file__).parent
DOC = Path(__file__).parents[1] / "docs" / "architecture.md"
NAME = "sglang_vericache"


def layers() -> dict[str, int]:
    """Layer of every module or folder of the package, as the table says."""
    rows = re.findall(r"^\| (\d) \| (.+?) \|", DOC.read_text(), re.MULTILINE)
    return {
        name.rstrip("/"): int(layer) for layer, names in rows for name in re.findall("`(.+?)`", names)
    }


def imports(source: str) -> Iterator[str]:
    """Modules and folders of the package that a source names, lazily imported ones too."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.split(".")[1] for name in names if name.startswith(f"{NAME}."))


def upward(sources: dict[str, str], layer: dict[str, int]) -> list[str]:
    """What is imported from a higher layer than that of the importing module."""
    return sorted(
        f"{module} imports {target}"
        for module, source in sources.items()
        for target in set(imports(source))
        if target in layer and layer[target] < layer[module.split("/")[0]]
    )


def sources() -> dict[str, str]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).with_suffix("").as_posix()
        if name != "__init__":
            found[name] = path.read_text()
    return found


def test_every_module_has_a_layer():
    tops = {name.split("/")[0] for name in sources()}
    assert len(tops) > 10
    assert tops == set(layers())


def test_imports_point_down():
    found = sources()
    assert upward(found, layers()) == []
    found["core"] += "\nfrom sglang_vericache.config import VeriCacheConfig\n"
    assert upward(found, layers()) == ["core imports config"]
