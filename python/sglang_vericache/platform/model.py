"""Swaps a loaded model's layers for row-invariant ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_vericache.config import config_of
from sglang_vericache.hooks import Hook

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def after_load(result: None, self: ModelRunner) -> None:
    """``ModelRunner.load_model`` after: install the kernels of this package.

    On CUDA the batch-invariant kernels of ``--enable-deterministic-inference`` do this job.
    """
    if config_of(self.server_args) is None or self.device != "cpu":
        return
    from sglang_vericache.platform import layers, llama

    layers.install(self.model)
    if llama.supports(self.model):
        llama.install(self.model, lambda: self.attn_backend)


HOOKS: tuple[Any, ...] = (
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        ("self",),
        "after",
        after_load,
        "stock linear layers on a CPU depend on the number of rows",
    ),
)
