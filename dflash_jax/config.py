"""What a drafter is: geometry, family, rope, masks and harvest; and whether it fits a target.

`DFlashConfig` is frozen and hashable, so it can be a static argument of a jitted function. It is
read from a `config.json` by `config_json`.
"""

import dataclasses
import enum
from typing import Literal

from dflash_jax.quant import Precision

Family = Literal["dflash", "dspark", "dflash2"]


class DSparkHarvest(enum.Enum):
    """Which output rows of a block are drafts.

    `DFLASH` (mask-fill): rows 1..b-1, row r was trained for position anchor + r.
    `DSPARK` (shifted): rows 0..b-1, row r was trained for position anchor + r + 1.
    """

    DFLASH = "dflash"
    DSPARK = "dspark"

    @property
    def first_row(self) -> int:
        """The block row that holds draft 1."""
        return 1 if self is DSparkHarvest.DFLASH else 0

    def drafts(self, block_size: int) -> int:
        """How many drafts a block of `block_size` rows yields."""
        return block_size - self.first_row


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters, in the field names of Hugging Face `rope_parameters`.

    `rope_type` is `default`, `yarn` or `llama3`; fields a type does not use stay None.
    """

    theta: float
    rope_type: Literal["default", "yarn", "llama3"] = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None


MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclasses.dataclass(frozen=True)
class DSparkConfig:
    """What a DSpark config states of its heads; None where it is silent and the tensors decide.

    `markov_rank` 0 means no Markov head.
    """

    markov_head_type: MarkovKind | None = None
    markov_rank: int | None = None
    confidence: bool | None = None
    confidence_with_markov: bool | None = None


@dataclasses.dataclass(frozen=True)
class DFlash2Config:
    """DFlash2's convolutions and selector."""

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """Static description of a drafter (semantics of every field: `config_json.parse_config`).

    Per-layer tuples (`layer_causal`, `layer_window`) are already resolved from `layer_types`,
    `is_causal` and `sliding_window`; `layer_window` is None on layers that see everything.
    `precision` is the format of quantised projections (see `quant`), None for floats.
    """

    family: Family
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    rope: RopeConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    layer_causal: tuple[bool, ...]
    layer_window: tuple[int | None, ...]
    vocab_size: int | None = None
    num_target_layers: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    dspark: DSparkConfig | None = None
    dflash2: DFlash2Config | None = None
    precision: Precision | None = None

    @property
    def vocabulary(self) -> int:
        """`vocab_size`, for the parts of a drafter that have a row a token."""
        if self.vocab_size is None:
            raise ValueError(f"vocab_size: expected one in a {self.family} config, found nothing")
        return self.vocab_size

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def tap_size(self) -> int:
        """Width of one row of concatenated target taps."""
        return len(self.target_layer_ids) * self.hidden_size


def resolve_harvest(
    config: DFlashConfig, harvest: DSparkHarvest | str | None = None
) -> DSparkHarvest:
    """The harvest to use: an explicit one wins, else what the checkpoint's family says.

    Raises ValueError for an unknown value and for `dspark` on a DFlash2 checkpoint.
    """
    default = DSparkHarvest.DSPARK if config.family == "dspark" else DSparkHarvest.DFLASH
    if harvest is None:
        return default
    try:
        chosen = DSparkHarvest(harvest)
    except ValueError:
        raise ValueError(f"harvest: expected 'dflash' or 'dspark', found {harvest!r}") from None
    if config.family == "dflash2" and chosen is DSparkHarvest.DSPARK:
        raise ValueError("harvest: a DFlash2 checkpoint is mask-fill, found 'dspark'")
    return chosen


def check_against_target(
    config: DFlashConfig, *, hidden_size: int, num_layers: int, embedding_rows: int
) -> None:
    """Refuse a drafter that was not trained for this target (ValueError, both sizes named)."""
    if config.hidden_size != hidden_size:
        taps = len(config.target_layer_ids)
        raise ValueError(
            f"hidden_size: the drafter expects {config.hidden_size} "
            f"({taps} taps, {config.tap_size} wide), found a target with {hidden_size} "
            f"({taps * hidden_size} wide)"
        )
    bad = [i for i in config.target_layer_ids if i >= num_layers]
    if bad:
        raise ValueError(
            f"target_layer_ids: expected ids in 0..{num_layers - 1} "
            f"(the target has {num_layers} layers), found {bad!s:.200}"
        )
    if config.num_target_layers is not None and config.num_target_layers != num_layers:
        raise ValueError(
            f"num_target_layers: the drafter expects {config.num_target_layers}, "
            f"found a target with {num_layers} layers"
        )
    rows, markov = config.vocab_size, config.dspark is not None and config.dspark.markov_rank
    short = config.dflash2 is not None and rows is not None and rows < embedding_rows
    if short or (markov and rows != embedding_rows):
        # The family's tables have a row a token; an index past the last would clamp silently.
        raise ValueError(
            f"vocab_size: the drafter's tables have {rows} rows, found a target with "
            f"{embedding_rows}"
        )
    if config.mask_token_id >= embedding_rows:
        raise ValueError(
            f"mask_token_id: expected an id below the target's {embedding_rows} embedding rows, "
            f"found {config.mask_token_id}"
        )
