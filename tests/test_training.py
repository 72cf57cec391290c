"""Training: the mask, the blocks and the loss against inference; packing; resuming."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import corpus as data
from dflash_jax import ctx_features, generate, load_draft
from dflash_jax.blocks import (
    Batch,
    block_hidden,
    draw_anchors,
    legal_anchors,
)
from dflash_jax.draft import DraftHead
from dflash_jax.losses import (
    Blocks,
    Heads,
    Recipe,
    head_loss,
    score_blocks,
    slot_weights,
)
from dflash_jax.propose import draft_logits, propose
from dflash_jax.shapes import init_draft
from dflash_jax.targets.hf import load_hf
from dflash_jax.training import (
    Features,
    Schedule,
    add_metrics,
    adopt_backbone,
    block_metrics,
    data_mesh,
    drafter_config,
    eval_step,
    family_config,
    restore_state,
    save_state,
    start_training,
    target_features,
    train_step,
    widen_mlp,
)
from dflash_jax.training import spread as share

TINY = Path(__file__).parent / "oracles" / "tiny"
STAGES = Path(__file__).parent / "oracles" / "stages"
RECIPE = Recipe(anchors=8, head_rows=16)


@pytest.fixture(scope="module")
def target():
    return load_hf(TINY / "target")


@pytest.fixture(scope="module")
def draft(target):
    return load_draft(TINY / "dflash", target)


@pytest.fixture(scope="module")
def texts():
    """Prompt and greedy continuation of every record."""
    records = json.loads((TINY / "expected.json").read_text())["prompts"]
    return [(r["prompt_ids"], r["greedy_target_ids"]) for r in records]


def rows_of(texts, width=None) -> Batch:
    width = width or max(len(p) + len(a) for p, a in texts)
    ids = np.zeros((len(texts), width), np.int32)
    segment, answer = np.zeros_like(ids), np.zeros(ids.shape, bool)
    for i, (prompt, reply) in enumerate(texts):
        n = len(prompt) + len(reply)
        ids[i, :n] = [*prompt, *reply]
        segment[i, :n] = 1
        answer[i, len(prompt) : n] = True
    return Batch(*map(jnp.asarray, (ids, segment, answer)))


def spread(draft, scale=0.3):
    """A random drafter of the same shape whose outputs differ plainly from row to row."""
    fresh = init_draft(draft.config, jax.random.key(1), jnp.float32)
    return jax.tree.map(lambda x: x * (scale / 0.02) if x.ndim == 2 else x, fresh)


def relative(ours, theirs):
    return float(jnp.abs(ours - theirs).max() / jnp.abs(theirs).max())


# --- loss -----------------------------------------------------------------------------------


def test_two_packed_documents_equal_two_separate_ones(target, draft, texts):
    """The same loss and metrics, whether documents share a row or not (case 109)."""
    draft = spread(draft)
    docs = [texts[0], (texts[1][0], texts[1][1][:40])]
    parts, features, anchors = [], [], []
    for doc in docs:
        batch = rows_of([doc])
        view = target_features(target, batch.ids, draft.config.target_layer_ids)
        index = jnp.nonzero(legal_anchors(batch)[0])[0][None]
        real = jnp.ones(index.shape, bool)
        parts.append(block_metrics(target, draft, view, batch, index, real, RECIPE))
        features.append(view)
        anchors.append(index)
    first = len(docs[0][0]) + len(docs[0][1])
    packed = Batch(
        ids=jnp.concatenate([rows_of([d]).ids for d in docs], 1),
        segment=jnp.concatenate(
            [jnp.full((1, len(p) + len(a)), i + 1) for i, (p, a) in enumerate(docs)], 1
        ),
        answer=jnp.concatenate([rows_of([d]).answer for d in docs], 1),
    )
    both = Features(
        *(jnp.concatenate([getattr(f, n) for f in features], 1) for n in ("hidden", "taps"))
    )
    index = jnp.concatenate([anchors[0], anchors[1] + first], 1)
    np.testing.assert_array_equal(index[0], jnp.nonzero(legal_anchors(packed)[0])[0])
    real = jnp.ones(index.shape, bool)
    together = block_metrics(target, draft, both, packed, index, real, RECIPE)
    separate = add_metrics(parts)
    np.testing.assert_allclose(together.loss, separate.loss, rtol=1e-5)
    for name in ("weight", "correct", "labelled", "gained", "blocks"):
        np.testing.assert_allclose(getattr(together, name), getattr(separate, name), rtol=1e-6)


def reference_loss(logits, teacher, labels, weights, recipe):
    """CE and KL by their definitions, in float64."""
    logits, teacher = (np.asarray(x, np.float64) for x in (logits, teacher))
    log_q = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    log_p = teacher - np.log(np.exp(teacher).sum(-1, keepdims=True))
    ce = -np.take_along_axis(log_q, np.asarray(labels)[:, None], 1)[:, 0]
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    return float(((recipe.ce * ce + recipe.kl * kl) * np.asarray(weights)).sum())


def test_head_loss_and_its_gradient(target, draft):
    """Against the definition, and against plain autodiff, over chunks that do not divide N."""
    recipe = Recipe(ce=0.3, kl=0.7, head_rows=5)
    shape = (7, 3)
    blocks = random_blocks(target, shape)
    rows, teacher, labels = blocks.rows, blocks.teacher, blocks.labels
    weights = jnp.where(blocks.labelled, jnp.exp(-jnp.arange(3.0) / recipe.gamma), 0.0)
    heads = Heads(None, None, None)

    def plain(rows):
        log_q = jax.nn.log_softmax(target.logits(rows))
        log_p = jax.nn.log_softmax(target.logits(teacher))
        ce = -jnp.take_along_axis(log_q, labels[..., None], -1)[..., 0]
        kl = (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
        return ((0.3 * ce + 0.7 * kl) * weights).sum()

    def ours(rows):
        return head_loss(recipe, target, draft, heads, blocks._replace(rows=rows))[0] * 2.0

    loss, weight, correct = head_loss(recipe, target, draft, heads, blocks)
    flat = (x.reshape(21, -1) for x in (target.logits(rows), target.logits(teacher)))
    expected = reference_loss(*flat, labels.reshape(-1), weights.reshape(-1), recipe)
    assert abs(float(loss) - expected) < 1e-5 * abs(expected)
    np.testing.assert_allclose(weight, weights.sum(), rtol=1e-6)
    np.testing.assert_array_equal(correct, target.logits(rows).argmax(-1) == labels)
    assert relative(jax.grad(ours)(rows), 2.0 * jax.grad(plain)(rows)) < 1e-5


def random_blocks(target, shape):
    keys = jax.random.split(jax.random.key(0), 5)
    rows, teacher = (jax.random.normal(k, (*shape, target.hidden_size)) for k in keys[:2])
    previous, labels = (jax.random.randint(k, shape, 0, target.vocab_size) for k in keys[2:4])
    return Blocks(rows, teacher, previous, labels, jax.random.bernoulli(keys[4], 0.7, shape))


def test_a_slot_weighs_as_often_as_decoding_reaches_it():
    """Slots with known probabilities; behind an unlabelled one nothing counts."""
    q = jnp.array([[0.5, 0.4, 0.9], [1.0, 1.0, 1.0], [0.5, 0.4, 0.9]])
    labelled = jnp.array([[True, True, True], [True, True, True], [True, False, True]])
    got = slot_weights(Recipe(weighting="reach"), jnp.log(q), labelled)
    lengths = np.array([1 + 0.5 + 0.2 + 0.18, 4.0, 1.5])[:, None]
    expected = np.array([[1, 0.5, 0.2], [1, 1, 1], [1, 0, 0]]) / lengths
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    with pytest.raises(ValueError, match="weighting: expected 'decay' or 'reach', found 'flat'"):
        slot_weights(Recipe(weighting="flat"), jnp.log(q), labelled)


@pytest.mark.parametrize("family", ["dspark", "dflash2"])
def test_the_heads_learn_in_chunks_as_at_once(target, draft, family):
    """Gradients of the heads' own weights, summed over chunks, equal plain autodiff's."""
    recipe = Recipe(ce=0.3, kl=0.2, l1=0.5, head_rows=5)
    config = family_config(draft.config, family, 8, 4)
    fresh = init_draft(config, jax.random.key(1), jnp.float32)
    keys = iter(jax.random.split(jax.random.key(2), 99))
    fresh = jax.tree.map(lambda x: 0.3 * jax.random.normal(next(keys), x.shape), fresh)
    heads = Heads(fresh.markov, fresh.confidence, fresh.dflash2)
    blocks = random_blocks(target, (7, 3))

    def chunked(heads, rows):
        return head_loss(recipe, target, draft, heads, blocks._replace(rows=rows))[0]

    def at_once(heads, rows):
        return score_blocks(recipe, target, draft, heads, blocks._replace(rows=rows))[0]

    got = jax.grad(chunked, argnums=(0, 1))(heads, blocks.rows)
    expected = jax.grad(at_once, argnums=(0, 1))(heads, blocks.rows)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(b).max()) > 0
        assert relative(a, b) < 1e-5


@pytest.mark.parametrize("family", ["dspark", "dflash2"])
def test_an_adopted_backbone_proposes_as_before(target, draft, texts, family):
    """What a family adds starts without effect, so training goes on from where DFlash was."""
    config = family_config(draft.config, family, 8, 4)
    fresh = adopt_backbone(init_draft(config, jax.random.key(0), jnp.float32), draft)
    batch = rows_of(texts[:1])
    features = target_features(target, batch.ids, config.target_layer_ids)
    feats = ctx_features(fresh, features.taps)
    noise = jax.random.normal(jax.random.key(3), (1, 1, config.block_size, config.hidden_size))
    anchors = jnp.full((1, 1), 20)
    old = block_hidden(draft, feats, noise, batch.segment, anchors)
    new = block_hidden(fresh, feats, noise, batch.segment, anchors)
    assert relative(new, old) < 1e-6
    logits, rows = draft_logits(target, fresh, new[0]), new[0]
    proposal = propose(fresh, logits, rows, jnp.zeros((1,), jnp.int32))
    np.testing.assert_array_equal(proposal.tokens, logits.argmax(-1))


def test_a_widened_drafter_proposes_as_before(target, draft, texts):
    """Its new units have inputs of their own and no effect yet; fewer units are refused."""
    units = draft.config.intermediate_size
    wide = widen_mlp(draft, units + 8, jax.random.key(0))
    assert wide.config.intermediate_size == units + 8
    for layer in wide.layers:
        gate, up = jnp.split(layer.gate_up, 2)
        for new in (gate[units:], up[units:]):
            assert new.any(axis=-1).all()
        assert not layer.down[:, units:].any()
    batch = rows_of(texts[:1])
    feats = ctx_features(
        draft, target_features(target, batch.ids, draft.config.target_layer_ids).taps
    )
    noise = jax.random.normal(
        jax.random.key(3), (1, 1, draft.config.block_size, draft.config.hidden_size)
    )
    anchors = jnp.full((1, 1), 20)
    old, new = (block_hidden(d, feats, noise, batch.segment, anchors) for d in (draft, wide))
    assert relative(new, old) < 1e-6
    small = draft.replace(config=dataclasses.replace(draft.config, precision="int8"))
    with pytest.raises(ValueError, match="precision: expected a drafter of floats, found int8"):
        widen_mlp(small, units + 8, jax.random.key(0))
    with pytest.raises(ValueError, match=f"expected {units}, the drafter's own, or more, found 1"):
        widen_mlp(draft, 1, jax.random.key(0))


def test_labels_outside_the_draft_vocabulary_weigh_nothing(target, draft, texts):
    """They are masked, not mapped to another id; those inside keep the full vocabulary's place."""
    kept = jnp.array([i for i in range(target.vocab_size) if i % 3])
    offsets = (kept - jnp.arange(len(kept))).astype(jnp.int32)
    small = draft.replace(head=DraftHead(target.lm_head[kept], offsets))
    batch = rows_of(texts[:2])
    anchors, real = draw_anchors(jax.random.key(5), batch, 16)
    view = target_features(target, batch.ids, draft.config.target_layer_ids)
    metrics = block_metrics(target, small, view, batch, anchors, real, RECIPE)
    full = block_metrics(target, draft, view, batch, anchors, real, RECIPE)
    ids, index = np.asarray(batch.ids), np.asarray(anchors)
    marked = np.asarray(batch.answer)
    for slot in range(1, draft.config.block_size):
        at = index + slot
        inside = (at < ids.shape[1]) & np.asarray(real)
        at = np.minimum(at, ids.shape[1] - 1)
        labelled = inside & np.take_along_axis(marked, at, 1)
        in_both = labelled & (np.take_along_axis(ids, at, 1) % 3 > 0)
        assert int(full.labelled[slot - 1]) == labelled.sum()
        assert int(metrics.labelled[slot - 1]) == in_both.sum()
    assert 0 < metrics.labelled.sum() < full.labelled.sum()
    assert jnp.isfinite(metrics.loss)


