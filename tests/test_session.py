"""Generation from Python: whatever is drafted, the tokens are the target's own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from targets import (
    SLIDING,
    TINY,
    TINY_TARGET,
    chain,
    mistaken_draft,
    right_draft,
    sliding_pair,
    table_target,
    tiny_draft,
    tiny_target,
    trained_pair,
    wrong_draft,
)

from dflash_jax import SpecSession, generate, loop
from dflash_jax.sampling import SamplingParams
from dflash_jax.targets.loading import LoadedTarget

CYCLE = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0]
"""0, 1, ... 10, 0, ...: 11 is the mask."""
PROMPT = [7, 3, 3, 0, 1]
TEXT = list(b"def add(first, second):\n    return first + second\n\n\ndef sub(")


def table(draft_of=right_draft, **options):
    target = table_target(CYCLE, **options)
    return target, draft_of(target)


def patchy(target):
    """Right but for three tokens: rounds of several lengths."""
    return mistaken_draft(target, [2, 5, 6])


DRAFTERS = {"right": right_draft, "patchy": patchy, "wrong": wrong_draft}
PAIRS = {"trained": trained_pair, "sliding": sliding_pair}


def outcome(out):
    return out.token_ids, out.acceptance_lengths, out.finish_reason


# --- how much, and when to stop ----------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("count", range(1, 13))
def test_exactly_as_many_tokens_as_asked_for(name, count):
    target, draft = table(DRAFTERS[name])
    out = generate(target, draft, PROMPT, count)
    assert out.token_ids == chain(target, PROMPT[-1], count)
    assert out.token_ids == generate(target, None, PROMPT, count).token_ids
    assert out.emitted == count == 1 + sum(out.acceptance_lengths)
    assert out.finish_reason == "length"


def test_right_drafts_gain_whole_blocks_and_wrong_ones_a_token_each():
    target, right = table()
    assert generate(target, right, PROMPT, 14).acceptance_lengths == [4, 4, 4, 1]
    assert generate(target, wrong_draft(target), PROMPT, 14).acceptance_lengths == [1] * 13
    # Tokens 3, 4 | 5 | 6 | 7.. as far as 2, a cycle later.
    assert generate(target, patchy(target), [1], 14).acceptance_lengths == [3, 1, 4, 3, 2]


@pytest.mark.parametrize("rest", range(16))
def test_the_last_block_may_be_cut_anywhere(rest):
    """Block 16: the block stays whole at the budget's end, the commit is clipped."""
    target, draft = table(block_size=16)
    out = generate(target, draft, PROMPT, 16 + rest + 1)
    assert out.token_ids == chain(target, PROMPT[-1], 17 + rest)
    assert out.acceptance_lengths == [16] + [rest] * (rest > 0)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_mask_id_may_be_a_stop_token(name):
    """The stop test looks at emitted ids only, not at a buffer that still holds the mask."""
    target = table_target([0, 0, 3, 4, 5, 6, 7, 8, 2, 0, 0, 0], mask=9, stops=(9, 1))
    makers = {
        "right": right_draft(target, mask=9),
        "patchy": mistaken_draft(target, [5], mask=9),
        "wrong": wrong_draft(target, mask=9),
    }
    prompt = [2, 3, 4, 5, 6, 7, 8, 2, 3, 4]
    out = generate(target, makers[name], prompt, 40)
    assert out.token_ids == chain(target, 4, 40)
    assert not {1, 9} & set(out.token_ids)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("stop", range(11))
def test_a_stop_token_is_emitted_and_nothing_after_it(name, stop):
    """Wherever in a block it falls: first of all, in the middle, as the bonus token."""
    target, draft = table(DRAFTERS[name])
    expected = chain(target, PROMPT[-1], 12)
    expected = expected[: expected.index(stop) + 1]
    session = SpecSession(target, draft, stop_token_ids=[stop, 11])
    session.open([PROMPT], 30)
    session.burst()
    (out,) = session.results()
    assert out.token_ids == expected
    assert out.finish_reason == "stop"
    assert (out.rounds == 0) == (len(expected) == 1)
    # The commit is cut too: the stop token is the anchor, and has no row.
    rows = len(PROMPT) + len(expected) - 1
    assert session.state.target.len.tolist() == session.state.draft.len.tolist() == [rows]


