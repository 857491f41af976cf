"""``GET /vericache`` and ``meta_info["vericache"]``: what drafting and verifying did so far.

The counters live in the scheduler processes. They travel with SGLang's own internal state, which
the HTTP process asks for.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_vericache import __version__
from sglang_vericache.config import config_of
from sglang_vericache.core import Counters
from sglang_vericache.entrypoints import metrics
from sglang_vericache.hooks import Hook

if TYPE_CHECKING:
    from fastapi import FastAPI
    from sglang.srt.managers.scheduler_components.internal_state import (
        SchedulerInternalStateController,
    )
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    from sglang_vericache.speculative.worker import VeriCacheWorker

KEY = "vericache"
PATH = "/vericache"
PAGE = Path(__file__).with_name("ui.html")
COST_TERMS = (
    *("fixed", "draft_row", "draft_key", "verify_row", "verify_key", "verify_pair"),
    "loaded_key",
)


def worker_status(worker: VeriCacheWorker) -> dict[str, Any]:
    """State of one scheduler as JSON-ready values.

    Returns:
        ``tiers`` (tokens by place, see ``TieredCache.usage``; null while full KV never leaves the
        device), ``counters`` (raw, see ``merged_counters``), ``phases`` (verify passes booked for
        each of the coming iterations), ``rings`` (copies and device slots reserved for each),
        ``running`` (requests with the drafts they hold, the most they may hold, and how many of how
        many tokens their view keeps), ``cost_seconds`` (what the planner believes each unit of work
        costs) and ``packed`` (use of the pools of packed KV by codec, see ``PackedViews.usage``).
    """
    # NOTE: no asdict: it makes a Counter of the items of a Counter. Lists, because msgpack and JSON
    # want strings as keys.
    counters = {
        name: [value[m] for m in range(len(value))] if isinstance(value, Counter) else value
        for name, value in vars(worker.counters).items()
    }
    running = [
        {
            "rid": state.req.rid,
            "context": len(state.req.origin_input_ids) + len(state.req.output_ids),
            "drafts": len(state.drafts),
            "draft_len_limit": state.limit,
            "view_kept": state.view_kept,
            "view_length": state.view_length,
        }
        for state in worker.requests
        if not state.req.finished()
    ]
    costs = worker.planner.cost.coefficients()
    return {
        "counters": counters,
        "phases": worker.planner.phases(),
        "rings": worker.planner.rings(),
        "link_busy": worker.planner.link_busy(),
        "running": running,
        "cost_seconds": dict(zip(COST_TERMS, costs, strict=True)),
        "tiers": None if worker.tiers is None else worker.tiers.usage(),
        "packed": worker.chooser.packed.usage(),
    }


def add_status(result: None, self: SchedulerInternalStateController, state: dict[str, Any]) -> None:
    """``SchedulerInternalStateController._add_speculative`` after: in the scheduler process.

    ``storage`` is ``SafeStorage.usage``, null without ``--hicache-storage-backend``.
    """
    from sgl_kernel_ext import active
    from sglang_vericache.mem_cache.storage_hooks import storage_of

    if config_of(self.scheduler.server_args) is None:
        return
    worker: Any = self.scheduler.draft_worker
    storage = storage_of(self.scheduler.tree_cache)
    state[KEY] = {
        "kernels": active(),
        "storage": None if storage is None else storage.usage(),
        **(worker_status(worker) if worker is not None else {}),
    }


def merged_counters(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum of all data-parallel ranks' counters, with the shares that follow from them."""
    total = Counters()
    for rank in ranks:
        for name, value in rank.get("counters", {}).items():
            if isinstance(value, list):
                getattr(total, name).update(Counter(dict(enumerate(value))))
            else:
                setattr(total, name, getattr(total, name) + value)
    return {
        **{name: value for name, value in vars(total).items() if not isinstance(value, Counter)},
        "acceptance": total.acceptance,
        "acceptance_by_position": total.acceptance_by_position(),
        "committed": total.accepted + total.verify_passes + total.plain_passes,
        "rounds_by_length": {
            str(length): n for length, n in sorted(metrics.rounds_by_length(total).items()) if n
        },
    }


async def status(manager: TokenizerManager) -> dict[str, Any] | None:
    """What ``GET /vericache`` answers; None when the server runs stock SGLang.

    ``counters`` sums the entries of ``ranks``, one for each data-parallel rank (``worker_status``).
    """
    config = config_of(manager.server_args)
    if config is None:
        return None
    ranks = [state[KEY] for state in await manager.get_internal_state()]
    counters = merged_counters(ranks)
    for rank in ranks:
        rank.pop("counters", None)
    return {
        "version": __version__,
        "config": config.as_dict(),
        "counters": counters,
        "ranks": ranks,
    }


def add_route(result: None, global_state: Any) -> None:
    """``http_server.set_global_state`` after: in every HTTP process, before it serves."""
    from sglang.srt.entrypoints.http_server import app

    install_route(app, global_state.tokenizer_manager)


def install_route(app: FastAPI, manager: TokenizerManager) -> None:
    """Add ``GET /vericache`` and its page to ``app``."""
    from fastapi.responses import FileResponse, ORJSONResponse

    async def get_vericache() -> ORJSONResponse:
        """Configuration, counters and phases of VeriCache."""
        found = await status(manager)
        if found is None:
            message = (
                "this server runs stock SGLang; start it with --vericache-* flags or "
                "python -m sglang_vericache.launch_server"
            )
            return ORJSONResponse({"error": {"message": message}}, status_code=404)
        return ORJSONResponse(found)

    async def get_page() -> FileResponse:
        """A page that draws the above, once a second."""
        return FileResponse(PAGE, media_type="text/html")

    app.add_api_route(PATH, get_vericache, methods=["GET"])
    app.add_api_route(f"{PATH}/ui", get_page, methods=["GET"])


def add_meta_info(
    result: None, self: TokenizerManager, meta_info: dict[str, Any], recv_obj: Any, i: int
) -> None:
    """``TokenizerManager._calculate_spec_decoding_metrics`` after: counts of one response.

    ``verify_passes`` counts every pass over the full KV, those without drafts included. The stock
    function takes the reserved draft length of every pass for what was drafted.
    """
    config = config_of(self.server_args)
    passes = getattr(recv_obj, "spec_verify_ct", None)
    if config is None or not config.enabled or not passes:
        return
    drafted, accepted = recv_obj.spec_num_cap_tokens[i], recv_obj.spec_num_correct_drafts[i]
    meta_info[KEY] = {"drafted": drafted, "accepted": accepted, "verify_passes": passes[i]}
    if "spec_accept_rate" in meta_info:
        meta_info["spec_num_proposed_drafts"] = drafted
        meta_info["spec_accept_rate"] = accepted / drafted if drafted else 0.0


HOOKS = (
    Hook(
        "sglang.srt.managers.scheduler_components.internal_state."
        "SchedulerInternalStateController._add_speculative",
        ("self", "state"),
        "after",
        add_status,
        "no door for the state of a plugin's worker",
    ),
    Hook(
        "sglang.srt.entrypoints.http_server.set_global_state",
        ("global_state",),
        "after",
        add_route,
        "no door for routes of a plugin",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        ("self", "meta_info", "recv_obj", "i"),
        "after",
        add_meta_info,
        "takes the reserved draft length of every pass for what was drafted",
    ),
    *metrics.HOOKS,
)
