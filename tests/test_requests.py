"""What requests may ask for, looked at before anything runs: budgets, prompts and stop ids."""

import pytest
from families import trained

from dflash_jax import SpecSession
from dflash_jax.batch import Request, serve


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_new_tokens": "8"}, "max_new_tokens: expected a positive integer, found '8'"),
        ({"max_new_tokens": None}, "max_new_tokens: expected a positive integer, found None"),
        ({"ids": None}, "prompt: expected token ids, found None"),
        ({"stop_token_ids": 3}, "stop_token_ids: expected token ids, found 3"),
        ({"stop_token_ids": [264]}, r"stop_token_ids: expected ids in 0\.\.263, found 264"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_named(fields, reason):
    requests = [Request([1]), Request(**{"ids": [1], **fields})]
    with pytest.raises(ValueError, match=f"request 1: {reason}"):
        next(serve(*trained("dflash"), requests))


@pytest.mark.parametrize("stops", [[264], [[1], [264]]])
def test_a_session_refuses_stop_ids_beyond_the_vocabulary(stops):
    with pytest.raises(ValueError, match=r"stop_token_ids: expected ids in 0\.\.263, found 264"):
        SpecSession(*trained("dflash"), stop_token_ids=stops)


def test_a_plan_of_more_sequences_than_fit_anywhere_is_refused():
    with pytest.raises(ValueError, match=r"batch: expected 1\.\.65536, found 100000000"):
        SpecSession(*trained("dflash")).memory(64, batch=10**8)
