"""The memory plan against what is really allocated, and the command that prints it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from families import FAMILIES, ORACLES, trained
from targets import F32, sliding_pair, table_target

from dflash_jax import SamplingParams, SpecSession, load_draft, loop, plan, quant, sharding
from dflash_jax.checkpoint import survey_draft
from dflash_jax.cli import main, make_parser
from dflash_jax.cli.models import abstract_models, load_models
from dflash_jax.config import DFlashConfig, DSparkConfig, RopeConfig
from dflash_jax.shapes import abstract
from dflash_jax.targets import dense
from dflash_jax.targets.loading import abstract_target

MODELS = ("--target", str(ORACLES / "tiny" / "target"))
PROMPT = list(range(40))
GREEDY = SamplingParams()


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def temporary(lowered):
    return lowered.compile().memory_analysis().temp_size_in_bytes


# --- what is allocated -------------------------------------------------------------------------


def open_session(family="dflash", sampling=GREEDY):
    """Two sequences under way, of 300 rows."""
    session = SpecSession(*trained(family), sampling=sampling, capacity=300)
    session.open([PROMPT, PROMPT[:9]], 20)
    return session


@pytest.fixture(scope="module")
def session():
    return open_session()


def allocated_to_the_byte(session):
    told = session.memory(300, 2)
    assert told.weights == nbytes((session.target, session.draft))
    assert told.target_kv == nbytes(session.state.target)
    assert told.draft_full + told.draft_ring == nbytes(session.state.draft)
    assert told.caches == nbytes(session.state)


def test_weights_caches_and_books_are_exact(session):
    allocated_to_the_byte(session)


def test_so_are_the_books_of_sampling():
    params = SamplingParams(temperature=0.7, repeat_penalty=1.1, logit_bias={3: -1.0})
    allocated_to_the_byte(open_session("dspark", params))


def test_rings_and_full_layers_are_told_apart():
    target, draft = sliding_pair()
    session = SpecSession(target, draft)
    short, long = session.memory(512), session.memory(1024)
    kv = jax.eval_shape(lambda: loop.empty_caches(target, draft, 1, 512)).draft
    ring = kv.k[0].size * 4 * 2 + kv.ring.pos.size * 4 + 4
    assert short.draft_ring == long.draft_ring == ring
    assert long.draft_full - short.draft_full == 512 * (2 * draft.config.kv_size * 4 + 4)


def test_a_draft_kv_of_int8_has_a_scale_for_each_row_and_head():
    target, draft = sliding_pair()
    heads, dim = draft.config.num_key_value_heads, draft.config.head_dim
    floats, int8 = (
        SpecSession(target, draft, draft_kv_dtype=dtype).memory(512) for dtype in ("auto", "int8")
    )
    for part, rows in (("draft_full", 512 + 16), ("draft_ring", 32 + 8 + 2 * 9 + 6)):
        saved = getattr(floats, part) - getattr(int8, part)
        assert saved == 2 * rows * heads * (3 * dim - 4)
    assert int8.target_kv == floats.target_kv and int8.books == floats.books


def test_the_plan_of_plain_decoding_has_no_drafter():
    target, _ = trained("dflash")
    told = SpecSession(target, None).memory(256)
    assert (told.draft, told.draft_full, told.draft_ring) == ((), 0, 0)
    assert "drafter" not in str(told)
    assert "draft KV" not in str(told)


def held(tree):
    """Bytes that each device holds of a tree, the same for all."""
    devices = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            devices[shard.device] = devices.get(shard.device, 0) + shard.data.nbytes
    [size] = set(devices.values())
    return size


def abstract_models_of(family, precision=None):
    target = abstract_target(ORACLES / "tiny" / "target", "float32")
    found = survey_draft(ORACLES / "tiny" / family, target, precision)
    return target, found.abstract("float32")


WHOLE = pytest.mark.filterwarnings("ignore:.* whole on each of")
"""On 4 devices the tiny models' two kv heads are."""