def test_teacher_rows_are_those_that_predict_the_label(target, draft, texts):
    """On greedy text the teacher's argmax is the label, in every slot of every block."""
    batch = rows_of(texts[:3])
    view = target_features(target, batch.ids, draft.config.target_layer_ids)
    anchors, _ = draw_anchors(jax.random.key(6), batch, 12)
    # A drafter that were the teacher: its rows are the target's own rows for the same slots.
    drafts = draft.config.block_size - 1
    at = (anchors[..., None] + jnp.arange(drafts)[None, None]).reshape(3, -1)
    rows = jnp.take_along_axis(view.hidden, at[..., None], 1)
    after = jnp.minimum(at + 1, batch.ids.shape[1] - 1)
    labels = jnp.take_along_axis(batch.ids, after, 1)
    inside = jnp.take_along_axis(batch.answer, after, 1) & (after == at + 1)
    agree = target.logits(rows).argmax(-1) == labels
    assert bool((agree | ~inside).all())


# --- acceptance in training and at inference -------------------------------------------------


def test_slot_one_accuracy_is_slot_one_acceptance(target, draft, texts):
    """Teacher-forced accuracy at the very anchors that generation used: within 2 points (110)."""
    batch = rows_of(texts)
    index = np.zeros((len(texts), 96), np.int32)
    real = np.zeros(index.shape, bool)
    accepted = rounds = 0
    for i, (prompt, answer) in enumerate(texts):
        out = generate(target, draft, prompt, max_new_tokens=len(answer), stop_token_ids=())
        assert out.token_ids == answer
        starts = len(prompt) + np.cumsum([0, *out.acceptance_lengths])[:-1]
        index[i, : len(starts)] = starts
        real[i, : len(starts)] = True
        # The last round is cut by the budget: leave it out on both sides.
        real[i, len(starts) - 1] = False
        accepted += sum(g > 1 for g in out.acceptance_lengths[:-1])
        rounds += out.rounds - 1
    view = target_features(target, batch.ids, draft.config.target_layer_ids)
    metrics = block_metrics(
        target, draft, view, batch, jnp.asarray(index), jnp.asarray(real), RECIPE
    )
    figures = metrics.summary()
    assert int(metrics.blocks) == rounds
    assert abs(figures["accuracy"][0] - accepted / rounds) < 0.02


