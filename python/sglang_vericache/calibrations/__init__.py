"""Calibration files: what ``vericache calibrate`` found out about a checkpoint, by its weights.

Those of this package lie in this folder. A file names the tensors it was made from, so it is never
taken for another model, nor for the same one after a fine-tuning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_vericache.compressors import Calibration
from sglang_vericache.checkpoint import checkpoint_folder, tensors_digest

logger = logging.getLogger(__name__)
VERSION = 1
FOLDER = Path(__file__).parent
NAME = "vericache_calibration.json"
FLAG = "--vericache-calibration"


@dataclass(frozen=True)
class CalibrationFile:
    """Content of a file.

    Attributes:
        model: name of the checkpoint's folder; for people.
        tensors: digest of its weights (``checkpoint.tensors_digest``).
        command: that made the file.
        runs: needle runs: ``asked``, ``answered`` correctly, ``context`` in tokens at most.
        calibration: what was found.
    """

    model: str
    tensors: str
    command: str
    runs: Mapping[str, int]
    calibration: Calibration

    def save(self, path: Path) -> None:
        """Write the file, as JSON with a layer's heads on a line."""
        found = asdict(self.calibration)
        lines = {
            "version": VERSION,
            **{key: getattr(self, key) for key in ("model", "tensors", "command", "runs")},
        }
        text = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in lines.items()]
        heads = ",\n".join(f"    {json.dumps(layer)}" for layer in found["heads"])
        text += [f'  "heads": [\n{heads}\n  ]', f'  "weights": {json.dumps(found["weights"])}']
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text("{\n" + ",\n".join(text) + "\n}\n")
        partial.replace(path)


def load(path: Path) -> CalibrationFile:
    """Read a file.

    Raises:
        ValueError: it is none, or of another version; names the file.
    """
    try:
        found = json.loads(path.read_text())
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']}, supported: {VERSION}")
        calibration = Calibration(tuple(map(tuple, found["heads"])), tuple(found["weights"]))
        others = {key: found[key] for key in ("model", "tensors", "command", "runs")}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no calibration file: {error}") from error
    return CalibrationFile(**others, calibration=calibration)


def find(
    model_path: str, revision: str | None = None, file: str | None = None
) -> Calibration | None:
    """What is known about a checkpoint.

    Args:
        model_path: directory, or name of a model in the local cache of the Hugging Face hub.
        revision: of such a model.
        file: to take instead of looking for one.

    Returns:
        From ``file``, else from a file beside the weights, else from this package; None if none of
        those is of these weights.

    Raises:
        ValueError: ``file`` is no calibration file, or one of another model.
    """
    digest = tensors_digest(model_path, revision)
    if file is not None:
        found = load(Path(file))
        if digest is None:
            raise ValueError(f"{FLAG}: the checkpoint {model_path} is not on this machine yet")
        if found.tensors != digest:
            raise ValueError(f"{FLAG}: {file} is of {found.model}, whose weights are others")
        return found.calibration
    if digest is None:
        return None
    folder = checkpoint_folder(model_path, revision)
    beside = [folder / NAME] if folder is not None and (folder / NAME).exists() else []
    for path in (*beside, *sorted(FOLDER.glob("*.json"))):
        try:
            found = load(path)
        except ValueError as error:  # most servers need none
            logger.warning("%s: unused", error)
            continue
        if found.tensors == digest:
            return found.calibration
        if path in beside:
            logger.warning("%s was made from other weights than those beside it: unused", path)
    return None


def of_server(server_args: Any, file: str | None) -> Calibration | None:
    """What is known about the model of SGLang's ``ServerArgs``.

    Raises:
        ValueError: as ``find``, or ``file`` is given to a rank with a part of the heads.
    """
    if (server_args.tp_size or 1) > 1:
        if file is not None:
            raise ValueError(f"{FLAG} cannot be combined with --tp-size above 1")
        return None
    return find(server_args.model_path, server_args.revision, file)
