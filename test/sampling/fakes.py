"""Light requests and batches around real ``SamplingParams`` and ``SamplingBatchInfo``."""

import dataclasses
import itertools
from array import array
from types import SimpleNamespace

import torch

VOCAB = 512
EOS = 7
_ids = itertools.count()


class Req:
    """What sampling reads of a request."""

    def __init__(
        self,
        vocab_size: int = VOCAB,
        top_logprobs_num: int = 0,
        token_ids_logprob: list[int] | None = None,
        return_logprob: bool = False,
        processor: str | None = None,
        grammar=None,
        eos: int = EOS,
        **params,
    ):
        import weakref

        from sglang.srt.sampling.sampling_params import SamplingParams

        if processor is not None:
            params["custom_params"] = {**params.get("custom_params", {})}
            params["custom_params"]["__req__"] = weakref.proxy(self)
        params.setdefault("max_new_tokens", 100_000)
        self.rid = f"request-{next(_ids)}"
        self.tokenizer = SimpleNamespace(
            eos_token_id=eos, additional_stop_token_ids=None, encode=lambda *_, **__: []
        )
        self.sampling_params = SamplingParams(**params)
        self.sampling_params.normalize(self.tokenizer)
        self.sampling_params.verify(vocab_size)
        self.origin_input_ids = array("q", [1, 2, 3])
        self.output_ids = array("q")
        self.eos_token_ids = {eos}
        self.custom_logit_processor = processor
        self.grammar = grammar
        self.return_logprob = (
            return_logprob or top_logprobs_num > 0 or token_ids_logprob is not None
        )
        self.top_logprobs_num = top_logprobs_num
        self.token_ids_logprob = token_ids_logprob
        self.return_sampling_mask = False
        self.sampling_logprobs_mode = "selected"

    @property
    def prefix(self) -> list[int]:
        return [*self.origin_input_ids, *self.output_ids]


class Batch:
    """What sampling reads of a ``ScheduleBatch``; seeded as the server does."""

    def __init__(self, reqs: list[Req], vocab_size: int = VOCAB):
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

        from sglang_vericache.sampling.requests import adjust_from_schedule_batch

        self.reqs = reqs
        self.device = "cpu"
        self.return_logprob = any(req.return_logprob for req in reqs)
        self.top_logprobs_nums = [req.top_logprobs_num for req in reqs]
        self.token_ids_logprobs = [req.token_ids_logprob for req in reqs]
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, vocab_size)
        adjust_from_schedule_batch(self.sampling_info, self, vocab_size)


def plain_step(batch: Batch, logits: torch.Tensor, sampler, prefill: bool = False):
    """One step of plain decoding: what the scheduler and the model runner do around a sampler.

    Returns:
        token ids and the ``LogitsProcessorOutput``. ``req.output_ids`` is left to the caller.
    """
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    reqs, info = batch.reqs, batch.sampling_info
    if not prefill and info.penalizer_orchestrator.is_required:
        last = [req.output_ids[-1] for req in reqs]
        info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor(last))
    info = info.copy_for_forward()
    if any(req.grammar for req in reqs):
        info.grammars = [req.grammar for req in reqs]
    output = LogitsProcessorOutput(next_token_logits=logits)
    info.update_regex_vocab_mask()
    info.apply_logits_bias(logits)
    positions = torch.tensor([len(req.prefix) - 1 for req in reqs])
    token_ids = sampler(
        output,
        dataclasses.replace(info, grammar_mask=None),
        batch.return_logprob,
        batch.top_logprobs_nums,
        batch.token_ids_logprobs,
        positions,
    )
    return token_ids.tolist(), output


def record_logprobs(log: dict, req: Req, output, slot: int, token: int, value: float) -> None:
    """Append everything a request would be told about one token."""
    entry = {"token": token, "logprob": value}
    if req.top_logprobs_num:
        entry["top"] = (
            output.next_token_top_logprobs_val[slot].tolist(),
            output.next_token_top_logprobs_idx[slot].tolist(),
        )
    if req.token_ids_logprob is not None:
        entry["ids"] = (
            output.next_token_token_ids_logprobs_val[slot].tolist(),
            output.next_token_token_ids_logprobs_idx[slot],
        )
    log[req].append(entry)
