"""Random layers to score: no model, no engine."""

from collections.abc import Callable

import pytest
import torch

from sglang_vericache.compressors import LayerContext

MakeContext = Callable[..., LayerContext]


def make_context(
    length: int,
    rows: int = 32,
    layer: int = 0,
    num_layers: int = 2,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> LayerContext:
    """A layer of Gaussian K, V and queries; ``rows`` queries as far as the context has tokens."""
    generator = torch.Generator().manual_seed(1000 * layer + length)
    keys = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
    values = torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype)
    queries = torch.randn(min(rows, length), heads, head_dim, generator=generator).to(dtype)
    return LayerContext(
        layer=layer,
        num_layers=num_layers,
        length=length,
        num_kv_heads=kv_heads,
        queries=queries,
        gather_keys=lambda: keys,
        gather_values=lambda: values,
    )


@pytest.fixture
def context() -> MakeContext:
    return make_context


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