@WHOLE
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@pytest.mark.parametrize(("precision", "kv_dtype"), [(None, "auto"), ("q4_0", "int8")])
def test_over_a_mesh_weights_and_caches_are_what_one_device_holds(shape, precision, kv_dtype):
    """To the byte: shares of what is split, all of what is not, and no device is needed to say."""
    abstract = abstract_models_of("dspark", precision)
    options = {"capacity": 300, "draft_kv_dtype": kv_dtype}
    session = SpecSession(*abstract, mesh=sharding.planned_mesh(*shape), **options)
    told, mesh = session.memory(300, 4), sharding.make_mesh(*shape)
    target = sharding.shard(trained("dspark")[0], mesh)
    draft = load_draft(ORACLES / "tiny" / "dspark", target, F32, precision=precision)
    assert sum(part.nbytes for part in told.target) == held(target)
    assert sum(part.nbytes for part in told.draft) == held(draft)
    caches = loop.empty_caches(target, draft, 4, **options)
    assert told.target_kv == held(caches.target)
    assert told.draft_full + told.draft_ring == held(caches.draft)
    assert told.devices == shape


@WHOLE
@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 2), (8, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_so_are_books_and_the_programs_hold_what_is_estimated(family, shape):
    abstract = abstract_models_of(family)
    told = SpecSession(*abstract, mesh=sharding.planned_mesh(*shape), capacity=300).memory(300, 4)
    session = SpecSession(*trained(family), mesh=sharding.make_mesh(*shape), capacity=300)
    session.open([PROMPT] * 4, 20)
    assert told.weights == held((session.target, session.draft))
    assert told.caches == held(session.state)
    exact = session.memory(300, 4, compiled=True)
    assert told.total == pytest.approx(exact.total, rel=0.05)


# --- working memory ----------------------------------------------------------------------------


def test_the_compiled_figures_are_those_of_the_programs_that_run(session):
    told = session.memory(300, 2, prompt=len(PROMPT), compiled=True)
    assert told.chunk == 64
    target, draft, limit = session.target, session.draft, jnp.int32(5)
    args = target, draft, session.state, session._stops, limit, session.plan
    assert told.round == temporary(loop.decode.lower(*args))
    caches = loop.empty_caches(target, draft, 2, 300)
    ids, count = jnp.zeros((2, 64), jnp.int32), jnp.asarray([40, 9])
    assert told.prefill == temporary(loop.prefill_chunk.lower(target, draft, caches, ids, count))


SMOLLM2 = dense.DecoderConfig(
    hidden_size=576,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1536,
    num_hidden_layers=30,
    rms_norm_eps=1e-5,
    rope=RopeConfig(1e5),
    vocab_size=49152,
    embedding_rows=49152,
    max_position_embeddings=8192,
    layer_window=(None,) * 30,
    qk_norm=False,
    tied=True,
)
SMOLLM2_DRAFT = DFlashConfig(
    family="dspark",
    hidden_size=576,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    intermediate_size=1024,
    num_hidden_layers=3,
    rms_norm_eps=1e-5,
    rope=RopeConfig(1e5),
    block_size=12,
    mask_token_id=16,
    target_layer_ids=(2, 9, 16, 23, 28),
    layer_causal=(False,) * 3,
    layer_window=(None,) * 3,
    vocab_size=49152,
    dspark=DSparkConfig("vanilla", 32, True, True),
)


def checked(session, context, batch=1):
    """The estimate, its total compared with the one that the compiler tells."""
    estimate, exact = (session.memory(context, batch, compiled=c) for c in (False, True))
    assert estimate.total == pytest.approx(exact.total, rel=0.05)
    assert (estimate.compiled, exact.compiled) == (False, True)
    return estimate


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "batch", "context", "sampling"),
    [
        ("dflash", 4, 400, GREEDY),
        pytest.param("dspark", 4, 400, GREEDY, marks=SLOW),
        pytest.param("dflash2", 4, 400, GREEDY, marks=SLOW),
        pytest.param("dflash", 24, 1000, GREEDY, marks=SLOW),  # in tiles of keys
        pytest.param("dflash2", 4, 400, SamplingParams(temperature=1.0), marks=SLOW),
    ],
)
def test_estimates_are_within_5_percent_on_the_tiny_models(family, batch, context, sampling):
    """There most of the memory is working memory."""
    session = SpecSession(*trained(family), capacity=context, sampling=sampling)
    estimate = checked(session, context, batch)
    assert estimate.working > estimate.weights + estimate.caches


