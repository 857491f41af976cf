"""VERICACHE as a speculative algorithm of SGLang: predicates, server arguments, KV reserve."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_vericache.config import VeriCacheConfig, config_of
from sglang_vericache.hooks import Hook

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch

NAME = "VERICACHE"


class VeriCacheAlgorithm(CustomSpecAlgo):
    """The scheduler dispatches on these; only what differs from the base class is here."""

    def has_draft_kv(self) -> bool:
        return False  # drafts use the target's own slots

    def carries_draft_hidden_states(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def create_worker(self, server_args: Any) -> type:
        from sglang.srt.arg_groups.overrides import resolving_view

        if not resolving_view(server_args).disable_overlap_schedule:
            raise ValueError("VeriCache needs --disable-overlap-schedule")
        return self.factory(server_args)


def register_algorithm(check: Callable[[], None]) -> None:
    """Register VERICACHE; ``check`` runs in the scheduler before its worker is made."""

    @SpeculativeAlgorithm.register(NAME, spec_class=VeriCacheAlgorithm)
    def worker_class(server_args: Any) -> type:
        check()
        from sglang_vericache.speculative.worker import VeriCacheWorker

        return VeriCacheWorker


def server_arguments(config: VeriCacheConfig) -> dict[str, Any]:
    """SGLang fields that a draft length of up to ``k`` needs: ``k + 1`` KV slots a request."""
    slots = config.reserved_draft_len + 1
    return {
        "speculative_algorithm": NAME,
        "speculative_num_draft_tokens": slots,
        "speculative_num_steps": slots,
        "speculative_eagle_topk": 1,
    }


def reserve_per_decode(original: Any) -> int:
    """``get_alloc_reserve_per_decode`` around: without overlap scheduling, no double buffer."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_len_per_decode
    from sglang.srt.runtime_context import get_spec

    if get_spec().speculative_algorithm == NAME:
        return get_alloc_len_per_decode()
    return original()


def prepare_for_decode(original: Any, batch: ScheduleBatch) -> None:
    """``spec_prepare_for_decode`` around: allocate slots for drafts, leave penalties alone.

    The stock function counts one token per step into the penalties; settling counts committed
    tokens itself.
    """
    if batch.spec_algorithm.is_none() or batch.spec_algorithm.name != NAME:
        original(batch)
        return
    from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
    from sglang.srt.mem_cache.allocation_sizing import (
        get_alloc_reserve_per_decode,
        page_aligned_decode_alloc_lens,
    )

    current, needed, missing = page_aligned_decode_alloc_lens(
        batch.reqs,
        reserve=get_alloc_reserve_per_decode(),
        page_size=batch.token_to_kv_pool_allocator.page_size,
    )
    for req in batch.reqs:
        req.decode_batch_idx += 1
    if missing == 0:
        return
    current_cpu = torch.tensor(current, dtype=torch.int32)
    needed_cpu = torch.tensor(needed, dtype=torch.int32)
    alloc_for_spec_decode(
        batch.tree_cache,
        batch.req_to_token_pool,
        reqs=batch.reqs,
        req_pool_indices=batch.req_pool_indices,
        cur_kv_lens=current_cpu.to(batch.device, non_blocking=True),
        cur_kv_lens_cpu=current_cpu,
        nxt_kv_lens=needed_cpu.to(batch.device, non_blocking=True),
        nxt_kv_lens_cpu=needed_cpu,
        num_needed_tokens=missing,
        batch=batch,
    )


def refuse_unsupported(server_args: Any) -> None:
    """Raise ``ValueError`` naming the flag for combinations that are not tested yet."""
    from sglang.srt.environ import envs

    config = config_of(server_args)
    if config is None:
        return
    wrong = {
        "--enable-lora": server_args.enable_lora or server_args.lora_paths,
        "--pp-size above 1": (server_args.pp_size or 1) > 1,
        "--disaggregation-mode": server_args.disaggregation_mode not in (None, "null"),
        "--enable-mixed-chunk": server_args.enable_mixed_chunk,
        "--dllm-algorithm": server_args.dllm_algorithm,
        # Tokenizer workers load no plugins, so they would not check requests.
        "--tokenizer-worker-num above 1": (server_args.tokenizer_worker_num or 1) > 1,
        "SGLANG_RUST_SERVER": envs.SGLANG_RUST_SERVER.get(),
        "--smg-grpc-mode": server_args.smg_grpc_mode or server_args.grpc_mode,
        "--enable-dp-attention, --attn-dp-size above 1": server_args.enable_dp_attention
        or server_args.attn_dp_size > 1,
        "--is-embedding": server_args.is_embedding,
        "--attn-cp-size above 1": server_args.attn_cp_size > 1,
        "--dcp-size above 1": (server_args.dcp_size or 1) > 1,
        "--enable-two-batch-overlap": server_args.enable_two_batch_overlap,
        "--enable-pdmux": server_args.enable_pdmux,
        "--enable-hisparse": server_args.enable_hisparse,
        # A drafting pass has other rows each time. (On a CPU torch.compile makes such graphs too.)
        "--enable-torch-compile": server_args.enable_torch_compile,
        # As given; SGLang puts an object of its own in its place.
        "--cuda-graph-config": isinstance(server_args.cuda_graph_config, (str, dict)),
        **{
            f"--cuda-graph-backend-{phase}": backend not in (None, "disabled")
            for phase, backend in (
                ("decode", server_args.cuda_graph_backend_decode),
                ("prefill", server_args.cuda_graph_backend_prefill),
            )
        },
        # Every rank would plan by its own clock.
        "--tp-size above 1 with --vericache-draft-len auto": config.enabled
        and config.draft_len is None
        and (server_args.tp_size or 1) > 1,
    }
    for flag, given in wrong.items():
        if given:
            raise ValueError(f"VeriCache does not support {flag} yet; start without it")
    algorithm = server_args.speculative_algorithm
    if algorithm not in (None, NAME):
        raise ValueError(
            f"--speculative-algorithm {algorithm} cannot be combined with --vericache-* flags"
        )


HOOKS = (
    Hook(
        "sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode",
        (),
        "around",
        reserve_per_decode,
        "reserves twice the drafts, for an overlap that VeriCache does not use",
    ),
    Hook(
        "sglang.srt.speculative.spec_utils.spec_prepare_for_decode",
        ("batch",),
        "around",
        prepare_for_decode,
        "counts one token per step into the penalties",
    ),
)
