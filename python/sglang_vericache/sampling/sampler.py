"""SGLang's sampler with one rule per kind of row, so that neighbours cannot change a result.

The stock ``Sampler`` picks its path per batch: greedy only, temperature only, or sorted as soon as
one request filters. Token and logprobs of a row then depend on who else is in the batch. Here each
row takes the path that the stock sampler takes for its request decoded alone:

| kind | request | token | logprobs |
|---|---|---|---|
| greedy | ``top_k`` 1 (or temperature 0) | first maximum | log_softmax of the logits |
| plain | temperature only | seeded draw | ``L`` |
| filtered | any of top_k, top_p, min_p | seeded draw from what they keep | ``L`` |

``L`` is that of the stock sampler: log(softmax(logits / temperature)), or log_softmax with
``--enable-deterministic-inference``, or log_softmax of the logits with
``SGLANG_RETURN_ORIGINAL_LOGPROB``. Every draw is seeded; ``min_p`` works with seeds (stock
asserts).

The noise of a filtered row belongs to the token id, as in a plain row. Stock gives it to the rank,
so two tokens that swap ranks also swap their noise: a draft and the token verified later, whose
logits differ a little, would then rarely agree (measured on random logits with ``top_p`` 0.9:
agreement 0.55 to 0.93 by rank where it is 0.93 to 0.97 by token id). Both draw from the same
distribution, but for a given seed filtered requests get other tokens than from stock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.layers import sampler as stock
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_vericache.sampling import filtering, seeded
from sglang_vericache.sampling.logprobs import gather_logprobs

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

GREEDY, PLAIN, FILTERED = 0, 1, 2


@dataclass(frozen=True)
class RowParams:
    """Sampling parameters, one entry a row of logits.

    ``kinds`` ``[rows]`` lives on the host; temperatures ``[rows, 1]`` float32, top_ks int32,
    top_ps, min_ps float32 and seeds int64 (all ``[rows]``) on the device of the logits.
    """

    kinds: np.ndarray
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    seeds: torch.Tensor | None

    def take(self, index: torch.Tensor, host_index: np.ndarray) -> RowParams:
        """Rows ``index`` (int64, on the device; ``host_index`` holds the same numbers)."""
        return RowParams(
            kinds=self.kinds[host_index],
            temperatures=self.temperatures[index],
            top_ks=self.top_ks[index],
            top_ps=self.top_ps[index],
            min_ps=self.min_ps[index],
            seeds=None if self.seeds is None else self.seeds[index],
        )


class RowSampler(stock.Sampler):
    """Drop-in ``Sampler`` whose rows are independent of each other.

    Raises:
        ValueError: at construction with ``--rl-on-policy-target``; in ``forward`` for a request
            with a watermark or ``return_sampling_mask`` (``requests.check_supported`` refuses
            both before they reach the scheduler).
    """

    def __init__(self) -> None:
        super().__init__()
        if self.rl_on_policy_target is not None:
            raise ValueError("--rl-on-policy-target is not supported by VeriCache")
        self._kinds_of: tuple[torch.Tensor, np.ndarray] | None = None

    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
        positions: torch.Tensor,
        *,
        logprob_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sample one token per request; see the stock method for the arguments.

        Returns:
            ``[requests]`` int64. Logprobs go to ``logits_output``.
        """
        if logprob_logits is not None or sampling_info.sampling_mask_batch_indices is not None:
            raise ValueError(
                "watermark and return_sampling_mask are not supported by "
                "--sampling-backend vericache"
            )
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        params = self.row_params(sampling_info)
        token_ids = self.sample_rows(logits, params, positions)
        if return_logprob:
            gather_logprobs(
                self.row_logprobs(logits, params), token_ids, top_logprobs_nums, token_ids_logprobs
            ).write_output_to(logits_output)
        self._sync_token_ids_across_tp(token_ids, sampling_info)
        return token_ids

    def row_params(self, info: SamplingBatchInfo) -> RowParams:
        """Parameters of a batch, one row per request."""
        return RowParams(
            kinds=self._kinds(info),
            temperatures=info.temperatures,
            top_ks=info.top_ks,
            top_ps=info.top_ps,
            min_ps=info.min_ps,
            seeds=info.sampling_seed,
        )

    def _kinds(self, info: SamplingBatchInfo) -> np.ndarray:
        if info.is_all_greedy:
            return np.full(len(info), GREEDY, dtype=np.uint8)
        # Reading parameters back from a GPU waits for it. Every change of a batch makes new
        # parameter tensors, so the identity of one tells whether the last answer still holds.
        if self._kinds_of is None or self._kinds_of[0] is not info.top_ks:
            self._kinds_of = (info.top_ks, _kinds_of_rows(info))
        return self._kinds_of[1]

    def sample_rows(
        self, logits: torch.Tensor, params: RowParams, positions: torch.Tensor
    ) -> torch.Tensor:
        """Sample every row of ``logits``.

        Args:
            logits: ``[rows, vocab]``, biased, masked and free of NaN; left unchanged.
            params: parameters of these rows.
            positions: ``[rows]``, position of each row's input token.

        Returns:
            ``[rows]`` int64 token ids.

        Raises:
            RuntimeError: a row is sampled and has no seed.
        """
        kinds = params.kinds
        if not kinds.any():
            return _first_maximum(logits, params, positions)
        if params.seeds is None:
            raise RuntimeError("sampled rows need seeds: install requests.install_seeds")
        token_ids = torch.empty(len(kinds), dtype=torch.int64, device=logits.device)
        for kind, sample in ((GREEDY, _first_maximum), (PLAIN, _draw), (FILTERED, _draw)):
            host_index = np.flatnonzero(kinds == kind)
            if host_index.size == 0:
                continue
            index = torch.from_numpy(host_index).to(logits.device, non_blocking=True)
            rows = logits if host_index.size == len(kinds) else logits[index]
            token_ids[index] = sample(rows, params.take(index, host_index), positions[index])
        return token_ids

    def sync_rows(self, token_ids: torch.Tensor, reqs: list[Req]) -> None:
        """Make tensor-parallel ranks agree on ``token_ids``, in place, where stock does so."""
        if dist.get_world_size(self.tp_sync_group) > 1 and (
            stock.SYNC_TOKEN_IDS_ACROSS_TP or any(req.grammar is not None for req in reqs)
        ):
            dist.all_reduce(token_ids, op=dist.ReduceOp.MIN, group=self.tp_sync_group)

    def row_logprobs(self, logits: torch.Tensor, params: RowParams) -> torch.Tensor:
        """Output logprobs of every row, ``[rows, vocab]``; ``logits`` is left unchanged."""
        if stock.SGLANG_RETURN_ORIGINAL_LOGPROB or not params.kinds.any():
            return torch.log_softmax(logits, dim=-1)
        scaled = logits / params.temperatures
        if self.enable_deterministic:
            logprobs = torch.log_softmax(scaled, dim=-1)
        else:
            logprobs = torch.softmax(scaled, dim=-1).log_()
        host_index = np.flatnonzero(params.kinds == GREEDY)
        if host_index.size:
            index = torch.from_numpy(host_index).to(logits.device, non_blocking=True)
            logprobs[index] = torch.log_softmax(logits[index], dim=-1)
        return logprobs