def test_stop_tokens_default_to_the_targets_and_may_be_switched_off():
    target = table_target(CYCLE, stops=(4, 8))
    draft = right_draft(target)
    assert generate(target, draft, PROMPT, 20).token_ids == [2, 3, 4]
    assert generate(target, draft, PROMPT, 20, stop_token_ids=[6]).token_ids == [2, 3, 4, 5, 6]
    out = generate(target, draft, PROMPT, 20, stop_token_ids=())
    assert out.emitted == 20


def test_a_stop_token_in_the_prompt_stops_nothing():
    target, draft = table(stops=(3,))
    assert generate(target, draft, [3, 3, 7], 4).token_ids == [8, 9, 10, 0]


def test_a_stop_token_past_the_budget_is_a_length():
    target, draft = table(stops=(4,))
    assert generate(target, draft, PROMPT, 2).finish_reason == "length"
    assert generate(target, draft, PROMPT, 3).finish_reason == "stop"


def test_many_stop_tokens():
    target, draft = table(stops=(*range(100, 120), 5))
    assert generate(target, draft, PROMPT, 20).token_ids == [2, 3, 4, 5]


# --- streams and sessions ----------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 5, 23])
@pytest.mark.parametrize("rounds", [1, 3])
def test_stream_pieces_joined_are_the_whole(count, rounds):
    target, draft = table(patchy)
    session = SpecSession(target, draft)
    session.open([PROMPT, [9]], count)
    pieces = list(session.stream(rounds))
    assert [len(p) for p in pieces[0]] == [1, 1]  # first the prompts' own next tokens
    for b, out in enumerate(session.results()):
        assert [t for piece in pieces for t in piece[b]] == out.token_ids
        assert out.emitted == count
    for step in pieces[1:]:
        assert max(len(p) for p in step) in range(1, 4 * rounds + 1)


def test_one_session_serves_requests_one_after_another():
    target, draft = trained_pair()
    session = SpecSession(target, draft)

    def request(prompt):
        session.open([prompt], 40)
        session.burst()
        return outcome(session.results()[0])

    first, other, again = request(TEXT), request(TEXT[::-1]), request(TEXT)
    assert first == again
    assert first != other


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("stops", [(), tuple(b" \n")], ids=["budget", "stop"])
def test_resuming_equals_opening_the_whole_text_cold(name, stops):
    """After a budget's end or a stop in the middle of a round; suffixes of any lengths."""
    target, draft = PAIRS[name]()
    session = SpecSession(target, draft, stop_token_ids=stops)
    prompts = [TEXT, TEXT[:7], TEXT[10:11]]
    session.open(prompts, [9, 14, 1])
    session.burst()
    context = [p + out.token_ids for p, out in zip(prompts, session.results(), strict=True)]
    for suffixes in ([list(b"x, y"), [], [65]], [[], list(b"class A:\n" * 3), [10, 10]]):
        session.resume(suffixes, 20)
        session.burst()
        context = [c + s for c, s in zip(context, suffixes, strict=True)]
        cold = generate(target, draft, context, 20, stop_token_ids=stops)
        for warm, fresh in zip(session.results(), cold, strict=True):
            assert outcome(warm) == outcome(fresh)
            assert warm.prompt_tokens == fresh.prompt_tokens
        context = [c + out.token_ids for c, out in zip(context, cold, strict=True)]


def test_a_refused_resume_leaves_the_session_as_it_was():
    target, draft = table()
    session = SpecSession(target, draft, capacity=32)
    session.open([PROMPT], 6)
    session.burst()
    before = outcome(session.results()[0])
    with pytest.raises(ValueError, match=r"suffix: expected at most 32 rows .*, found 41"):
        session.resume([[1] * 30], 4)
    with pytest.raises(ValueError, match="max_new_tokens: expected a positive integer, found 0"):
        session.resume([[1]], 0)
    assert outcome(session.results()[0]) == before
    session.resume([[1]], 4)
    session.burst()
    assert session.results()[0].token_ids == chain(target, 1, 4)
    assert session.results()[0].prompt_tokens == len(PROMPT) + 6 + 1


