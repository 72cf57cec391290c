"""SmolLM2, the default target, against what transformers computes from the same file.

`scripts/make_smollm2_fixture.py` recorded the numbers and says how.
"""

import dataclasses
import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES
from table_law import chi_square_p, filtered
from target_files import relative_error

from dflash_jax import SpecSession, load_draft
from dflash_jax.checkpoint import draft_directory
from dflash_jax.sampling import SamplingParams
from dflash_jax.targets import load_target, loading
from dflash_jax.window import DSparkVtPolicy

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(loading.SMOLLM2_PACKAGE) is None,
    reason=f"the weights are not here (CI installs them): {loading.SMOLLM2_INSTALL}",
)
REFERENCE = Path(__file__).parent / "data" / "smollm2_reference"
RECORD = json.loads(REFERENCE.with_suffix(".json").read_text(encoding="utf-8"))
PROMPTS = range(len(RECORD["prompts"]))
TAPS = tuple(RECORD["source"]["taps"])
ROWS = 96
"""Rows of every forward: the longest prompt and its 32 new tokens fit."""


@pytest.fixture(scope="module")
def smollm2():
    return load_target("smollm2", jnp.float32)


@pytest.fixture(scope="module")
def arrays():
    return np.load(REFERENCE.with_suffix(".npz"))


@pytest.fixture(scope="module")
def outputs(smollm2):
    """For a prompt: logits `[rows, V]` and taps of the prompt and the recorded continuation."""

    @jax.jit
    def forward(target, ids):
        output, _ = target.forward(target.init_state(1, ROWS), ids[None], TAPS)
        return target.logits(output.hidden)[0], output.taps[0]

    results = {}

    def of(i):
        if i not in results:
            ids = RECORD["prompts"][i]["ids"] + RECORD["prompts"][i]["greedy_ids"]
            padded = np.zeros(ROWS, np.int32)
            padded[: len(ids)] = ids  # causal: what follows changes nothing before it
            results[i] = jax.tree.map(np.asarray, forward(smollm2.target, padded))
        return results[i]

    return of


def test_the_file_is_the_recorded_one():
    digest = hashlib.sha256(loading.find_smollm2().read_bytes()).hexdigest()
    assert digest == RECORD["source"]["sha256"]
    assert loading.SMOLLM2_PACKAGE not in sys.modules


def test_geometry(smollm2):
    config = smollm2.target.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (576, 30, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.tied and not config.qk_norm
    assert smollm2.target.stop_token_ids == (smollm2.text.token_to_id("<|im_end|>"),) == (2,)
    assert smollm2.name == "smollm2"


@pytest.mark.parametrize("i", PROMPTS)
def test_token_ids(smollm2, i):
    prompt = RECORD["prompts"][i]
    if "messages" in prompt:
        assert smollm2.text.render_chat(prompt["messages"]) == prompt["rendered"]
        assert smollm2.text.encode_chat(prompt["messages"]) == prompt["ids"]
    assert smollm2.text.encode(prompt["rendered"]) == prompt["ids"]
    assert smollm2.text.decode(prompt["ids"], skip_special_tokens=False) == prompt["rendered"]


def test_the_digit_step_is_exercised():
    assert [p["digits_step_matters"] for p in RECORD["prompts"]].count(True) == 1


@pytest.mark.parametrize("i", PROMPTS)
def test_logits(outputs, arrays, i):
    logits = outputs(i)[0][len(RECORD["prompts"][i]["ids"]) - 1]
    largest, stride = arrays[f"{i}_top_ids"], RECORD["source"]["stride"]
    assert relative_error(logits[largest], arrays[f"{i}_top_logits"]) < 1e-4
    assert relative_error(logits[::stride], arrays[f"{i}_strided_logits"]) < 1e-4
    assert np.argmax(logits) == largest[0]
    if f"{i}_logits" in arrays:
        assert relative_error(logits, arrays[f"{i}_logits"]) < 1e-4


@pytest.mark.parametrize("i", PROMPTS)
def test_greedy_tokens(outputs, i):
    """Every recorded token is the best after those before it; no gap there is near rounding."""
    prompt = RECORD["prompts"][i]
    first, greedy = len(prompt["ids"]) - 1, prompt["greedy_ids"]
    assert prompt["min_margin"] > 5e-3
    assert outputs(i)[0][first : first + len(greedy)].argmax(-1).tolist() == greedy


def test_taps(outputs, arrays):
    """Layer outputs after the first prompt; the last layer's is after the final norm."""
    last = len(RECORD["prompts"][0]["ids"]) - 1
    for found, expected in zip(np.split(outputs(0)[1][last], 3), arrays["0_taps"], strict=True):
        assert relative_error(found, expected) < 1e-4


# --- the law of what is sampled with the shipped drafters -----------------------------------------

LAW = SamplingParams(temperature=0.8, top_p=0.95, seed=5)
PROMPT = "Once upon a time"
SAMPLED, TOGETHER, LENGTH = 1024, 64, 3


@jax.jit
def last_logits(target, ids):
    output, _ = target.forward(target.init_state(len(ids), ids.shape[1]), ids)
    return target.logits(output.hidden[:, -1])


def law_of_two(smollm2, prompt, params):
    """The exact law of the first two tokens, `{(a, b): probability}`, in f64."""
    logits = np.asarray(last_logits(smollm2.target, jnp.asarray([prompt])), np.float64)[0]
    first = filtered(params, logits)
    firsts = np.flatnonzero(first)
    after = jnp.asarray([[*prompt, a] for a in firsts], jnp.int32)
    seconds = np.asarray(last_logits(smollm2.target, after), np.float64)
    return {
        (int(a), int(b)): first[a] * second[b]
        for a, second in zip(firsts, (filtered(params, row) for row in seconds), strict=True)
        for b in np.flatnonzero(second)
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_shipped_drafter_leaves_the_targets_law_as_it_is(smollm2, family):
    """Of the first two tokens; the second is a draft that was accepted, or what replaced one."""
    target, prompt = smollm2.target, smollm2.text.encode(PROMPT)
    draft = load_draft(draft_directory(family), target, jnp.float32)
    law, pairs, accepted = law_of_two(smollm2, prompt, LAW), [], 0
    assert len(law) > 50 and sum(law.values()) == pytest.approx(1)
    for begin in range(0, SAMPLED, TOGETHER):
        params = [dataclasses.replace(LAW, sequence=begin + i) for i in range(TOGETHER)]
        session = SpecSession(
            target,
            draft,
            sampling=params,
            block_size=4,
            policy=DSparkVtPolicy("fixed"),
            stop_token_ids=(),
        )
        session.open([prompt] * TOGETHER, LENGTH)
        session.burst(1)
        pairs += [tuple(row) for row in np.asarray(session.state.tokens)[:, :2].tolist()]
        accepted += int((np.asarray(session.state.accepted) > 0).sum())
    assert accepted > SAMPLED // 10, "drafts that are never accepted would show nothing"
    cells = {pair: at for at, pair in enumerate(law)}
    assert set(pairs) <= set(cells)
    counts = np.bincount([cells[pair] for pair in pairs], minlength=len(cells))
    assert chi_square_p(counts, np.array(list(law.values()))) > 1e-4
    warmer = law_of_two(smollm2, prompt, dataclasses.replace(LAW, temperature=1.1))
    assert chi_square_p(counts, np.array([warmer.get(pair, 0.0) for pair in cells])) < 1e-6
