"""Checkpoints of the three families: what loads, what is refused, and that every tensor counts."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401 - registers bfloat16 with numpy
import numpy as np
import pytest
from families import FAMILIES, ORACLES, stage, trained
from safetensors.numpy import load_file, save_file
from targets import F32, TINY, tiny_target

from dflash_jax import load_draft, read_config, save_draft
from dflash_jax.config import DFlash2Config, DSparkConfig
from dflash_jax.config_json import parse_config
from dflash_jax.draft import ctx_features, forward_block
from dflash_jax.propose import draft_logits, propose
from dflash_jax.sampling import Filters
from dflash_jax.shapes import abstract
from dflash_jax.sharding import named_leaves
from dflash_jax.tables import tensor_table

CHECKPOINTS = {
    "dflash": ORACLES / "tiny" / "dflash",
    "dspark": ORACLES / "tiny" / "dspark",
    "dflash2": ORACLES / "tiny" / "dflash2",
    "dspark_gated": stage("dspark_gated") / "checkpoint",
    "dspark_rnn": stage("dspark_rnn") / "checkpoint",
    "dspark_plain_confidence": stage("dspark_rnn") / "checkpoint_conf_plain",
    "dflash2_k3": stage("dflash2_k3") / "checkpoint",
}
WEIGHTS = "model.safetensors"


@pytest.fixture
def copy(tmp_path):
    """A checkpoint's copy and a function that changes its config and its tensors."""

    def make(name, config=None, tensors=None):
        source = CHECKPOINTS.get(name, name)
        directory = tmp_path / "drafter"
        shutil.copytree(source, directory)
        raw = json.loads((directory / "config.json").read_text())
        if config is not None:
            config(raw)
        (directory / "config.json").write_text(json.dumps(raw))
        held = load_file(directory / WEIGHTS)
        if tensors is not None:
            tensors(held)
        save_file(held, directory / WEIGHTS)
        return directory

    return make


def drop(*parts):
    """Removes every tensor whose name contains one of `parts`."""

    def change(tensors):
        for name in [n for n in tensors if any(part in n for part in parts)]:
            del tensors[name]

    return change


def nested(**values):
    """Says `values` in `dflash_config` and nowhere else."""

    def change(raw):
        for key in values:
            raw.pop(key, None)
        raw["dflash_config"] |= values

    return change


# --- what loads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_families_have_their_parts_and_no_other(name):
    draft = load_draft(CHECKPOINTS[name], dtype=F32)
    family = draft.config.family
    assert family == name.split("_")[0]
    assert (draft.markov is not None) == (family == "dspark")
    assert (draft.confidence is not None) == (family == "dspark")
    assert (draft.dflash2 is not None) == (family == "dflash2")
    assert draft.head is None
    for layer in draft.layers:
        assert (layer.attention_conv is not None) == (family == "dflash2")
        assert (layer.mlp_conv is not None) == (family == "dflash2")


@pytest.mark.parametrize(
    ("name", "kind", "with_markov"),
    [
        ("dspark", "vanilla", True),
        ("dspark_gated", "gated", True),
        ("dspark_rnn", "rnn", True),
        ("dspark_plain_confidence", "rnn", False),
    ],
)
def test_dspark_heads(name, kind, with_markov):
    draft = load_draft(CHECKPOINTS[name], dtype=F32)
    assert draft.markov.kind == kind
    assert draft.confidence.with_markov == with_markov
    hidden, rank = draft.config.hidden_size, draft.config.dspark.markov_rank
    assert draft.confidence.weight.shape == (1, hidden + rank * with_markov)


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saving_and_loading_is_exact(name, dtype, tmp_path):
    draft = load_draft(CHECKPOINTS[name], dtype=dtype)
    save_draft(draft, tmp_path / "again")
    again = load_draft(tmp_path / "again", dtype=dtype)
    assert again.config == draft.config
    for (path, a), (_, b) in zip(named_leaves(draft), named_leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=path)