# --- losslessness ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
def test_speculative_padded_and_plain_decoding_say_the_same(name):
    target, draft = PAIRS[name]()
    for prompt in (TEXT, TEXT[:1], TEXT[5:12], [0, 255, 128]):
        spec = generate(target, draft, prompt, 96)
        padded = generate(target, draft, prompt, 96, accept=False)
        plain = generate(target, None, prompt, 96)
        assert spec.token_ids == padded.token_ids == plain.token_ids
        assert padded.acceptance_lengths == [1] * 95
        assert (padded.accepted, plain.drafted, plain.accepted) == (0, 0, 0)
    assert spec.rounds < 95


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 2},
        {"block_size": 5},
        {"verify_width": 2},
        {"verify_width": 5},
        {"block_size": 6, "verify_width": 3},
    ],
    ids=str,
)
def test_smaller_blocks_and_windows_change_no_token(options):
    target, draft = trained_pair()
    plain = generate(target, None, TEXT, 64).token_ids
    out = generate(target, draft, TEXT, 64, **options)
    assert out.token_ids == plain
    width = options.get("verify_width", options.get("block_size"))
    assert max(out.acceptance_lengths) <= width
    # Nothing is shortened at the budget's end: every round verifies the whole width.
    assert out.drafted == (width - 1) * out.rounds


def test_random_drafters_change_no_token():
    target = tiny_target()
    plain = generate(target, None, [1, 2, 3], 100).token_ids
    for config in (TINY, SLIDING):
        for seed in (1, 2):
            draft = tiny_draft(config, seed)
            assert generate(target, draft, [1, 2, 3], 100).token_ids == plain


def test_a_windowed_target_is_decoded_losslessly():
    target = tiny_target(dataclasses.replace(TINY_TARGET, layer_window=(5, None, 9)))
    plain = generate(target, None, [1, 2, 3], 60).token_ids
    assert generate(target, tiny_draft(SLIDING), [1, 2, 3], 60).token_ids == plain
    assert plain != generate(tiny_target(), None, [1, 2, 3], 60).token_ids


def test_a_trimmed_draft_head_changes_no_token():
    """A drafter that knows the even tokens alone: ids mapped by offset, accepted where right."""
    target, draft = table(lambda target: mistaken_draft(target, []))
    even = np.arange(0, 12, 2)
    head = draft.head.replace(
        lm_head=draft.head.lm_head[even], d2t=jnp.asarray(even - np.arange(6), jnp.int32)
    )
    out = generate(target, draft.replace(head=head), PROMPT, 23)
    assert out.token_ids == chain(target, PROMPT[-1], 23)
    # After an odd token comes an even one, drafted right, and then an odd one, which cannot be;
    # but 0 comes after 10.
    assert set(out.acceptance_lengths[1:-1]) == {2, 3}


@pytest.mark.parametrize(
    ("block", "harvest", "drafts"), [(16, "dflash", 15), (4, "dflash", 3), (4, "dspark", 4)]
)
def test_a_block_is_verified_with_its_anchor(block, harvest, drafts):
    """Block 16 gives 15 drafts and a verify width of 16; shifted, every row is a draft."""
    target, draft = table(block_size=block)
    session = SpecSession(target, draft, harvest=harvest)
    session.open([PROMPT], 40)
    assert session.plan.verify_width == drafts + 1
    session.burst(2)
    (out,) = session.results()
    assert out.drafted == drafts * out.rounds
    assert out.verify_widths == [drafts + 1] * out.rounds
    assert out.token_ids == chain(target, PROMPT[-1], out.emitted)


# --- batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAIRS)
def test_a_batch_equals_its_sequences_alone_in_any_order(name):
    target, draft = PAIRS[name]()
    lengths = [1, 2, 7, 8, 9, 23, 36, 50]
    prompts = [(TEXT + TEXT)[i : i + n] for i, n in enumerate(lengths)]
    budgets = [60, 1, 33, 2, 48, 60, 17, 40]
    options = {"stop_token_ids": [ord("(")]}
    solo = [
        outcome(generate(target, draft, p, n, **options))
        for p, n in zip(prompts, budgets, strict=True)
    ]
    assert {reason for _, _, reason in solo} == {"stop", "length"}
    for order in (range(8), [3, 6, 0, 7, 1, 5, 2, 4]):
        outs = generate(
            target, draft, [prompts[i] for i in order], [budgets[i] for i in order], **options
        )
        assert [outcome(out) for out in outs] == [solo[i] for i in order]


