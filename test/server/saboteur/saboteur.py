"""An SGLang plugin for negative controls; only servers with this folder on their path load it.

It acts on requests by their id and tells on its process's output what it saw:

- ``perturb-...``: doubles one K row (of ``POSITION``, in ``LAYER``) before each decode pass;
- ``script-A,B,...``: in round r draws a wrong token at the r-th (cyclic) draft position listed, so
  that the verify pass must accept exactly the drafts before it; prints a line for every pass.

With ``SABOTEUR_COPY_DELAY`` (seconds) in the environment every copy between host and device of one
layer starts late, by a random time up to that. ``SABOTEUR_COPY_FAULTS`` is the share of these
copies that arrive with one K row negated.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections import Counter
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

POSITION, LAYER = 7, 11
MARK = "saboteur:"
# Printed before the first copy that is spoiled.
SPOILED = f"{MARK} copies are spoiled"
COPY_DELAY, COPY_FAULTS = "SABOTEUR_COPY_DELAY", "SABOTEUR_COPY_FAULTS"
_WORKER = "sglang_vericache.speculative.worker.VeriCacheWorker"
_rounds: Counter[str] = Counter()


def register() -> None:
    """Entry point; runs in every process of the server, which ends if anything here fails.

    The loader only logs an exception, and a test without its sabotage would pass.
    """
    try:
        HookRegistry.register(f"{_WORKER}._forward", perturb, HookType.BEFORE)
        HookRegistry.register(f"{_WORKER}._commit", misdraft, HookType.BEFORE)
        delay, faults = (float(os.environ.get(name, "0")) for name in (COPY_DELAY, COPY_FAULTS))
        if delay or faults:
            spoil_copies(delay, faults)
    except Exception as error:
        raise SystemExit(f"{MARK} {error}") from error


def spoil_copies(delay: float, faults: float) -> None:
    """Let every copy of a layer start up to ``delay`` seconds late, on the thread that copies.

    The share ``faults`` of them brings the first token's K row negated.
    """
    from sglang.srt.mem_cache.pool_host import mha

    from sglang_vericache.platform import hicache, streams

    hicache.install()  # brings the copies; plugins are loaded in any order
    copy, copies = mha.transfer_kv_direct, itertools.count()

    def late(**kwargs: Any) -> None:
        if next(copies) == 0:
            print(SPOILED, flush=True)
        stream = streams.current_stream()
        stream.launch(lambda: time.sleep(random.uniform(0, delay)))
        copy(**kwargs)
        if random.random() < faults:
            stream.launch(lambda: kwargs["dst_layers"][0][kwargs["dst_indices"][0]].neg_())

    mha.transfer_kv_direct = late


def perturb(self: Any, batch: Any, step: Any) -> None:
    """Double one K row of every ``perturb`` request."""
    for req in batch.reqs:
        if req.rid.startswith("perturb-"):
            slot = self.chooser.req_to_token[req.kv.req_pool_idx, POSITION]
            self.chooser.pool.get_key_buffer(LAYER)[slot] *= 2


def misdraft(self: Any, batch: Any, step: Any, output: Any, settled: Any) -> None:
    """Report a pass of every ``script`` request, and spoil the draft its script names."""
    for i, state in enumerate(step.states):
        rid = state.req.rid
        if not rid.startswith("script-"):
            continue
        accepted = settled.accept_len[i]
        script = [int(word) for word in rid.split("-")[1].split(",")]
        wrong_at = script[_rounds[rid] % len(script)]
        report = {
            "rid": rid,
            "wrong_at": wrong_at,
            "drafts": len(state.drafts),
            "accepted": accepted - 1,
            "sequence": len(state.req.origin_input_ids) + len(state.req.output_ids),
            "committed": state.committed,
            "view_length": state.view_length,
            "position": int(step.layout.positions[int(step.rows.q_indptr[i])]),
            "tail_start": int(step.rows.tail_start[i]),
            "tail_end": int(step.rows.tail_end[i]),
        }
        print(MARK, json.dumps(report), flush=True)
        if accepted:
            _rounds[rid] += 1
        elif len(state.drafts) == wrong_at:
            settled.tokens[i][0] = (settled.tokens[i][0] + 1) % output.next_token_logits.shape[1]
