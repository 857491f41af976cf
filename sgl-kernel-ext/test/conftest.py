"""Registers the ``cuda`` marker: such tests are deselected where torch sees no CUDA device."""

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a CUDA device; run with `pytest -m cuda`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    needs_cuda = [item for item in items if item.get_closest_marker("cuda")]
    if needs_cuda:
        config.hook.pytest_deselected(items=needs_cuda)
        items[:] = [item for item in items if item not in needs_cuda]
