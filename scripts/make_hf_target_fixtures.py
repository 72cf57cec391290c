"""Small random Qwen3 and Llama checkpoints with what transformers computes from them.

    pip install torch transformers
    python scripts/make_hf_target_fixtures.py     # writes tests/data/hf_targets/

Each directory holds a checkpoint as transformers saves it (bf16) and `reference.npz`: `ids [T]`,
`logits [T, V]` and `hidden_states [L + 1, T, H]` in float32, from one pass of the upcast model.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)
LLAMA = (transformers.LlamaConfig, transformers.LlamaForCausalLM)
MODELS = {
    # Heads wider than hidden / heads; the last two layers see 8 rows; the head is the embedding.
    "qwen3_sliding": (
        QWEN3,
        {
            "head_dim": 12,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "qwen3_yarn": (
        QWEN3,
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    # Several end tokens, as Llama 3.1's own config has.
    "llama3": (
        LLAMA,
        {
            "eos_token_id": [2, 5],
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 100,
            },
        },
    ),
}
ROWS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tests/data/hf_targets"))
    out = parser.parse_args().out
    for seed, (name, ((config_class, model_class), options)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**SHAPE, **options}))
        for module in model.modules():  # norms of ones would not show a wrong norm
            if "RMSNorm" in type(module).__name__:
                torch.nn.init.uniform_(module.weight, 0.5, 1.5)
        model.to(torch.bfloat16).save_pretrained(out / name)
        model = model_class.from_pretrained(out / name, dtype=torch.float32).eval()
        ids = torch.randint(SHAPE["vocab_size"], (ROWS,))
        with torch.inference_mode():
            result = model(ids[None], output_hidden_states=True)
        np.savez_compressed(
            out / name / "reference.npz",
            ids=ids.numpy().astype(np.int32),
            logits=result.logits[0].numpy(),
            hidden_states=torch.stack(result.hidden_states)[:, 0].numpy(),
        )


if __name__ == "__main__":
    main()
