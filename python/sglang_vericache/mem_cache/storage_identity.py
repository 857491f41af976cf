"""What two servers must have in common before one may read the KV of the other.

KV depends on weights, on the code and the kernels that computed it, and on how it is laid out. The
promise is bit-exact output, so anything that may change a bit counts. Tokens, cache salt and
adapter are in SGLang's own keys.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import sgl_kernel_ext
import sglang_vericache

logger = logging.getLogger(__name__)
DIGEST_BYTES = 8
# Taken from the middle of every tensor: training changes nearly all elements of what it changes.
SAMPLE_BYTES = 4096
# Samples of a weight file whose format is not known.
BLOCKS = 256
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Files that are no weights and do not shape KV.
IGNORED = (
    *("tokenizer", "generation_config", "chat_template", "special_tokens", "vocab", "merges"),
    "vericache_calibration",
)
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


def weights_digest(model_path: str, revision: str | None = None) -> str:
    """Digest of a checkpoint: its configuration, every tensor's name and shape and a sample of it.

    Reads some KiB a tensor, so a checkpoint of any size takes well under a second. Moving or
    touching files changes nothing.

    Args:
        model_path: directory, or name of a model in the local cache of the Hugging Face hub.

    Returns:
        A random one, which shares nothing, if there are no files to look at.
    """
    files = _files(model_path, revision)
    if not files:
        logger.warning("%s is no local checkpoint: stored KV is not shared", model_path)
        return secrets.token_hex(DIGEST_BYTES)
    return _digest(files)


def tensors_digest(model_path: str, revision: str | None = None) -> str | None:
    """As ``weights_digest``, of the weight files alone; None if there are none."""
    files = [path for path in _files(model_path, revision) if path.suffix in WEIGHTS]
    return _digest(files) if files else None


def _digest(files: list[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.name}:{path.stat().st_size}\n".encode())
        for piece in _pieces(path):
            found.update(piece)
    return found.hexdigest()


def checkpoint_folder(model_path: str, revision: str | None = None) -> Path | None:
    """Where a checkpoint lies on this machine; None if it does not."""
    root = Path(model_path)
    if not root.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )

        try:
            root = Path(snapshot_download(model_path, revision=revision, local_files_only=True))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
            return None
    return root


def _files(model_path: str, revision: str | None) -> list[Path]:
    root = checkpoint_folder(model_path, revision)
    if root is None:
        return []
    wanted = (*WEIGHTS, ".json", ".py")
    files = (path for path in sorted(root.iterdir()) if path.suffix in wanted)
    return [path for path in files if not path.name.startswith(IGNORED)]


def _pieces(path: Path) -> Iterator[bytes]:
    if path.suffix not in WEIGHTS:
        yield path.read_bytes()
        return
    size = path.stat().st_size
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", file.read(8))
            header = file.read(length)
            yield header
            spans = [
                entry["data_offsets"]
                for name, entry in json.loads(header).items()
                if name != "__metadata__"
            ]
            starts = [8 + length + (begin + end) // 2 for begin, end in spans]
        else:
            starts = [size * i // BLOCKS for i in range(BLOCKS)]
        for start in sorted(starts):
            file.seek(start)
            yield file.read(SAMPLE_BYTES)
