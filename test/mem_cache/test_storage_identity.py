"""Who may read whose KV (cases H10 and, for salts, H11)."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from mem_cache.storing import PAGE, Pool
from sglang_vericache.config import VeriCacheConfig, attach
from sglang_vericache.mem_cache import storage_identity
from sglang_vericache.platform import bootstrap

bootstrap.install()

from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

from sglang_vericache.mem_cache import storage_hooks  # noqa: E402

SETTINGS = dict.fromkeys(storage_identity.FIELDS, "auto")
RANKS = dict(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1)


@pytest.fixture
def checkpoint(tmp_path):
    root = tmp_path / "model"
    root.mkdir()
    save_file({f"layer.{i}": torch.randn(64, 64) for i in range(3)}, root / "model.safetensors")
    (root / "config.json").write_text(json.dumps({"rope_theta": 1e4}))
    (root / "tokenizer.json").write_text("{}")
    torch.save(torch.randn(99), root / "extra.bin")
    return root


def digest(checkpoint, pool=None, ranks=None, **settings):
    server_args = SimpleNamespace(model_path=str(checkpoint), revision=None, **SETTINGS | settings)
    config = SimpleNamespace(**RANKS | (ranks or {}))
    return storage_identity.digest(server_args, config, pool or Pool())


def test_copies_of_a_checkpoint_share(checkpoint, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(checkpoint, copy, copy_function=shutil.copyfile)
    assert digest(copy) == digest(checkpoint)
    (copy / "tokenizer.json").write_text("{ }")
    (copy / "README.md").write_text("new")
    assert digest(copy) == digest(checkpoint)


def one_layer(root):
    """Trained on: every element of one tensor is a little different."""
    tensors = load_file(root / "model.safetensors")
    tensors["layer.1"] *= 1.001
    save_file(tensors, root / "model.safetensors")


def renamed(root):
    tensors = load_file(root / "model.safetensors")
    tensors["layer.9"] = tensors.pop("layer.1")
    save_file(tensors, root / "model.safetensors")


def other_format(root):
    torch.save(torch.randn(99), root / "extra.bin")


def config(root):
    (root / "config.json").write_text(json.dumps({"rope_theta": 1e5}))


@pytest.mark.parametrize("change", [one_layer, renamed, other_format, config])
def test_other_weights_do_not(change, checkpoint):
    before = digest(checkpoint)
    change(checkpoint)
    assert digest(checkpoint) != before


def test_nothing_else_that_shapes_kv_is_shared(checkpoint, monkeypatch):
    other_dtype, other_page, other_layout = Pool(), Pool(), Pool()
    other_dtype.dtype = torch.float16
    other_page.page_size = 2 * PAGE
    other_layout.layout = "page_first"
    found = [
        digest(checkpoint),
        *(digest(checkpoint, pool) for pool in (other_dtype, other_page, other_layout)),
        *(digest(checkpoint, **{name: "other"}) for name in SETTINGS),
        digest(checkpoint, ranks={"tp_rank": 1}),
        digest(checkpoint, ranks={"tp_size": 2}),
    ]
    kernels = {"cpu_backend": "cpp", "isa": "avx2", "cuda_backend": "none"}
    monkeypatch.setattr("sgl_kernel_ext.active", lambda: kernels)
    found.append(digest(checkpoint))
    assert len(set(found)) == len(found)


def test_no_local_files_share_nothing():
    assert digest("no/such-model-anywhere") != digest("no/such-model-anywhere")


def test_salt_and_adapter_are_in_the_keys_of_pages():
    """SGLang's part: an adapter's id is appended to ``extra_key``."""
    tokens = list(range(2 * PAGE))

    def keys(**names):
        return tuple(get_storage_hash_str(RadixKey(tokens, **names), None, page_size=PAGE))

    spaces = [keys(), keys(cache_salt="a"), keys(cache_salt="b"), keys(extra_key="a")]
    assert keys(cache_salt="a") == keys(cache_salt="a")
    assert all(len(space) == 2 for space in spaces)
    assert len({key for space in spaces for key in space}) == 2 * len(spaces)


@pytest.fixture
def server_args(monkeypatch):
    record = SimpleNamespace()
    monkeypatch.setattr(storage_hooks, "get_server_args", lambda: record)
    return record


def test_a_stock_server_has_its_own_backend(server_args):
    made = storage_hooks.create(lambda *args: args, object, "nixl", "config", "pool")
    assert made == (object, "nixl", "config", "pool")


def test_a_backend_that_was_not_tried_is_refused(server_args):
    attach(server_args, VeriCacheConfig())
    with pytest.raises(ValueError, match=r"--hicache-storage-backend nixl: .* file, mooncake"):
        storage_hooks.create(lambda *args: args, object, "nixl", "config", "pool")
