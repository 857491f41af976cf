"""``vericache calibrate``: find what compresskv and +calibrated need to know about a model.

Runs the checkpoint offline, with transformers, on prompts that hide a fact in a long text. The
query heads that look at the fact while the answer is written are the retrieval heads; how much a
layer's output changes when its KV is compressed to a few tokens is its weight in the budget.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from sglang_vericache.calibrations import NAME, CalibrationFile


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="find the retrieval heads and layer budgets of a model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model-path", metavar="M", help="checkpoint (default: the embedded model)")
    add("--output", type=Path, metavar="FILE", help=f"default: {NAME} beside the weights")
    add("--samples", type=int, default=18, help="needle prompts (default: %(default)s)")
    add("--context", type=int, default=1024, help="longest, in tokens (default: %(default)s)")
    add("--heads", type=int, default=4, help="query heads of a layer (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print progress and write the file; 1 if nothing could be found out."""
    from sglang_vericache.cli.layer_errors import layer_weights
    from sglang_vericache.cli.needles import needles
    from sglang_vericache.cli.probe import Probe
    from sglang_vericache.cli.retrieval_heads import find_heads
    from sglang_vericache.compressors import Calibration
    from sglang_vericache.checkpoint import checkpoint_folder, tensors_digest

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        model = options.model_path or embedded()
        folder, digest = checkpoint_folder(model), tensors_digest(model)
        if folder is None or digest is None:
            raise ValueError(f"--model-path: {model} is no checkpoint on this machine")
        path = options.output or folder / NAME
        if not os.access(path.parent, os.W_OK):
            raise ValueError(f"--output: {path.parent} cannot be written to")
        probe = Probe(str(folder))
        prompts = list(needles(probe.tokenizer, options.samples, options.context, options.seed))
        found = find_heads(probe, prompts, options.heads, say)
        weights = layer_weights(probe, found.answered, found.heads, say)
    except (OSError, ValueError) as error:
        say(f"error: {error}")
        return 1
    content = CalibrationFile(
        model=Path(model).name,
        tensors=digest,
        command=command(options),
        runs={
            "asked": len(prompts),
            "answered": len(found.answered),
            "context": options.context,
        },
        calibration=Calibration(found.heads, weights),
    )
    content.save(path)
    print(path)
    return 0


def embedded() -> str:
    from sglang_vericache.embedded_model import ensure_embedded_model

    return str(ensure_embedded_model())


def command(options: argparse.Namespace) -> str:
    """What to type for the same result."""
    words = ["vericache", "calibrate"]
    if options.model_path:
        words += ["--model-path", options.model_path]
    for name in ("samples", "context", "heads", "seed"):
        words += [f"--{name}", str(getattr(options, name))]
    return shlex.join(words)
