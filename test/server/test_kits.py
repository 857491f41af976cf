"""SGLang's own kits, unchanged, against our server; what is left out, and why, is in docs/kits.md.

A kit is a mixin of test methods on ``self.base_url``. Here its server is the one of the mark, and
class attributes that kits offer as settings are set where this small model needs other ones.
"""

import functools
import json
import os
import unittest

import psutil
import pytest
import requests
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.anthropic_messages_kit import AnthropicMessagesMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.prefix_cache_branching_kit import PrefixCacheBranchingMixin
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
from sglang.test.kits.spec_server_kits import (
    SpecCorrectnessKit,
    SpecFeatureKit,
    SpecGrammarKit,
    SpecLogprobKit,
    SpecParityKit,
    SpecPenaltyKit,
    _greedy,
)
from sglang.test.kits.streaming_session_kit import StreamingSessionKitMixin
from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin
from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase

from server.serving import INCREMENTAL, SERVING
from sglang_vericache.embedded_model import ensure_embedded_model

pytestmark = pytest.mark.server(SERVING)
# Set to run what takes minutes too.
FULL = "VERICACHE_TEST_FULL"
slow = pytest.mark.skipif(FULL not in os.environ, reason=f"takes minutes; {FULL}=1 runs it")


class Process:
    """What kits ask of the server process."""

    def __init__(self, pid):
        self._process = psutil.Process(pid)

    def poll(self):
        """None while it runs."""
        return None if self._process.is_running() else -1


# What a kit expects of a model or a cache that this is not: see docs/kits.md.
not_this_model = unittest.expectedFailure


def by_chance(test):
    """The kit samples without a seed; this model finishes within its limit now and then."""

    @functools.wraps(test)
    def run(self):
        try:
            test(self)
        except (AssertionError, json.JSONDecodeError) as error:
            pytest.xfail(f"unfinished by chance: {error}")

    return run


class KitCase(unittest.TestCase):
    """Gives a kit our server; it must have drafted unless ``drafts`` says otherwise."""

    drafts = True
    drafted = 0

    @pytest.fixture(autouse=True, scope="class")
    def _kit_drafted(self, request):
        yield
        assert request.cls.drafted or not request.cls.drafts, "the kit ran without drafts"

    @pytest.fixture(autouse=True)
    def _kit_server(self, server):
        case = type(self)
        case.model = str(ensure_embedded_model())
        case.base_url, case.api_key = server.url, "none"
        case.process = Process(server.process.pid)
        case.tokenizer = get_tokenizer(case.model)
        before = server.counters()["drafted"]
        yield
        case.drafted += server.counters()["drafted"] - before


class TestSpecCorrectness(SpecCorrectnessKit, KitCase):
    # Tokens committed a verify pass; drafts of an eighth of short prompts by a small model.
    acc_length_thres = 1.5
    batch_accept_len_thres = 1.2


class TestSpecParity(SpecParityKit, KitCase):
    @classmethod
    def setUpClass(cls):
        """The kit would start a CUDA server here; its reference answers come from ours."""

    @pytest.fixture(autouse=True)
    def _reference(self, off, _kit_server):
        url = off["bfloat16"].server().url
        type(self).parity_ref_outputs = {p: _greedy(url, p) for p in self.parity_prompts}


class TestSpecLogprob(SpecLogprobKit, KitCase):
    test_logprob_mixed = slow(SpecLogprobKit.test_logprob_mixed)


class TestSpecPenalty(SpecPenaltyKit, KitCase):
    run_decode = SpecEagleServerBase.run_decode


class TestSpecFeature(SpecFeatureKit, KitCase):
    send_request = SpecEagleServerBase.send_request
    send_requests_abort = SpecEagleServerBase.send_requests_abort
    drafts = FULL in os.environ  # otherwise none of it runs
    test_radix_attention = slow(SpecFeatureKit.test_radix_attention)
    test_request_abort = slow(SpecFeatureKit.test_request_abort)
    test_constrained_decoding = slow(not_this_model(SpecFeatureKit.test_constrained_decoding))


class TestSpecGrammar(SpecGrammarKit, KitCase):
    pass


class TestMatchedStop(MatchedStopMixin, KitCase):
    test_finish_stop_str = not_this_model(MatchedStopMixin.test_finish_stop_str)


class TestJSON(JSONConstrainedMixin, KitCase):
    test_json_generate = not_this_model(JSONConstrainedMixin.test_json_generate)
    test_mix_json_and_other = not_this_model(JSONConstrainedMixin.test_mix_json_and_other)


class TestRegex(RegexConstrainedMixin, KitCase):
    test_regex_generate_custom_log_format = by_chance(
        RegexConstrainedMixin.test_regex_generate_custom_log_format
    )


class TestEBNF(EBNFConstrainedMixin, KitCase):
    pass


class TestAbortAll(AbortAllMixin, KitCase):
    # Within the context of 8,192 tokens; 32 of them still run when the abort comes.
    abort_all_max_new_tokens = 4000


class TestPrefixCacheBranching(PrefixCacheBranchingMixin, KitCase):
    drafts = False  # it generates one token a request
    cache_chunk_size = 1

    @not_this_model
    def test_prefix_cache_branching(self):
        super().test_prefix_cache_branching()

    @classmethod
    def flush_cache(cls):
        """Left to the kit's user."""
        requests.post(f"{cls.base_url}/flush_cache?timeout=30", timeout=60).raise_for_status()


class TestUnifiedRadixCache(UnifiedRadixTreeTestMixin, KitCase):
    # Turns of 256 to 768 tokens, at the size of a small model on two cores.
    max_new_tokens, prefix_len, num_groups, branches_per_group = 24, 256, 2, 2
    test_gsm8k = None  # downloads its questions

    @pytest.fixture(autouse=True)
    def _prompts(self, make_corpus):
        type(self).input_ids = make_corpus().prompts(4, 256)


@pytest.mark.server(INCREMENTAL)
class TestStreamingSession(StreamingSessionKitMixin, KitCase):
    test_leak_logprob_concurrent = slow(StreamingSessionKitMixin.test_leak_logprob_concurrent)
    test_stress_concurrent_sessions = slow(StreamingSessionKitMixin.test_stress_concurrent_sessions)
    test_nth_mid_abort_recovery = not_this_model(
        StreamingSessionKitMixin.test_nth_mid_abort_recovery
    )
    test_first_mid_abort_recovery = not_this_model(
        StreamingSessionKitMixin.test_first_mid_abort_recovery
    )


class TestBasicAPIContract(BasicAPIContractMixin, KitCase):
    drafts = False  # half of it are routes without generation


class TestAnthropicMessages(AnthropicMessagesMixin, KitCase):
    drafts = False  # some of it are refusals
    test_count_tokens_with_system = not_this_model(
        AnthropicMessagesMixin.test_count_tokens_with_system
    )
