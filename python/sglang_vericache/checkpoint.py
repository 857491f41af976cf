"""A checkpoint on this machine: where it lies, and digests that tell it from others."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)
DIGEST_BYTES = 8
# Taken from the middle of every tensor: training changes nearly all elements of what it changes.
SAMPLE_BYTES = 4096
# Samples of a weight file whose format is not known.
BLOCKS = 256
SAFETENSORS = ".safetensors"
WEIGHTS = (SAFETENSORS, ".bin", ".pt", ".pth", ".gguf")
# Files that are no weights and do not shape KV.
IGNORED = (
    *("tokenizer", "generation_config", "chat_template", "special_tokens", "vocab", "merges"),
    "vericache_calibration",
)


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
    """As ``weights_digest``, of the weights alone; None if there are none.

    Other formats beside safetensors do not count: they hold the same weights once more.
    """
    files = [path for path in _files(model_path, revision) if path.suffix in WEIGHTS]
    files = [path for path in files if path.suffix == SAFETENSORS] or files
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
        if path.suffix == SAFETENSORS:
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
