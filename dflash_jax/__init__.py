"""DFlash block drafters for speculative decoding, as pure jitted JAX.

from dflash_jax import generate, load_draft, load_target
loaded = load_target("smollm2")
draft = load_draft("my-drafter", loaded.target)
out = generate(loaded.target, draft, loaded.text.encode("Hello"), max_new_tokens=64)
"""

from dflash_jax.batch import Piece, Request, Slots, serve, stream
from dflash_jax.checkpoint import load_draft, save_draft
from dflash_jax.compare import Comparison, compare
from dflash_jax.config import DFlashConfig, DSparkHarvest, resolve_harvest
from dflash_jax.config_json import dspark_strategy_census, read_config
from dflash_jax.conv import DFlash2Conv, d2_conv_finish, d2_conv_prepare
from dflash_jax.cost import measure_costs
from dflash_jax.draft import (
    DFlashDraft,
    DFlashLayer,
    ctx_features,
    forward,
    forward_block,
    forward_round,
    ingest_ctx,
)
from dflash_jax.kv import DraftKV
from dflash_jax.markov import ConfidenceHead, MarkovHead
from dflash_jax.propose import dflash2_propose_greedy, dflash2_propose_sampled
from dflash_jax.results import Generation
from dflash_jax.sampling import SamplingParams, rejection_accept_len
from dflash_jax.selector import (
    DFlash2Head,
    dflash2_walk_greedy,
    dflash2_walk_greedy_q,
    dflash2_walk_sampled,
)
from dflash_jax.session import SessionOptions, SpecSession, generate
from dflash_jax.sharding import make_mesh
from dflash_jax.streaming import Stream, generate_stream
from dflash_jax.targets import HostedTarget, Target, TreeTarget
from dflash_jax.targets.loading import LoadedTarget, load_target
from dflash_jax.tree import DraftTree
from dflash_jax.window import (
    DSparkVtPolicy,
    dspark_accept_prefix,
    dspark_confidence_vt,
    dspark_slot_confidence_vt,
)

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "ConfidenceHead",
    "DFlash2Conv",
    "DFlash2Head",
    "DFlashConfig",
    "DFlashDraft",
    "DFlashLayer",
    "DSparkHarvest",
    "DSparkVtPolicy",
    "DraftKV",
    "DraftTree",
    "Generation",
    "HostedTarget",
    "LoadedTarget",
    "MarkovHead",
    "Piece",
    "Request",
    "SamplingParams",
    "Slots",
    "SessionOptions",
    "SpecSession",
    "Stream",
    "Target",
    "TreeTarget",
    "compare",
    "ctx_features",
    "d2_conv_finish",
    "d2_conv_prepare",
    "dflash2_propose_greedy",
    "dflash2_propose_sampled",
    "dflash2_walk_greedy",
    "dflash2_walk_greedy_q",
    "dflash2_walk_sampled",
    "dspark_accept_prefix",
    "dspark_confidence_vt",
    "dspark_slot_confidence_vt",
    "dspark_strategy_census",
    "forward",
    "forward_block",
    "forward_round",
    "generate",
    "generate_stream",
    "ingest_ctx",
    "load_draft",
    "load_target",
    "make_mesh",
    "measure_costs",
    "read_config",
    "rejection_accept_len",
    "resolve_harvest",
    "save_draft",
    "serve",
    "stream",
]
