"""Requests that join and leave on a mesh, and what rounds cost there: the very same tokens."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, trained
from test_batch import COPIES, outcome, served
from test_loop import compilations
from test_sharding import PROMPT, pair

from dflash_jax import (
    Request,
    SamplingParams,
    Slots,
    SpecSession,
    generate,
    loop,
    measure_costs,
    sharding,
    stream,
)
from dflash_jax.window import DSparkVtPolicy

REQUESTS = [
    Request(PROMPT[:5], 24),
    Request(PROMPT[3:14], 12, SamplingParams(temperature=0.8, top_k=20, seed=1)),
    Request(PROMPT[:16], 9, SamplingParams(temperature=0.6, top_p=0.9, seed=2)),
    Request(PROMPT[7:16], 20),
    Request(PROMPT[2:15], 1),
    Request(PROMPT[1:2], 16, SamplingParams(temperature=1.0, min_p=0.1, seed=3)),
]
OPTIONS = {"capacity": 64, "kinds": ("sampled", "top_k", "top_p", "min_p")}
COSTS = {10: {1: 1.0, 4: 1.2}, 30: {1: 1.0, 4: 4.0}}
"""Of a machine on which drafting pays at first."""
COST = {"verify_width": 4, "policy": DSparkVtPolicy("cost"), "costs": COSTS}
MESHES = [(2, 1), (2, 2)]


def alone(models, request, **options):
    """What a request gets from one device, with no neighbour."""
    return served(*models, [request], 1, **options)[0]


def test_requests_get_what_they_get_alone_on_one_device():
    """Four slots, heads over two devices, slots over two: whatever a round costs, greedy and
    sampled, and nothing is compiled again.
    """
    models, options = pair("dflash"), OPTIONS | COST
    expected = [alone(models, request, **options) for request in REQUESTS]
    assert len({width for result in expected for width in result[2]}) > 1
    options["mesh"] = sharding.make_mesh(2, data=2)
    models = sharding.shard_pair(*models, options["mesh"])
    assert served(*models, REQUESTS, 4, **options) == expected
    with compilations(0):
        assert served(*models, REQUESTS[::-1], 4, **options) == expected[::-1]


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_so_do_those_of_every_family(family, shape):
    """Served, streamed, and with penalties."""
    requests = [
        *REQUESTS,
        Request(PROMPT[:9], 30, SamplingParams(temperature=0.9, presence_penalty=0.6, seed=5)),
    ]
    options = OPTIONS | {"kinds": (*OPTIONS["kinds"], "penalised")}
    expected = [alone(trained(family), request, **options) for request in requests]
    models = sharding.shard_pair(*trained(family), sharding.make_mesh(shape[0], data=shape[1]))
    assert served(*models, requests, 4, **options) == expected
    pieces = list(stream(*models, iter(requests), 2, rounds=2, **options))
    for number, result in enumerate(expected):
        joined = [t for piece in pieces if piece.request == number for t in piece.token_ids]
        assert joined == result[0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
def test_plain_decoding_in_slots(shape):
    target, _ = trained("dflash")
    expected = [alone((target, None), request, **OPTIONS) for request in REQUESTS]
    target = sharding.shard(target, sharding.make_mesh(shape[0], data=shape[1]))
    assert served(target, None, REQUESTS, 4, **OPTIONS) == expected


def test_a_joining_request_moves_nothing_between_devices():
    models = sharding.shard_pair(*pair("dflash"), sharding.make_mesh(2, data=2))
    rows = Slots(*models, 4, capacity=64)
    assert [rows.join(Request(PROMPT[:5], 40), n) for n in range(3)] == [0, 1, 2]
    assert rows._state[0].done.tolist() == [False, False, False, True]
    held = [np.asarray(leaf) for leaf in jax.tree.leaves(rows._state)]
    rows.leave(2)
    assert rows._state[0].done.tolist() == [False, False, True, True]
    assert rows._state[0].done.sharding.spec == sharding.ROWS
    assert rows.join(Request(PROMPT[:5], 40), 2) == 2
    for before, leaf in zip(held, jax.tree.leaves(rows._state), strict=True):
        np.testing.assert_array_equal(before, leaf)
    cache = rows._state[0].target.k[0]
    assert cache.sharding.spec[:2] == (sharding.DATA, sharding.MODEL)
    one = jax.tree.map(lambda leaf: leaf[:2], rows._state)
    text = loop.join.lower(rows._state, one, jnp.int32(1), rows.mesh).compile().as_text()
    assert not re.search(r" (all-gather|all-reduce|all-to-all|collective-permute)(-start)?\(", text)
    copied = {int(np.prod([int(n) for n in m.split(",")])) for m in re.findall(COPIES, text)}
    assert cache.addressable_shards[0].data.size not in copied


def test_the_data_axis_divides_the_slots():
    mesh = sharding.make_mesh(2, data=2)
    with pytest.raises(ValueError, match=r"slots: expected a multiple of 2 \(data axis\), found 3"):
        Slots(*pair("dflash"), 3, capacity=64, mesh=mesh)


@pytest.mark.slow
def test_a_batch_under_the_policy_cost():
    """Of one device and of four: the same widths, the same tokens."""
    prompts, budget = [PROMPT, PROMPT[:7]], [40, 30]
    expected = generate(*pair("dflash2"), prompts, budget, **COST)
    assert len({width for result in expected for width in result.verify_widths}) > 1
    found = generate(*pair("dflash2"), prompts, budget, mesh=sharding.make_mesh(2, data=2), **COST)
    assert [outcome(result) for result in found] == [outcome(result) for result in expected]


def test_costs_are_measured_on_all_devices_of_the_mesh():
    """The sequences that are timed lie as those of a batch do."""
    models = sharding.shard_pair(*pair("dflash"), sharding.make_mesh(2, data=2))
    plan = SpecSession(
        *models, verify_width=4, policy=DSparkVtPolicy("cost"), widths=[4]
    )._plan_for(64, [])
    placed = set()

    def decode(target, draft, state, stops, rounds, plan):
        placed.add((state.target.k[0].shape[0], state.target.k[0].sharding.spec[:2]))
        return state

    costs = measure_costs(*models, plan, 4, [9], decode=decode, clock=lambda: 0.0)
    assert costs == {9: {1: 1e-9, 4: 1e-9}}
    assert placed == {(4, (sharding.DATA, sharding.MODEL))}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(2, 2), (1, 2)])
def test_trees_decode_what_one_device_decodes_plainly(family, shape):
    model, data = shape
    penalised = SamplingParams(temperature=0.9, top_p=0.95, repeat_penalty=1.2, seed=11)
    models, several = pair(family), [SamplingParams(), penalised]
    prompts = [PROMPT[:5], PROMPT[3:14]]
    plain = generate(models[0], None, prompts, 20, sampling=several)
    mesh = sharding.make_mesh(model, data=data)
    models = sharding.shard_pair(*models, mesh)
    found = generate(*models, prompts, 20, sampling=several, mesh=mesh, tree=True)
    assert [x.token_ids for x in found] == [x.token_ids for x in plain]