def _kinds_of_rows(info: SamplingBatchInfo) -> np.ndarray:
    top_ks = info.top_ks.cpu().numpy()
    filtered = (
        (top_ks != TOP_K_ALL) | (info.top_ps.cpu().numpy() != 1) | (info.min_ps.cpu().numpy() > 0)
    )
    return np.where(top_ks <= 1, GREEDY, np.where(filtered, FILTERED, PLAIN)).astype(np.uint8)


def _first_maximum(
    logits: torch.Tensor, params: RowParams, positions: torch.Tensor
) -> torch.Tensor:
    if logits.is_cuda or logits.dtype != torch.float32:
        return torch.argmax(logits, dim=-1)
    # numpy's is vectorised: a tenth of torch's time on a CPU.
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _draw(logits: torch.Tensor, params: RowParams, positions: torch.Tensor) -> torch.Tensor:
    """Seeded draws of rows of one kind, plain or filtered."""
    assert params.seeds is not None
    if logits.is_cuda:
        probs = torch.softmax(logits / params.temperatures, dim=-1)
        if params.kinds[0] == FILTERED:
            probs = filtering.filter_rows(probs, params.top_ks, params.top_ps, params.min_ps)
        return stock.multinomial_with_seed(probs.log_(), params.seeds, positions).view(-1)
    token_ids = []
    values = (params.top_ks, params.top_ps, params.min_ps, params.seeds, positions)
    columns = zip(*(value.tolist() for value in values), strict=True)
    # Row by row everything stays in the cache, and no second core is waited for.
    for row, (top_k, top_p, min_p, seed, position) in enumerate(columns):
        probs = torch.softmax(logits[row] / params.temperatures[row], dim=-1)
        kept = None
        if params.kinds[row] == FILTERED:
            probs, kept = filtering.filter_row(probs, top_k, top_p, min_p)
        token_ids.append(seeded.draw_row(probs, seed, position, kept))
    return torch.tensor(token_ids, dtype=torch.int64)