def smollm2(layers=30, **options):
    windows, taps = (None,) * layers, tuple(range(layers))[-5:]
    target = dataclasses.replace(SMOLLM2, num_hidden_layers=layers, layer_window=windows)
    draft = dataclasses.replace(SMOLLM2_DRAFT, target_layer_ids=taps)
    return SpecSession(dense.abstract(target, F32), abstract(draft, F32), **options)


@pytest.mark.parametrize("layers", [5, pytest.param(30, marks=SLOW)])
def test_estimates_are_within_5_percent_at_smollm2s_shape(layers):
    checked(smollm2(layers), 2048)


@SLOW
def test_sampling_takes_many_copies_of_the_logits():
    session = smollm2(5, sampling=SamplingParams(temperature=1.0, top_k=20))
    estimate, exact = (session.memory(512, 4, compiled=c) for c in (False, True))
    assert estimate.round == pytest.approx(exact.round, rel=0.05)
    assert exact.round > 6 * 4 * 13 * 49152 * 4


def test_only_the_dense_decoder_is_estimated():
    target = table_target([1, 2, 3, 0])
    session = SpecSession(target, None)
    with pytest.raises(NotImplementedError, match=r"expected a DenseTarget .* a TableTarget"):
        session.memory(64)
    assert session.memory(64, compiled=True).total > 0


# --- the census --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_array_is_in_one_part(family):
    for model in trained(family):
        parts, leaves = plan.census(model), jax.tree.leaves(model)
        assert sum(part.tensors for part in parts) == len(leaves)
        assert sum(part.parameters for part in parts) == sum(leaf.size for leaf in leaves)
        assert sum(part.nbytes for part in parts) == nbytes(model)
    names = {part.name for part in parts}
    own = {"dspark": {"markov head", "confidence head"}, "dflash2": {"convolutions", "selector"}}
    assert names == {"features (fc)", "attention", "mlp", "norms"} | own.get(family, set())


@pytest.mark.parametrize("family", FAMILIES)
def test_abstract_models_have_the_shapes_of_the_loaded_ones(family):
    target, draft = trained(family)
    abstract = abstract_target(ORACLES / "tiny" / "target", "float32")
    found = survey_draft(ORACLES / "tiny" / family, abstract).abstract("float32")
    for ours, loaded in ((abstract, target), (found, draft)):
        assert jax.tree.structure(ours) == jax.tree.structure(loaded)
        shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(ours)]
        assert shapes == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(loaded)]


@pytest.mark.parametrize("rows", ["all", "40"])
def test_abstract_quantised_and_trimmed_drafters_have_the_shapes_of_the_loaded_ones(rows):
    options = ["--draft-precision", "q4_0", "--draft-head-rows", rows]
    arguments = ["generate", "1", "--target", str(ORACLES / "tiny" / "target"), *options]
    args = make_parser().parse_args([*arguments, "--draft", str(ORACLES / "tiny" / "dspark")])
    loaded, shapes = load_models(args)[1], abstract_models(args)[1]
    assert jax.tree.structure(shapes) == jax.tree.structure(loaded)
    for ours, leaf in zip(jax.tree.leaves(shapes), jax.tree.leaves(loaded), strict=True):
        assert (ours.shape, ours.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.parametrize("precision", quant.PRECISIONS)
def test_quantised_matrices_are_the_weights_that_they_stand_for_and_the_bytes_that_they_take(
    precision,
):
    floats = {part.name: part for part in plan.census(abstract_models_of("dspark")[1])}
    parts = plan.census(abstract_models_of("dspark", precision)[1])
    loaded = load_draft(ORACLES / "tiny" / "dspark", dtype=F32, precision=precision)
    assert parts == plan.census(loaded)
    assert sum(part.nbytes for part in parts) == nbytes(loaded)
    assert [part.parameters for part in parts] == [floats[part.name].parameters for part in parts]
    bits = {"int8": 8, "q8_0": 8.5, "q4_0": 4.5}[precision]
    [mlp] = (part for part in parts if part.name == "mlp")
    assert mlp.nbytes * 8 / mlp.parameters == pytest.approx(bits, rel=0.06)


def test_a_drafter_of_another_target_is_refused_from_headers_alone():
    abstract = abstract_target(ORACLES / "tiny" / "target")
    with pytest.raises(ValueError, match="hidden_size: the drafter expects 64"):
        survey_draft(ORACLES / "stages" / "dspark_vanilla" / "checkpoint", abstract)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 << 29, "1.50 GiB"),
        (1 << 50, "1024.00 TiB"),
    ],
)
def test_amounts(size, text):
    assert plan.amount(size) == text


