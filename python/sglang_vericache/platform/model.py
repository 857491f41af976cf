"""Swaps a loaded model's layers for row-invariant ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_vericache.config import config_of
from sglang_vericache.hooks import Hook, assert_applied

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


# Marks a model whose layers read packed copies of the weights.
PACKED = "_vericache_packed"


def after_load(result: None, self: ModelRunner) -> None:
    """``ModelRunner.load_model`` after: install the kernels of this package.

    On CUDA the batch-invariant kernels of ``--enable-deterministic-inference`` do this job.
    """
    if config_of(self.server_args) is None:
        return
    assert_applied()
    refuse_unsupported(self)
    if self.device != "cpu":
        return
    from sglang_vericache.platform import layers, llama

    layers.install(self.model)
    setattr(self.model, PACKED, True)
    if llama.supports(self.model):
        llama.install(self.model, lambda: self.attn_backend)


def after_update(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Weights were updated in place, or rolled back: bring the packed copies along."""
    model = self.get_model()
    if getattr(model, PACKED, False):
        from sglang_vericache.platform import layers

        layers.refresh(model)


def refuse_unsupported(runner: ModelRunner) -> None:
    """Raise ``ValueError`` for models in which something other than attention mixes rows."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    reasons = {
        "multimodal input": runner.model_config.is_multimodal,
        "mixture of experts": any(isinstance(m, FusedMoE) for m in runner.model.modules()),
    }
    for reason, found in reasons.items():
        if found:
            raise ValueError(
                f"VeriCache does not support {reason} yet ({type(runner.model).__name__}); "
                "start without --vericache-* flags"
            )


_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_UPDATE_REASON = "layers are not told that their weights have changed"
_UPDATES = {
    "update_weights_from_disk": (
        *("self", "model_path", "load_format", "weight_name_filter", "recapture_cuda_graph"),
    ),
    "load_weights_from_distributed": ("self", "named_tensors"),
    "update_weights_from_tensor": ("self", "named_tensors", "load_format"),
    "update_weights_from_ipc": ("self", "recv_req"),
}

HOOKS: tuple[Any, ...] = (
    Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        ("self",),
        "after",
        after_load,
        "stock linear layers on a CPU depend on the number of rows",
    ),
    *(
        Hook(f"{_UPDATER}.{name}", parameters, "after", after_update, _UPDATE_REASON)
        for name, parameters in _UPDATES.items()
    ),
)