def test_one_prompt_in_a_list_gives_a_list():
    target, draft = table()
    single = generate(target, draft, PROMPT, 9)
    (listed,) = generate(target, draft, [PROMPT], 9)
    assert outcome(single) == outcome(listed)


# --- lengths and capacity ----------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 81])
@pytest.mark.parametrize("name", PAIRS)
def test_prompts_of_any_length(length, name):
    """Around the block (8) and the widths of prompt chunks (16, 64)."""
    target, draft = PAIRS[name]()
    prompt = (TEXT * 2)[:length]
    out = generate(target, draft, prompt, 24)
    assert out.token_ids == generate(target, None, prompt, 24).token_ids
    assert out.prompt_tokens == length


@pytest.mark.parametrize("short", [0, 1, 2, 7, 8, 9])
def test_prompts_that_fill_the_capacity(short):
    """A context of 40 rows: the prompt leaves `short` of them."""
    target, draft = trained_pair()
    prompt = TEXT[: 40 - short]
    roomy = generate(target, None, prompt, 40).token_ids
    for drafter in (draft, None):
        out = generate(target, drafter, prompt, 40, capacity=40)
        assert out.token_ids == roomy[: short + 1]
        assert out.finish_reason == "capacity"


def test_a_budget_that_just_fits_the_capacity_ends_by_length():
    target, draft = table()
    assert generate(target, draft, PROMPT, 16, capacity=20).finish_reason == "length"
    assert generate(target, draft, PROMPT, 17, capacity=20).finish_reason == "capacity"


@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_reading_a_prompt_as_one_chunk_or_through_the_verify_path(length):
    """Prefill against blocks of 8 rows of which some are rejected, as a round feeds them."""
    target, draft = trained_pair()
    prompt, taps = TEXT[:length], draft.config.target_layer_ids
    caches = loop.empty_caches(target, draft, 1, 64)
    caches = loop.prefill(target, draft, caches, [prompt], [0], 64)

    @jax.jit
    def block(state, ids, count):
        out, state = target.forward(state, ids, taps)
        return out, target.commit(state, count)

    state, done, sizes = target.init_state(1, 80), 0, [3, 8, 1, 5]
    while done < length:
        count = min(sizes.pop(0), length - done)
        ids = (prompt[done : done + count] + [99] * 8)[:8]
        out, state = block(state, jnp.asarray([ids]), jnp.asarray([count]))
        done += count
    got, expected = target.logits(out.hidden[:, count - 1]), target.logits(caches.last)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("widths", [(64, 64, 64), (16,) * 10, (1, 2, 16, 256)])