# --- the command -------------------------------------------------------------------------------


def test_the_command_prints_the_plan(capsys):
    target, draft = trained("dflash2")
    options = [*MODELS, "--draft", str(ORACLES / "tiny" / "dflash2"), "--context", "700"]
    assert main(["plan", *options, "--batch", "3", "--dtype", "float32"]) == 0
    text = capsys.readouterr().out
    told = SpecSession(target, draft).memory(700, 3)
    assert text == f"{told}\n"
    assert text.startswith("3 sequences of 1024 rows, float32, prompts in chunks of 256\n")
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 24


def test_the_command_plans_for_devices_that_are_not_here(capsys):
    options = [*MODELS, "--draft", str(ORACLES / "tiny" / "dflash"), "--json", "--batch", "16"]
    assert main(["plan", *options]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert main(["plan", *options, "--tp", "2", "--data", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (alone["devices"], found["devices"]) == ([1, 1], [2, 16])
    assert found["target_kv"] * 32 - alone["target_kv"] == 16 * 4  # `len` is not split by heads
    assert 0.5 < found["weights"] / alone["weights"] < 0.51
    assert main(["plan", *options[:-3], "--batch", "16", "--tp", "2", "--data", "16"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "on each of 32 devices: 2 tensor-parallel x 16 data"


def test_the_command_prints_json(capsys):
    target, draft = trained("dflash")
    options = [*MODELS, "--draft", str(ORACLES / "tiny" / "dflash"), "--json", "--chunk", "64"]
    assert main(["plan", *options, "--block-size", "4", "--dtype", "bfloat16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["capacity"], found["chunk"], found["dtype"]) == (1024, 64, "bfloat16")
    assert found["weights"] == nbytes((target, draft)) / 2
    assert found["total"] == found["weights"] + found["caches"] + found["prefill"]
    assert found["device_memory"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--context", "1025"), "context: expected 1..1024, found 1025"),
        (("--context", "300", "--capacity", "200"), "context: expected at most 200 (capacity)"),
        (("--batch", "0"), "batch: expected 1.."),
        (("--chunk", "1"), "chunk: expected 16.."),
        (("--draft", "nowhere"), "drafter: expected a directory or one of"),
        (("--draft", "none", "--block-size", "4"), "--block-size: expected a drafter to apply"),
        (("--target", "nowhere"), "found 'nowhere'"),
        (("--tp", "0"), "mesh: expected 1 or more devices, found 0 x 1"),
        (("--tp", "5"), "mesh: expected 5 tensor-parallel devices to divide some of the target's"),
        (("--tp", "2", "--data", "2"), "batch: expected a multiple of 2 (data axis), found 1"),
        (("--tp", "16", "--compiled"), "mesh: expected 1 to 8 devices, found 16"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, message, capsys):
    draft = ("--draft", str(ORACLES / "tiny" / "dflash"))
    assert main(["plan", *MODELS, *draft, "--context", "256", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