# --- the step -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_run(target, texts):
    config = drafter_config(
        target, mask_token_id=256, taps=(1, 3), layers=1, intermediate_size=64, block_size=4
    )
    start = init_draft(config, jax.random.key(0), jnp.float32)
    return start, rows_of(texts[:4])


def run_steps(target, state, batch, recipe, schedule, first, last):
    losses = []
    for step in range(first, last):
        rate = jnp.float32(schedule.rate(step))
        state, metrics = train_step(
            target, state, batch, jnp.uint32(7), rate, recipe, jnp.dtype(jnp.float32)
        )
        losses.append(metrics.summary()["loss"])
    return state, losses


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_lowers_the_loss(target, small_run, optimizer):
    start, batch = small_run
    recipe = dataclasses.replace(RECIPE, optimizer=optimizer, ema=0.5)
    schedule = Schedule(30, 5e-3, warmup=3)
    state, losses = run_steps(target, start_training(start, recipe), batch, recipe, schedule, 0, 30)
    assert losses[-1] < 0.7 * losses[0]
    before = eval_step(target, start, batch, recipe, jnp.dtype(jnp.float32)).summary()
    after = eval_step(target, state.ema, batch, recipe, jnp.dtype(jnp.float32)).summary()
    assert after["loss"] < before["loss"]
    assert int(state.step) == 30
    assert state.draft.fc.dtype == jnp.float32