def test_chunks_of_any_widths_leave_the_same_caches(widths):
    target, draft = sliding_pair()
    prompt, capacity = (TEXT * 3)[:150], 512

    def read(widths):
        caches, left = loop.empty_caches(target, draft, 1, capacity), prompt
        for width in widths:
            piece, left = left[:width], left[width:]
            ids = jnp.asarray([piece + [0] * (width - len(piece))], jnp.int32)
            caches = loop.prefill_chunk(target, draft, caches, ids, jnp.asarray([len(piece)]))
        assert not left
        return caches

    def rows(caches):
        state, kv = caches.target, caches.draft
        yield from (np.asarray(leaf)[0, :, :150] for leaf in state.k + state.v)
        for i in range(2):
            pos = np.asarray(kv.slots_of(i).pos)[0]
            slots = [
                int(np.flatnonzero(pos == p)[0]) for p in range(150 - 31 if i == 0 else 0, 150)
            ]
            yield from (np.asarray(leaf)[0][:, slots] for leaf in (kv.k[i], kv.v[i]))
        yield np.asarray(caches.last)

    for got, expected in zip(rows(read(widths)), rows(read((256,))), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# --- figures -----------------------------------------------------------------------------------


def test_figures_of_a_generation():
    target, draft = table(patchy)
    out = generate(target, draft, [1], 14)
    assert out.prompt_tokens == 1
    assert out.acceptance_lengths == [3, 1, 4, 3, 2]
    assert out.rounds == 5
    assert out.drafted == 3 * 5  # verify width 4 less the anchor
    assert out.accepted == sum(out.acceptance_lengths) - out.rounds == 8
    assert out.mean_acceptance_length == pytest.approx(13 / 5)
    assert out.seconds > 0
    assert out.tokens_per_second == pytest.approx(13 / out.seconds)
    nothing = generate(target, draft, [1], 1)
    assert (nothing.rounds, nothing.mean_acceptance_length, nothing.tokens_per_second) == (0, 0, 0)


def test_an_unfinished_generation_is_open():
    target, draft = table()
    session = SpecSession(target, draft)
    session.open([PROMPT], 30)
    assert session.results()[0].finish_reason == "open"
    assert session.results()[0].token_ids == [2]
    session.burst(2)
    assert session.results()[0].finish_reason == "open"
    assert session.results()[0].emitted == 9
    assert not session.done


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "budget", "message"),
    [
        ([], 5, "prompts: expected at least one, found none"),
        ([[1], []], 5, "prompt: expected at least one token, found an empty one"),
        ([[1, 12]], 5, r"prompt 0: expected ids in 0\.\.11, found 12"),
        ([[1], [-1]], 5, r"prompt 1: expected ids in 0\.\.11, found -1"),
        ([[1.5]], 5, r"prompt 0: expected token ids, found 1\.5"),
        ([["a"]], 5, "prompt 0: expected token ids, found 'a'"),
        ([[1]], 0, "max_new_tokens: expected a positive integer, found 0"),
        ([[1]], 2.0, r"max_new_tokens: expected a positive integer, found 2\.0"),
        ([[1], [2]], [5], r"max_new_tokens: expected 2 \(one a prompt\), found 1"),
        ([[1] * 33], 5, r"prompt: expected at most 32 tokens \(capacity\), found 33"),
        (None, 5, "prompts: expected a list, found None"),
        ({1: 2}, 5, "prompts: expected a list, found"),
        (np.int32(3), 5, "prompts: expected a list, found "),
        ([[1], 2], 5, "prompt 1: expected token ids, found 2"),
        ([None], 5, "prompt 0: expected token ids, found None"),
        (np.ones((1, 2)), 5, r"prompt 0: expected token ids, found 1\.0"),
        ([[1]], None, "max_new_tokens: expected a positive integer, found None"),
        ([[1]], np.array([5, 5]), r"max_new_tokens: expected 1 \(one a prompt\), found 2"),
    ],
)
def test_bad_requests_are_refused(prompts, budget, message):
    target, draft = table()
    session = SpecSession(target, draft, capacity=32)
    with pytest.raises(ValueError, match=message):
        session.open(prompts, budget)


def test_an_empty_prompt_is_refused_by_generate():
    target, draft = table()
    with pytest.raises(ValueError, match="prompts: expected at least one"):
        generate(target, draft, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 5}, r"block_size: expected 2\.\.4, found 5"),
        ({"block_size": 1}, r"block_size: expected 2\.\.4, found 1"),
        ({"verify_width": 5}, r"verify_width: expected 2\.\.4, found 5"),
        ({"block_size": 3, "verify_width": 4}, r"verify_width: expected 2\.\.3, found 4"),
        ({"verify_width": 1}, r"verify_width: expected 2\.\.4, found 1"),
        ({"harvest": "both"}, "harvest: expected 'dflash' or 'dspark', found 'both'"),
        ({"stop_token_ids": ["</s>"]}, "stop_token_ids: expected token ids, found '</s>'"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids: expected ids in 0\.\.11, found -1"),
        ({"stop_token_ids": [2**31]}, r"stop_token_ids: expected ids in 0\.\.11, found 21"),
        ({"stop_token_ids": 5}, "stop_token_ids: expected token ids, found 5"),
        ({"policy": "fixed"}, "policy: expected a DSparkVtPolicy, found 'fixed'"),
        ({"widths": 3}, "widths: expected a list, found 3"),
        ({"sampling": None}, "sampling: expected SamplingParams .*, found None"),
        ({"sampling": {"top_k": 5}}, "sampling: expected SamplingParams .*, found"),
        (
            {"sampling": [SamplingParams(), None]},
            "sampling: expected SamplingParams .*, found None",
        ),
    ],
)
def test_bad_options_are_refused(options, message):
    target, draft = table()
    with pytest.raises(ValueError, match=message):
        SpecSession(target, draft, **options)


