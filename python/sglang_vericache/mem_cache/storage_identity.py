"""What two servers must have in common before one may read the KV of the other.

KV depends on weights, on the code and the kernels that computed it, and on how it is laid out. The
promise is bit-exact output, so anything that may change a bit counts. Tokens, cache salt and
adapter are in SGLang's own keys.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

import sgl_kernel_ext
import sglang_vericache
from sglang_vericache.checkpoint import DIGEST_BYTES, weights_digest

FIELDS = (
    *("dtype", "quantization", "kv_cache_dtype", "load_format", "json_model_override_args"),
    *("model_impl", "device", "attention_backend", "tp_size", "pp_size"),
)


def digest(server_args: Any, storage_config: Any, pool: Any) -> str:
    """Hexadecimal digest of a rank's KV.

    Args:
        server_args: SGLang's ``ServerArgs``.
        storage_config: SGLang's ``HiCacheStorageConfig``, for the rank.
        pool: host pool whose pages are stored.
    """
    page = pool.get_data_page(0, flat=False)
    parts = {
        "weights": weights_digest(server_args.model_path, server_args.revision),
        "settings": [str(getattr(server_args, name)) for name in FIELDS],
        "ranks": [
            getattr(storage_config, name)
            for name in ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")
        ],
        "pages": [str(pool.dtype), pool.layout, pool.page_size, list(page.shape)],
        "code": code(),
    }
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[: 2 * DIGEST_BYTES]


def code() -> list[str]:
    """Versions and kernels that compute KV here."""
    import sglang

    kernels = sgl_kernel_ext.active()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return [
        *(sglang.__version__, sglang_vericache.__version__, torch.__version__, device),
        *(str(kernels[name]) for name in ("cpu_backend", "isa", "cuda_backend")),
    ]
