"""ragged_attention: its arguments, their checks, and which implementation runs."""

import subprocess
import sys

import pytest
import torch
from batches import BUILT
from torch import Tensor

from sgl_kernel_ext import ViewPool, _loader, attention
from sgl_kernel_ext.reference import attention as reference


@pytest.fixture(params=BUILT)
def op(request, monkeypatch):
    module = _loader.load_isa(request.param)
    monkeypatch.setattr(attention, "cpu_module", lambda: module)
    return attention.ragged_attention


def arguments() -> dict[str, Tensor | float]:
    """A draft of 1 row with a view and a verify of 4 rows, over a pool of 100 slots."""
    q, k_pool, v_pool = torch.randn(3, 100, 6, 64).bfloat16()
    return dict(
        q=q[:5],
        k_pool=k_pool[:, :3],
        v_pool=v_pool[:, :3],
        req_to_token=torch.randperm(100).int().view(2, 50),
        q_indptr=torch.tensor([0, 1, 5], dtype=torch.int32),
        req_row=torch.tensor([1, 0]),
        tail_start=torch.tensor([10, 0]),
        tail_end=torch.tensor([20, 30]),
        scale=0.125,
        view_indices=torch.arange(0, 100, 3, dtype=torch.int32),
        view_start=torch.tensor([[4], [0]]),
        view_len=torch.tensor([[20], [0]], dtype=torch.int32),
    )


def with_pools() -> dict:
    """``arguments`` with the first group's view in the second of two pools, of 40 and 120 slots."""
    args = arguments()
    k, v = torch.randn(2, 160, 3, 64).bfloat16()
    args["view_pools"] = [ViewPool(k[:40], v[:40]), ViewPool(k[40:], v[40:])]
    args["view_pool"] = torch.tensor([2, 0], dtype=torch.int32)
    return args


def test_every_integer_type_of_metadata(op):
    batch = arguments()
    other = {name: batch[name].int() for name in ("req_row", "tail_start", "tail_end")}
    other["q_indptr"] = batch["q_indptr"].long()
    assert torch.equal(op(**batch | other), op(**batch))


BAD_ARGUMENTS = [
    ("q", lambda a: a["q"].double(), TypeError),
    ("q", lambda a: a["q"][0], ValueError),
    ("q", lambda a: a["q"][..., :63], ValueError),
    ("q", lambda a: a["q"].mT.contiguous().mT, ValueError),
    ("k_pool", lambda a: a["k_pool"].float(), TypeError),
    ("k_pool", lambda a: a["k_pool"][:, :2], ValueError),
    ("k_pool", lambda a: a["k_pool"][..., :32], ValueError),
    ("v_pool", lambda a: a["v_pool"][:99], ValueError),
    ("req_to_token", lambda a: a["req_to_token"].long(), TypeError),
    ("req_to_token", lambda a: a["req_to_token"][:1], ValueError),
    ("q_indptr", lambda a: a["q_indptr"][:-1], ValueError),
    ("q_indptr", lambda a: a["q_indptr"] + 1, ValueError),
    ("req_row", lambda a: a["req_row"].float(), TypeError),
    ("req_row", lambda a: a["req_row"] - 100, ValueError),
    ("tail_start", lambda a: a["tail_start"] - 100, ValueError),
    ("tail_end", lambda a: a["tail_start"], ValueError),
    ("tail_end", lambda a: a["tail_end"] + 1000, ValueError),
    ("view_len", lambda a: None, ValueError),
    ("view_len", lambda a: a["view_len"].long(), TypeError),
    ("view_len", lambda a: a["view_len"] + 10_000, ValueError),
    ("view_start", lambda a: a["view_start"].expand(-1, 2).contiguous(), ValueError),
    ("view_pool", lambda a: a["view_pool"].long(), TypeError),
    ("view_pool", lambda a: a["view_pool"][:1], ValueError),
    ("view_pool", lambda a: a["view_pool"] + 1, ValueError),
    ("view_pool", lambda a: a["view_pool"] - 1, ValueError),
    (
        "view_pools",
        lambda a: [ViewPool(k.float(), v.float()) for k, v, *_ in a["view_pools"]],
        TypeError,
    ),
    (
        "view_pools",
        lambda a: [ViewPool(k[:, :2], v[:, :2]) for k, v, *_ in a["view_pools"]],
        ValueError,
    ),
    ("view_pools", lambda a: [ViewPool(k, v[:30]) for k, v, *_ in a["view_pools"]], ValueError),
    (
        "view_pools",
        lambda a: [ViewPool(k[..., :32], v[..., :32]) for k, v, *_ in a["view_pools"]],
        ValueError,
    ),
    ("view_pools", lambda a: [ViewPool(k[0], v[0]) for k, v, *_ in a["view_pools"]], ValueError),
    ("out", lambda a: torch.empty_like(a["q"][:-1]), ValueError),
    ("lse", lambda a: torch.empty(a["q"].shape[:2], dtype=torch.float64), TypeError),
]


@pytest.mark.parametrize(
    ("name", "bad", "error"),
    BAD_ARGUMENTS,
    ids=[f"{n}-{i}" for i, (n, *_) in enumerate(BAD_ARGUMENTS)],
)
def test_bad_arguments_are_named(op, name, bad, error):
    batch = with_pools()
    with pytest.raises(error, match=name):
        op(**batch | {name: bad(batch)})


def test_slots_outside_the_pool(op):
    batch = arguments()
    for bad in (-1, batch["k_pool"].shape[0]):
        table = batch["req_to_token"].clone()
        table[0, 7] = bad
        with pytest.raises(IndexError, match="req_to_token"):
            op(**batch | {"req_to_token": table})


@pytest.mark.parametrize("bad", [-1, 120, 2**30])
def test_slots_outside_another_pool(op, bad):
    args = with_pools()
    op(**args)
    args["view_indices"][4] = 119
    op(**args)
    args["view_indices"][4] = bad
    with pytest.raises(IndexError, match=r"view_pools\[1\] of 120 slots"):
        op(**args)


def test_bounds_are_those_of_the_pool_that_is_read(op):
    args = with_pools()
    args["view_indices"][4] = 110
    args["view_pool"][0] = 0
    with pytest.raises(IndexError, match="pool of 100 slots"):
        op(**args)
    args["view_indices"][4] = 41
    op(**args)
    args["view_pool"][0] = 1
    with pytest.raises(IndexError, match=r"view_pools\[0\] of 40 slots"):
        op(**args)
    args["view_pool"][0] = 2
    args["req_to_token"][1, 12] = 110
    with pytest.raises(IndexError, match="req_to_token"):
        op(**args)


def test_forced_reference(monkeypatch):
    monkeypatch.setenv("SGL_KERNEL_EXT_FORCE", "reference")
    _loader.cpu_module.cache_clear()
    try:
        batch = arguments()
        got = attention.ragged_attention(**batch)
    finally:
        _loader.cpu_module.cache_clear()
    assert torch.equal(got, reference.ragged_attention(**batch))


def test_one_openmp_runtime_in_the_process():
    program = (
        "import torch, sgl_kernel_ext as ops\n"
        "assert ops.active()['cpu_backend'] == 'cpp'\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "print(len({path for path in maps if 'gomp' in path or 'iomp' in path}))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout.strip() == "1", out.stdout + out.stderr