def test_a_resumed_run_is_the_same_run(target, small_run, tmp_path):
    start, batch = small_run
    schedule = Schedule(6, 3e-3, warmup=2)
    whole, _ = run_steps(target, start_training(start, RECIPE), batch, RECIPE, schedule, 0, 6)
    half, _ = run_steps(target, start_training(start, RECIPE), batch, RECIPE, schedule, 0, 3)
    save_state(half, tmp_path / "state.npz")
    again = restore_state(start_training(start, RECIPE), tmp_path / "state.npz")
    again, _ = run_steps(target, again, batch, RECIPE, schedule, 3, 6)
    jax.tree.map(np.testing.assert_array_equal, whole, again)


def test_several_devices_sample_the_rows_of_one(target):
    """And every conversation keeps its turns: template tokens where a side has ended."""
    chat = data.ChatFormat((1,), (2, 3), (2, 4))
    starts = data.make_starts([[1], [1, 70, 71], [9] * 5, [1, 8]], data.USER, 0.9, 1 << 20)
    options = data.SampleOptions(length=24, stages=(8, 24), user_limit=6)
    alone = data.sample_rows(target, chat, starts, 3, options)
    shared = data.sample_rows(target, chat, starts, 3, options, data_mesh(2))
    for a, b in zip(alone, shared, strict=True):
        np.testing.assert_array_equal(a, b)
    ids, answer = alone
    assert len({tuple(row[6:]) for row in ids}) == 4
    for row, spoken in zip(ids, answer, strict=True):
        ends = np.flatnonzero(row == 2)
        assert len(ends)
        assert row[ends[0] + 1] == 3
        assert not spoken[: ends[0] + 2].any()


