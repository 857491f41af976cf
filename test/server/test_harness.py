"""The harness notices what it is there to notice."""

import time
from dataclasses import replace
from threading import Thread

import pytest

from server.comparing import assert_identical, difference, plain
from server.harness import Ask, RequestFailed, Result
from server.specs import DRAFTING

pytestmark = pytest.mark.server(DRAFTING["bfloat16"])

PROMPT = tuple(range(1000, 1040))


def result(ids=(1, 2), logprobs=(-0.5, -0.25), text="ab", finish=None):
    return Result(tuple(ids), tuple(logprobs), text, finish, {})


@pytest.mark.parametrize(
    "other",
    [
        result(ids=(1, 3)),
        result(ids=(1,)),
        result(logprobs=(-0.5,)),
        result(logprobs=(-0.5, -0.25000000000000006)),
        result(text="b"),
        result(finish={"type": "length"}),
    ],
)
def test_every_difference_is_seen(other):
    assert difference(result(), result()) is None
    assert difference(result(), other) is not None
    with pytest.raises(AssertionError, match="1 of 2 answers differ"):
        assert_identical([result(), result()], [result(), other])


def test_batch_and_concurrent_answers_keep_their_order(server):
    asks = [Ask(PROMPT[: n + 4], tokens=n) for n in (5, 2, 9)]
    for answers in (server.concurrently(asks), server.batch(asks)):
        assert [len(answer.ids) for answer in answers] == [5, 2, 9]
        assert [len(answer.logprobs) for answer in answers] == [5, 2, 9]
    assert_identical(server.batch(asks), server.batch(map(plain, asks)))


def test_a_running_request_is_not_idle(server):
    ask = Ask(PROMPT, tokens=96)
    running = Thread(target=server.answer, args=(ask,))
    running.start()
    while (load := server.load())["num_running_reqs"] == 0:
        assert running.is_alive()
        time.sleep(0.02)
    assert load["num_used_tokens"] > 0
    running.join()
    server.check_idle()


def test_refusals_carry_the_answer(server):
    with pytest.raises(RequestFailed, match="enabeld") as refused:
        server.answer(replace(Ask(PROMPT), vericache={"enabeld": True}))
    assert refused.value.status == 400
