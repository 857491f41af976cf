"""The Triton kernels compile for GPUs, which needs none: shared memory, and no contraction.

Both ways to merge softmax states must round alike; a multiply-add fused in one of them only would
break that, so the code of the attention kernels must have none outside of tensor-core products.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sgl_kernel_ext.packed import CHANNEL2, PLAIN, ROTATED4, UNIFORM4, UNIFORM8
from sgl_kernel_ext.triton import attention, key_scores, packed, tiles
from sgl_kernel_ext.triton.packed import layout_of

pytestmark = pytest.mark.slow

KERNELS = {
    "split": (attention._attend_kernel, {"IN_ORDER": False}),
    "in_order": (attention._attend_kernel, {"IN_ORDER": True}),
    "merge": (attention._merge_kernel, {"BLOCK_D": attention._MERGE_COLUMNS}),
    "split_lse": (key_scores._split_lse_kernel, {}),
    "sum_rows": (key_scores._sum_rows_kernel, {}),
    "pack_uniform": (packed._pack_uniform, {"LAYOUT": layout_of(UNIFORM4, 128)}),
    "pack_rotated": (packed._pack_rotated, {"LAYOUT": layout_of(ROTATED4, 128)}),
    "pack_channels": (packed._pack_channels, {"LAYOUT": layout_of(CHANNEL2, 128)}),
}
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
# Shared memory of a block on the least of the GPUs from sm_80 on (sm_86, sm_89, sm_120).
SHARED_BYTES = 99 << 10


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_kernel(name: str, capability: int, dtype: torch.dtype, head_dim: int, **options):
    """The kernel as launched for 4 query heads a KV head, 8 views a group in a plain or a packed
    pool and no lse."""
    kernel, sizes = KERNELS[name]
    constants = {
        "D": head_dim,
        "GQA": 4,
        "VIEW_HEADS": 8,
        "CAUSAL": True,
        "LAYOUTS": tuple(
            tuple(layout_of(codec, head_dim) for codec in pair)
            for pair in ((PLAIN, PLAIN), (UNIFORM8, UNIFORM4), (ROTATED4, CHANNEL2))
        ),
        "SPLIT": tiles.SPLIT,
        "BLOCK_M": tiles.BLOCK_M,
        "BLOCK_N": tiles.block_n(head_dim, dtype),
        "BLOCK_D": tiles.block_d(head_dim),
        **({"lse": None} if name in ("split", "in_order", "merge") else {}),
        **sizes,
    }
    pool, coded = ("*" + TYPES[dtype], "i32", "i32") * 2, ("*u8", "i32", "i32") * 2
    types = dict.fromkeys(kernel.arg_names, "i32") | {
        "pool": pool,
        "view_pools": (pool, coded, coded),
    }
    types |= dict.fromkeys(["q", "k_pool", "v_pool"], "*" + TYPES[dtype])
    types["out"] = "*fp32" if name == "sum_rows" else "*" + TYPES[dtype]
    types |= dict.fromkeys(
        ["q_indptr", "req_to_token", "view_indices", "view_len", "view_pool", "slots"], "*i32"
    )
    types |= dict.fromkeys(["req_row", "view_start", "tail_start", "tail_end"], "*i64")
    types |= dict.fromkeys(["state_top", "state_total", "state_acc", "lse", "split_lse"], "*fp32")
    types["scale_log2"] = "fp32"
    if name.startswith("pack"):
        types |= {"x": "*" + TYPES[dtype], "pool": "*u8"}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        kernel,
        {arg: types[arg] for arg in kernel.arg_names},
        {arg: x for arg, x in constants.items() if arg in kernel.arg_names},
        {
            path: [["tt.divisibility", 16]]
            for path, kind in leaves({i: types[arg] for i, arg in enumerate(kernel.arg_names)})
            if kind.startswith("*")
        },
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={**tiles.LAUNCH, **options})


def leaves(types: dict[int, Any], path: tuple[int, ...] = ()) -> Iterator[tuple[Any, str]]:
    """Places of arguments and of members of tuples, and their types."""
    for i, kind in types.items():
        if isinstance(kind, tuple):
            yield from leaves(dict(enumerate(kind)), (*path, i))
        else:
            yield (*path, i), kind


@pytest.mark.parametrize(
    "name, capability, dtype, head_dim",
    [(name, 80, torch.bfloat16, 128) for name in KERNELS]
    + [("split", 90, torch.bfloat16, 256), ("split", 90, torch.float32, 256)],
)
def test_compiles_and_fits(name, capability, dtype, head_dim):
    compiled = compile_kernel(name, capability, dtype, head_dim)
    assert "cubin" in compiled.asm
    assert compiled.metadata.shared <= SHARED_BYTES
    if dtype == torch.bfloat16 and name != "merge" and not name.startswith("pack"):
        assert "mma" in compiled.asm["ptx"], "products run on tensor cores"


FUSED = re.compile(r"fma\.\S*f32|(mul|add|sub)\.(ftz\.)?f32")


@pytest.mark.parametrize(
    "name", ["split", "in_order", "merge", "pack_uniform", "pack_rotated", "pack_channels"]
)
def test_no_contraction(name):
    assert not FUSED.search(compile_kernel(name, 90, torch.bfloat16, 128).asm["ptx"])


def test_contraction_is_found_where_allowed():
    compiled = compile_kernel("merge", 90, torch.bfloat16, 128, enable_fp_fusion=True)
    assert FUSED.search(compiled.asm["ptx"])