@pytest.mark.parametrize("swapped", [None, "smollm2", LoadedTarget(*table()[:1], None, "x")])
def test_what_is_no_target_or_no_drafter_is_refused_by_name(swapped):
    target, draft = table()
    kind = type(swapped).__name__
    with pytest.raises(ValueError, match=rf"target: expected a Target .*, found a {kind}"):
        generate(swapped, draft, [1])
    for wrong in (target, "dflash"):
        kind = type(wrong).__name__
        with pytest.raises(ValueError, match=rf"draft: expected a DFlashDraft .*, found a {kind}"):
            generate(target, wrong, [1])


@pytest.mark.parametrize("array", [np.asarray, lambda x: np.asarray(x, np.uint8), jnp.asarray])
def test_ids_may_be_arrays_of_any_library(array):
    target, draft = table()
    expected = generate(target, draft, [1, 2], 9)
    for prompt in (array([1, 2]), list(array([1, 2]))):
        assert generate(target, draft, prompt, array(9)).token_ids == expected.token_ids
    (out,) = generate(target, draft, array([[1, 2]]), array([9]), stop_token_ids=array([11]))
    assert out.token_ids == expected.token_ids
    session = SpecSession(target, draft, widths=array([2, 3]))
    session.open(array([[1, 2]]), 5)
    session.burst()
    session.resume(array([[7]]), 4)
    assert session.results()[0].token_ids == [8]


@pytest.mark.parametrize("rounds", [-1, 1.5, "1", True])
def test_rounds_are_whole_numbers(rounds):
    target, draft = table()
    session = SpecSession(target, draft)
    session.open([[1]], 5)
    with pytest.raises(
        ValueError, match=f"rounds: expected an integer from 0 .*, found {rounds!r}"
    ):
        session.burst(rounds)
    with pytest.raises(ValueError, match="rounds: expected an integer from 1 or None"):
        list(session.stream(rounds))
    with pytest.raises(ValueError, match="rounds: expected an integer from 1 or None, found 0"):
        list(session.stream(0))  # would never end
    session.burst(2**40)
    assert session.done


def test_positions_and_sequences_are_whole_numbers():
    target, draft = table()
    session = SpecSession(target, draft)
    for wrong in (1.5, True, "x", None):
        with pytest.raises(ValueError, match=f"draft_from: expected an integer, found {wrong!r}"):
            session.open([[1, 2, 3]], 5, draft_from=wrong)
    with pytest.raises(ValueError, match="tail: expected a DraftTail, found 5"):
        session.open([[1, 2, 3]], 5, tail=5)
    session.open([[1, 2, 3]], 5)
    for wrong in (-1, 1, True, "x"):
        with pytest.raises(ValueError, match=rf"sequence: expected 0\.\.0, found {wrong!r}"):
            session.export_tail(wrong)
    with pytest.raises(ValueError, match=r"upto: expected 0\.\.3 .*, found 1\.5"):
        session.export_tail(upto=1.5)


@pytest.mark.parametrize("capacity", [0, 65])
def test_capacity_is_within_the_models_context(capacity):
    target = table_target(CYCLE, max_positions=64)
    session = SpecSession(target, right_draft(target), capacity=capacity)
    with pytest.raises(ValueError, match=rf"capacity: expected 1\.\.64, found {capacity}"):
        session.open([[1]], 5)


def test_a_prompt_longer_than_the_models_context_is_refused():
    target = table_target(CYCLE, max_positions=64)
    with pytest.raises(ValueError, match=r"prompt: expected at most 64 tokens .*, found 65"):
        generate(target, right_draft(target), [1] * 65, 5)