def test_rows_that_cannot_be_sampled_are_refused(target):
    with pytest.raises(ValueError, match=r"stages: expected the last to hold 1024 tokens, found"):
        data.SampleOptions(length=1024)
    starts, chat = data.make_starts([[1]] * 3, data.USER), data.ChatFormat((1,), (2, 3), (2, 4))
    options = data.SampleOptions(length=8, stages=(8,))
    with pytest.raises(ValueError, match="batch: expected a multiple of 2 devices, found 3"):
        data.sample_rows(target, chat, starts, 0, options, data_mesh(2))


def test_several_devices_take_the_steps_of_one(target, small_run):
    start, batch = small_run
    start = init_draft(family_config(start.config, "dspark", 8, 4), jax.random.key(0), jnp.float32)
    args = target, batch, jnp.uint32(7), jnp.float32(1e-3), RECIPE, jnp.dtype(jnp.float32)
    alone, one = train_step(args[0], start_training(start, RECIPE), *args[1:])
    mesh = data_mesh(4)
    wide, state = (share(x, mesh, rows=False) for x in (target, start_training(start, RECIPE)))
    shared, four = train_step(wide, state, share(batch, mesh, rows=True), *args[2:], mesh)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    # The first moments are the gradients, scaled.
    ours, theirs = (jax.tree.leaves(s.opt_state[1][0].mu) for s in (jax.device_get(shared), alone))
    for a, b in zip(ours, theirs, strict=True):
        assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max()
    assert data_mesh(1) is None
    with pytest.raises(ValueError, match=r"devices: expected 1..8, found 9"):
        data_mesh(9)


def test_a_state_of_another_shape_is_refused(target, small_run, tmp_path):
    start, _ = small_run
    save_state(start_training(start, RECIPE), tmp_path / "state.npz")
    other = drafter_config(target, mask_token_id=256, taps=(1, 3), layers=1, block_size=4)
    fresh = start_training(init_draft(other, jax.random.key(0), jnp.float32), RECIPE)
    with pytest.raises(ValueError, match="intermediate_size: expected 256, found 64"):
        restore_state(fresh, tmp_path / "state.npz")


def test_a_state_of_another_config_or_of_none_is_refused(small_run, tmp_path):
    """What no shape tells, and what damage does."""
    start, _ = small_run
    state, file = start_training(start, RECIPE), tmp_path / "state.npz"
    save_state(state, file)
    other = dataclasses.replace(start.config, target_layer_ids=start.config.target_layer_ids[::-1])
    with pytest.raises(ValueError, match=r"target_layer_ids: expected \(3, 1\), found \(1, 3\)"):
        restore_state(start_training(start.replace(config=other), RECIPE), file)
    leaves = dict(np.load(file))
    for config, message in [
        (None, "expected the config of its drafter, found none"),
        (np.array(7), "expected the config of its drafter, found none"),
        (np.array("{}"), "config: .*expected"),
        (np.array("{"), "config: "),
    ]:
        changed = leaves | {"config": config}
        np.savez(file, **{name: leaf for name, leaf in changed.items() if leaf is not None})
        with pytest.raises(ValueError, match=message):
            restore_state(state, file)
    shape = leaves["draft.fc"][:1]
    np.savez(file, **leaves | {"draft.fc": shape})
    with pytest.raises(ValueError, match=r"draft\.fc: expected .* of float32, found \[1, "):
        restore_state(state, file)


def test_schedule():
    schedule = Schedule(100, 2.0, final=0.1, warmup=10)
    assert schedule.rate(0) == pytest.approx(0.2)
    assert schedule.rate(9) == pytest.approx(2.0)
    assert schedule.rate(55) == pytest.approx(1.1)
    assert schedule.rate(100) == schedule.rate(1000) == pytest.approx(0.2)