@pytest.mark.parametrize("name", ["dspark_gated", "dflash2"])
def test_int8_storage_covers_the_heads(name, tmp_path):
    draft = load_draft(CHECKPOINTS[name], dtype="bfloat16")
    save_draft(draft, tmp_path / "small", storage="int8")
    held = load_file(tmp_path / "small" / WEIGHTS)
    head = {"dspark_gated": "markov_head.markov_w1.weight", "dflash2": None}[name]
    head = head or "candidate_selector.successor_codebook"
    assert held[head].dtype == np.int8
    again = load_draft(tmp_path / "small", dtype="bfloat16")
    for (path, a), (_, b) in zip(named_leaves(draft), named_leaves(again), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        step = np.abs(a).max(axis=-1, keepdims=True) / 127
        # Half a step of the row, and bf16's rounding of a value of it.
        assert (np.abs(a - b) <= 0.5 * step + 2**-8 * np.abs(a) + 1e-6).all(), path


# --- the census -----------------------------------------------------------------------------------


def five_layers(family):
    return dataclasses.replace(
        TINY,
        family=family,
        num_hidden_layers=5,
        layer_causal=(False,) * 5,
        layer_window=(None,) * 5,
        dflash2=DFlash2Config(2, 16, 8, 4) if family == "dflash2" else None,
        dspark=DSparkConfig("vanilla", 8, True, True) if family == "dspark" else None,
    )


def test_dflash2_adds_23_tensors_to_58():
    """4 L + 3 to 11 L + 3, at five layers."""
    backbone, two = tensor_table(five_layers("dflash")), tensor_table(five_layers("dflash2"))
    assert len(backbone) == 58
    assert len(two) == 58 + 23
    assert set(backbone) < set(two)
    assert two["layers.4.mlp_conv.base_kernel"].shape == (2, 2, 32)
    assert two["layers.0.attention_conv.kernel_projection.weight"].shape == (2 * 2 * 2, 32)
    assert two["candidate_selector.hidden_projection.weight"].shape == (8, 32)
    assert two["candidate_selector.successor_codebook"].shape == (64, 8)


def test_dspark_adds_its_heads():
    extra = set(tensor_table(five_layers("dspark"))) - set(tensor_table(five_layers("dflash")))
    assert extra == {
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_table_names_every_tensor_of_a_published_file(name):
    """Exactly, and with the shape it has there."""
    held = load_file(CHECKPOINTS[name] / WEIGHTS)
    table = tensor_table(load_draft(CHECKPOINTS[name]).config)
    assert {n: t.shape for n, t in held.items()} == {n: e.shape for n, e in table.items()}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_table_fills_every_leaf_exactly(name):
    """Each row of each leaf comes from one tensor."""
    draft = load_draft(CHECKPOINTS[name])
    filled = {path: np.zeros(leaf.shape[0], int) for path, leaf in named_leaves(draft)}
    for entry in tensor_table(draft.config).values():
        filled[entry.leaf][entry.start : entry.start + entry.shape[0]] += 1
    assert all((rows == 1).all() for rows in filled.values())


def test_a_stripped_dflash2_is_refused(copy):
    """Never run as plain DFlash."""
    directory = copy("dflash2", tensors=drop("_conv.", "candidate_selector."))
    with pytest.raises(ValueError, match=r"missing tensors candidate_selector\..* and 3 more"):
        load_draft(directory)


@pytest.mark.parametrize(
    "part", ["layers.1.mlp_conv.base_kernel", "hidden_projection", "successor_codebook"]
)
def test_a_dflash2_without_one_of_its_tensors_is_refused(copy, part):
    with pytest.raises(ValueError, match=rf"missing tensors \S*{part}"):
        load_draft(copy("dflash2", tensors=drop(part)))


@pytest.mark.parametrize("family", ["dspark", "dflash2"])
def test_left_over_tensors_are_refused(copy, family):
    def add(tensors):
        tensors["layers.0.self_attn.extra.weight"] = np.zeros((2, 2), np.float32)

    with pytest.raises(ValueError, match=r"unused tensors layers\.0\.self_attn\.extra\.weight"):
        load_draft(copy(family, tensors=add))


@pytest.mark.parametrize("name", ["dspark", "dflash2"])
def test_a_familys_tensors_under_a_plain_config_are_refused(copy, name):
    def plain(raw):
        raw["architectures"] = ["DFlashDraftModel"]
        raw["dflash_config"].pop("projector_type", None)

    with pytest.raises(ValueError, match="declares family 'dflash', found tensors of another"):
        load_draft(copy(name, config=plain))


def test_codebooks_load_under_both_spellings(copy):
    def rename(tensors):
        for side in ("predecessor", "successor"):
            name = f"candidate_selector.{side}_codebook"
            tensors[name + ".weight"] = tensors.pop(name)

    plain = load_draft(CHECKPOINTS["dflash2"]).dflash2
    suffixed = load_draft(copy("dflash2", tensors=rename)).dflash2
    for name in ("predecessor", "successor"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(suffixed, name))
    assert not np.array_equal(plain.predecessor, plain.successor)


def test_one_codebook_under_two_spellings_is_refused(copy):
    def double(tensors):
        name = "candidate_selector.successor_codebook"
        tensors[name + ".weight"] = tensors[name]

    with pytest.raises(ValueError, match=r"found tensors of another|unused tensors"):
        load_draft(copy("dflash2", tensors=double))


# --- config against tensors -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dspark", {"markov_rank": 16}, "markov_rank: config.json says 16, the tensors say 32"),
        ("dspark", {"markov_rank": 0, "confidence_head_with_markov": False},
         "markov_rank: config.json says 0, the tensors say 32"),
        ("dspark", {"markov_head_type": "rnn"},
         "markov_head_type: config.json says 'rnn', the tensors say 'vanilla'"),
        ("dspark_gated", {"markov_head_type": "vanilla"},
         "markov_head_type: config.json says 'vanilla', the tensors say 'gated'"),
        ("dspark", {"enable_confidence_head": False},
         "enable_confidence_head: config.json says False, the tensors say True"),
        ("dspark", {"confidence_head_with_markov": False},
         "confidence_head_with_markov: config.json says False, the tensors say True"),
        ("dspark_plain_confidence", {"confidence_head_with_markov": True},
         "confidence_head_with_markov: config.json says True, the tensors say False"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_and_both_sides_named(copy, name, changes, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        load_draft(copy(name, config=nested(**changes)))


def test_a_confidence_head_that_is_announced_must_be_there(copy):
    with pytest.raises(ValueError, match=r"enable_confidence_head: config\.json says True"):
        load_draft(copy("dspark", tensors=drop("confidence_head")))


def test_without_statements_the_tensors_decide(copy):
    def silent(raw):
        for key in ("markov_rank", "markov_head_type", "enable_confidence_head",
                    "confidence_head_with_markov"):  # fmt: skip
            del raw["dflash_config"][key]

    draft = load_draft(copy("dspark_rnn", config=silent))
    assert draft.config.dspark == load_draft(CHECKPOINTS["dspark_rnn"]).config.dspark


@pytest.mark.parametrize("heads", ["none", "markov", "confidence"])
def test_dspark_with_fewer_heads_loads(copy, heads):
    """A Markov head alone; a confidence head of hidden rows alone; neither."""
    lost = {"none": ("markov_head", "confidence_head"), "markov": ("confidence_head",),
            "confidence": ("markov_head",)}[heads]  # fmt: skip
    stated = {
        "markov_rank": 16 if heads == "markov" else 0,
        "enable_confidence_head": heads == "confidence",
        "confidence_head_with_markov": False,
    }
    directory = copy("dspark_plain_confidence", nested(**stated), drop(*lost))
    draft = load_draft(directory)
    assert (draft.markov is not None) == (heads == "markov")
    assert (draft.confidence is not None) == (heads == "confidence")


def test_markov_features_without_a_markov_head_are_refused_by_both_names(copy):
    stated = nested(markov_rank=0, enable_confidence_head=True, confidence_head_with_markov=True)
    with pytest.raises(ValueError, match=r"confidence_head_with_markov: .* markov_rank is 0"):
        load_draft(copy("dspark", stated, drop("markov_head")))


@pytest.mark.parametrize("table", ["dflash_config", "dspark_config", None])
def test_head_settings_are_read_wherever_they_stand(copy, table):
    """A wrong rank is seen in each place, so each place is read."""

    def move(raw):
        settings = {
            key: raw["dflash_config"].pop(key)
            for key in ("markov_rank", "markov_head_type", "enable_confidence_head",
                        "confidence_head_with_markov")
        }  # fmt: skip
        raw["architectures"] = ["Qwen3DSparkModel"]
        (raw if table is None else raw.setdefault(table, {})).update(settings)

    directory = copy("dspark_rnn", move)
    config = read_config(directory)
    assert config.dspark == DSparkConfig("rnn", 16, True, True)
    assert load_draft(directory).config.dspark == config.dspark


def test_nested_settings_win_with_a_warning(copy):
    def both(raw):
        raw["markov_rank"] = 99

    with pytest.warns(UserWarning, match="markov_rank: dflash_config says 16, top level says 99"):
        draft = load_draft(copy("dspark_rnn", both))
    assert draft.config.dspark.markov_rank == 16


def test_the_flat_form_equals_the_nested_one():
    """It carries the target's tables too, which are not the drafter's to use."""
    tree = [
        load_draft(stage("dspark_vanilla") / name, dtype=F32)
        for name in ("checkpoint", "checkpoint_flat")
    ]
    assert tree[0].config == tree[1].config
    for (path, a), (_, b) in zip(*map(named_leaves, tree), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=path)


@pytest.mark.parametrize("kind", ["vanilla2", "lstm", 3])
def test_unknown_markov_heads_are_refused(copy, kind):
    with pytest.raises(
        ValueError, match=f"markov_head_type: expected vanilla, gated or rnn, .*{kind}"
    ):
        load_draft(copy("dspark", nested(markov_head_type=kind)))


def dflash2_raw():
    return json.loads((CHECKPOINTS["dflash2"] / "config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selector_top_k": 265}, "selector_top_k: expected at most vocab_size 264, found 265"),
        ({"selector_top_k": 0}, "selector_top_k: expected a positive integer, found 0"),
        ({"selector_rank": -1}, "selector_rank: expected a positive integer, found -1"),
        ({"conv_kernel_size": 0}, "conv_kernel_size: expected a positive integer, found 0"),
        ({"conv_group_size": 0}, "conv_group_size: expected a positive integer, found 0"),
        ({"conv_group_size": 24}, "conv_group_size: expected a divisor of hidden_size 128, found"),
        ({"block_size": 33}, "block_size: expected at most the sliding_window 32, found 33"),
        ({"output_multiplier": 0}, "output_multiplier: expected a positive finite number, found 0"),
    ],
)
def test_dflash2_settings_out_of_range(changes, message):
    raw = dflash2_raw()
    raw["dflash_config"] |= changes
    with pytest.raises(ValueError, match=message):
        parse_config(raw)


@pytest.mark.parametrize(
    "key", ["selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"]
)
def test_dflash2_settings_have_no_silent_default(key):
    raw = dflash2_raw()
    del raw["dflash_config"][key]
    with pytest.raises(ValueError, match=f"{key}: expected a positive integer, found nothing"):
        parse_config(raw)


@pytest.mark.parametrize("cap", [None, 0, -1.0])
def test_no_soft_cap(cap):
    raw = dflash2_raw()
    raw["dflash_config"]["final_logit_softcapping"] = cap
    assert parse_config(raw).final_logit_softcapping is None
    assert parse_config(dflash2_raw()).final_logit_softcapping == 20
    assert parse_config(dflash2_raw()).output_multiplier == 0.5


def test_dflash2_without_is_causal_is_warned_about():
    raw = dflash2_raw()
    assert parse_config(raw).layer_causal == (False, False)
    del raw["is_causal"]
    with pytest.warns(UserWarning, match="is_causal is absent"):
        assert parse_config(raw).layer_causal == (True, True)


# --- drafter against target -----------------------------------------------------------------------


@pytest.mark.parametrize("family", ["dspark", "dflash2"])
def test_tables_of_another_vocabulary_are_refused(family):
    config = dataclasses.replace(five_layers(family), num_target_layers=None, vocab_size=60,
                                 mask_token_id=3)  # fmt: skip
    with pytest.raises(
        ValueError, match="vocab_size: the drafter's tables have 60 rows, found a t"
    ):
        tiny_target().check_drafter(config)


@pytest.mark.parametrize("whole", [True, False], ids=["whole table", "rows of the head"])
def test_a_markov_output_table_beside_a_map_may_span_either_vocabulary(whole, copy):
    ids = np.arange(8) * 3 + 1

    def reduce(tensors):
        tensors["lm_head.weight"] = np.zeros((8, 128), np.float32)
        tensors["d2t"] = (ids - np.arange(8)).astype(np.int32)
        table = tensors["markov_head.markov_w2.weight"]
        tensors["markov_head.markov_w2.weight"] = table if whole else table[ids]

    target, draft = trained("dspark")
    loaded = load_draft(copy("dspark", tensors=reduce), target, dtype=F32)
    np.testing.assert_array_equal(loaded.markov.w2, draft.markov.w2[ids])
    np.testing.assert_array_equal(loaded.markov.w1, draft.markov.w1)


def test_a_dflash2_drafter_may_have_a_trimmed_head(copy):
    def reduce(tensors):
        tensors["lm_head.weight"] = np.zeros((16, 128), np.float32)
        tensors["d2t"] = np.arange(16, dtype=np.int64)

    draft = load_draft(copy("dflash2", tensors=reduce), trained("dflash2")[0])
    assert draft.head.d2t.tolist() == list(range(16))


# --- every tensor counts --------------------------------------------------------------------------


@functools.cache
def probe(name):
    """A drafter and a function of it: block rows, logits, drafts and their laws, confidences."""
    draft = load_draft(CHECKPOINTS[name], dtype=F32)
    config, rng = draft.config, np.random.default_rng(0)
    rows, block, hidden = 12, config.block_size, config.hidden_size
    taps = jnp.asarray(rng.normal(size=(1, rows, config.tap_size)), F32)
    noise = jnp.asarray(rng.normal(size=(1, block, hidden)), F32)
    pos = jnp.arange(rows + block)[None]
    table = jnp.asarray(rng.normal(size=(config.vocabulary, hidden)), F32)
    uniforms = jnp.asarray(rng.uniform(size=(1, block)), F32)
    sampled = Filters.off(1).replace(temperature=jnp.ones(1))

    class Head:
        def logits(self, rows):
            return rows @ table.T

    @jax.jit
    def outputs(draft):
        final = forward_block(draft, ctx_features(draft, taps), noise, pos)
        logits = draft_logits(Head(), draft, final)
        anchor = jnp.asarray([5])
        drawn = propose(draft, logits, final, anchor, sampled, uniforms, "sample")
        return final, logits, drawn

    return draft, outputs


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_zeroing_any_loaded_tensor_changes_an_output(name):
    draft, outputs = probe(name)
    leaves, tree = jax.tree.flatten(draft)
    paths = [path for path, _ in named_leaves(draft)]
    before = jax.tree.leaves(outputs(draft))
    unused = []
    for tensor, entry in tensor_table(draft.config).items():
        at = paths.index(entry.leaf)
        rows = slice(entry.start, entry.start + entry.shape[0])
        zeroed = [*leaves]
        zeroed[at] = leaves[at].at[rows].set(0)
        assert np.asarray(leaves[at][rows]).any(), tensor  # else zeroing shows nothing
        after = jax.tree.leaves(outputs(jax.tree.unflatten(tree, zeroed)))
        if all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)):
            unused.append(tensor)
    assert unused == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_tree_has_the_abstract_shapes(family):
    _, draft = trained(family)
    shapes = abstract(draft.config, F32)
    assert jax.tree.structure(shapes) == jax.tree.structure(draft)
    assert jax.tree.map(lambda s, x: (s.shape, s.dtype) == (x.shape, x.dtype), shapes, draft)
    mismatched = [
        path
        for (path, s), (_, x) in zip(named_leaves(shapes), named_leaves(draft), strict=True)
        if (s.shape, s.dtype) != (x.shape, x.dtype)
    ]
    assert mismatched == []
