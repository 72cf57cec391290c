"""Targets that PyTorch runs: every token is torch's own, whatever is drafted.

For developers: skipped where torch or transformers (5.15 or newer) is not installed. The models are
tiny and random, made from configs.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import FAMILIES, ORACLES, assert_close, trained
from targets import TINY, random_tree

from dflash_jax import SamplingParams, SpecSession, compare, generate
from dflash_jax.draft import abstract
from dflash_jax.targets.loading import load_target
from dflash_jax.targets.torch import TorchTarget, load_torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip(
        "transformers", minversion="5.15", reason="transformers 5.15 is not installed"
    )

pytestmark = pytest.mark.filterwarnings("ignore")

F32 = jnp.dtype(jnp.float32)
VOCABULARY, MASK = 64, 63
PROMPTS = ([5, 3, 8, 13, 21], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [40])
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MIXED = ["linear_attention", "full_attention"] * 2
CONFIGS = {
    "qwen3": {},
    "llama": {},
    "qwen3 with windows": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 6, "final_logit_softcapping": 3.0},
    "qwen3_moe": EXPERTS,
    "qwen3_next": LINEAR | EXPERTS | {"layer_types": MIXED},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
}
HYBRIDS = ("qwen3_next", "lfm2")


@functools.cache
def model_of(name):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name.split()[0], **COMMON | CONFIGS[name])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@functools.cache
def target_of(name):
    return TorchTarget(model_of(name))


@functools.cache
def draft_of(layers=4):
    """A random drafter: hardly ever right, so that rows are taken back in every round."""
    import dataclasses

    return random_tree(abstract(dataclasses.replace(TINY, num_target_layers=layers), F32), 1)


def own(name, prompt, count):
    """Torch's own greedy decode: its whole context again for each token, no cache at all."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model_of(name)(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@functools.cache
def right_head(name):
    """The random drafter proposes what torch says for half of the prompts' continuations: see
    `half_right`."""


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tokens_are_torchs_own(name):
    expected = [own(name, prompt, 14) for prompt in PROMPTS]
    outs = generate(target_of(name), draft_of(), PROMPTS, 14, check=True)
    assert [out.token_ids for out in outs] == expected
    assert [out.token_ids for out in generate(target_of(name), None, PROMPTS, 14)] == expected
    # Random drafts are right now and then, so rows were kept and rows were taken back.
    assert 0 < sum(out.accepted for out in outs) < sum(out.drafted for out in outs)


def test_a_batch_is_its_sequences_alone():
    together = generate(target_of("qwen3"), draft_of(), PROMPTS, [9, 14, 3])
    for prompt, count, out in zip(PROMPTS, (9, 14, 3), together, strict=True):
        alone = generate(target_of("qwen3"), draft_of(), prompt, count)
        assert out.token_ids == alone.token_ids
        assert out.acceptance_lengths == alone.acceptance_lengths