def test_a_session_must_be_opened_first():
    target, draft = table()
    session = SpecSession(target, draft)
    opened = (lambda: session.resume([[1]]), lambda: session.done, session.export_tail)
    for call in (session.burst, session.results, *opened):
        with pytest.raises(ValueError, match=r"session: expected open\(\) first"):
            call()


def test_a_resume_needs_a_suffix_a_sequence():
    target, draft = table()
    session = SpecSession(target, draft)
    session.open([[1], [2]], 5)
    with pytest.raises(ValueError, match=r"suffixes: expected 2 \(one a sequence\), found 1"):
        session.resume([[1]])


def test_a_drafter_of_another_target_is_refused_before_anything_runs():
    config = dataclasses.replace(
        TINY, target_layer_ids=(0, 1, 2, 3, 4), num_target_layers=None, hidden_size=32
    )
    target = tiny_target(
        dataclasses.replace(
            TINY_TARGET, hidden_size=48, num_hidden_layers=5, layer_window=(None,) * 5
        )
    )
    with pytest.raises(ValueError, match=r"hidden_size: .* 32 .*160 wide.* 48 \(240 wide\)"):
        SpecSession(target, tiny_draft(config))


def test_a_mask_outside_the_embedding_is_refused_before_anything_runs():
    draft = tiny_draft(dataclasses.replace(TINY, mask_token_id=64, vocab_size=None))
    with pytest.raises(ValueError, match=r"mask_token_id: .* 64 embedding rows, found 64"):
        SpecSession(tiny_target(), draft)


# --- faults ------------------------------------------------------------------------------------


def spoiled(leaves, sequence):
    """NaN in every row that one sequence has committed."""
    return [leaf.at[sequence].set(jnp.nan) for leaf in leaves]


def test_non_finite_draft_logits_name_slot_and_sequence():
    target, draft = table()
    session = SpecSession(target, draft)
    session.open([PROMPT, [4], [5, 6]], 30)
    kv = session.state.draft
    session.state = session.state.replace(draft=kv.replace(v=spoiled(kv.v, 1)))
    with pytest.raises(ValueError, match=r"^non-finite draft logits: sequence 1, draft slot 1$"):
        session.burst()


def test_features_that_overflow_f16_are_an_error_and_not_a_draft():
    """Case 84: of NaN a top-k would make ids 0, 1, ..., none of them ever accepted."""
    target = tiny_target()
    draft = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), tiny_draft())
    plain = generate(target, None, [1, 2, 3], 6).token_ids
    assert generate(target, draft, [1, 2, 3], 6).token_ids == plain
    louder = draft.replace(fc=draft.fc * jnp.float16(6e4))
    with pytest.raises(ValueError, match=r"^non-finite draft logits: sequence 0, draft slot 1$"):
        generate(target, louder, [1, 2, 3], 6)


@pytest.mark.parametrize(
    ("side", "row", "message"),
    [
        ("draft", 2, "draft logits: sequence 1, draft slot 3"),
        ("target", 2, "target logits: sequence 1, verify row 2"),
    ],
)
def test_faults_are_named_by_slot_or_row(side, row, message):
    target, draft = table()
    session = SpecSession(target, draft)
    session.open([PROMPT, [4]], 30)
    session.state = session.state.replace(**{f"{side}_fault": jnp.asarray([-1, row])})
    with pytest.raises(ValueError, match=f"^non-finite {message}$"):
        session.burst(0)


def test_non_finite_target_logits_name_row_and_sequence():
    target, draft = tiny_target(), tiny_draft()
    session = SpecSession(target, draft)
    session.open([[1, 2, 3], [4]], 30)
    state = session.state.target
    session.state = session.state.replace(target=state.replace(v=spoiled(state.v, 1)))
    with pytest.raises(ValueError, match=r"^non-finite (target|draft) logits: sequence 1, "):
        session.burst()


def test_a_target_that_is_broken_from_the_start_says_so_at_open():
    target = tiny_target()
    broken = target.replace(norm=target.norm * jnp.nan)
    with pytest.raises(ValueError, match=r"^non-finite target logits: sequence 0, verify row 0$"):
        SpecSession(broken, tiny_draft()).open([[1, 2, 3]], 30)
