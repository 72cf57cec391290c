"""The tensors of a drafter's checkpoint: names, exact shapes, and the leaves that they fill."""

from dflash_jax.config import DFlash2Config, DFlashConfig, DSparkConfig, MarkovKind
from dflash_jax.head import LM_HEAD
from dflash_jax.leaves import Entry

MARKOV, CONFIDENCE, SELECTOR = "markov_head.", "confidence_head.proj.", "candidate_selector."
MARKOV_IN, MARKOV_OUT = MARKOV + "markov_w1.weight", MARKOV + "markov_w2.weight"
MIXES: dict[MarkovKind, str] = {"gated": "gate_proj", "rnn": "joint_proj"}
FAMILY_PARTS = (MARKOV, "confidence_head.", SELECTOR)
DSPARK_KEYS = {
    "markov_head_type": "markov_head_type",
    "markov_rank": "markov_rank",
    "confidence": "enable_confidence_head",
    "confidence_with_markov": "confidence_head_with_markov",
}


def tensor_table(config: DFlashConfig, head_rows: int | None = None) -> dict[str, Entry]:
    """Checkpoint name -> `Entry` for every tensor the config requires.

    11 L + 3 for the backbone, 4 L + 3 more for DFlash2, the heads' own for DSpark, and a head of
    `head_rows` rows where the drafter has its own (its `d2t`, no float, is not in the table).
    """
    hidden, q, kv = config.hidden_size, config.q_size, config.kv_size
    ff, dim = config.intermediate_size, config.head_dim
    table = {
        "fc.weight": Entry((hidden, config.tap_size), "fc"),
        "hidden_norm.weight": Entry((hidden,), "hidden_norm"),
        "norm.weight": Entry((hidden,), "norm"),
    }
    for i in range(config.num_hidden_layers):
        name, leaf = f"layers.{i}.", f"layers.{i}."
        table |= {
            name + "input_layernorm.weight": Entry((hidden,), leaf + "input_norm"),
            name + "self_attn.q_proj.weight": Entry((q, hidden), leaf + "qkv"),
            name + "self_attn.k_proj.weight": Entry((kv, hidden), leaf + "qkv", q),
            name + "self_attn.v_proj.weight": Entry((kv, hidden), leaf + "qkv", q + kv),
            name + "self_attn.q_norm.weight": Entry((dim,), leaf + "q_norm"),
            name + "self_attn.k_norm.weight": Entry((dim,), leaf + "k_norm"),
            name + "self_attn.o_proj.weight": Entry((hidden, q), leaf + "o"),
            name + "post_attention_layernorm.weight": Entry((hidden,), leaf + "post_norm"),
            name + "mlp.gate_proj.weight": Entry((ff, hidden), leaf + "gate_up"),
            name + "mlp.up_proj.weight": Entry((ff, hidden), leaf + "gate_up", ff),
            name + "mlp.down_proj.weight": Entry((hidden, ff), leaf + "down"),
        }
    if config.dflash2 is not None:
        table |= _dflash2_table(config, config.dflash2)
    if config.dspark is not None:
        table |= _dspark_table(config, config.dspark, head_rows)
    if head_rows is not None:
        table[LM_HEAD] = Entry((head_rows, hidden), "head.lm_head")
    return table


def _dflash2_table(config: DFlashConfig, two: DFlash2Config) -> dict[str, Entry]:
    hidden, taps, rank = config.hidden_size, two.conv_kernel_size, two.selector_rank
    rows = 2 * taps * (hidden // two.conv_group_size)
    table = {
        SELECTOR + "hidden_projection.weight": Entry((rank, hidden), "dflash2.hidden_projection"),
    }
    for side in ("predecessor", "successor"):
        name, shape = f"{SELECTOR}{side}_codebook", (config.vocabulary, rank)
        table[name] = Entry(shape, f"dflash2.{side}", aliases=(name + ".weight",))
    for i in range(config.num_hidden_layers):
        for conv in ("attention_conv", "mlp_conv"):
            name = f"layers.{i}.{conv}."
            table[name + "base_kernel"] = Entry((2, taps, hidden), name + "base_kernel")
            table[name + "kernel_projection.weight"] = Entry(
                (rows, hidden), name + "kernel_projection"
            )
    return table


def _dspark_table(
    config: DFlashConfig, spark: DSparkConfig, head_rows: int | None
) -> dict[str, Entry]:
    hidden, rank, table = config.hidden_size, spark.markov_rank or 0, {}
    if rank:
        table[MARKOV_IN] = Entry((config.vocabulary, rank), "markov.w1")
        table[MARKOV_OUT] = Entry((head_rows or config.vocabulary, rank), "markov.w2")
    mix = {"gated": (rank, hidden + rank), "rnn": (3 * rank, 2 * rank + hidden)}
    if rank and spark.markov_head_type in mix:
        shape, name = mix[spark.markov_head_type], MARKOV + MIXES[spark.markov_head_type]
        table[name + ".weight"] = Entry(shape, "markov.mix")
        table[name + ".bias"] = Entry(shape[:1], "markov.mix_bias")
    if spark.confidence:
        width = hidden + (rank if spark.confidence_with_markov else 0)
        table[CONFIDENCE + "weight"] = Entry((1, width), "confidence.weight")
        table[CONFIDENCE + "bias"] = Entry((1,), "confidence.bias")
    return table
