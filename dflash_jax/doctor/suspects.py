"""The plausible wrong settings: other readings of a config, and other arrangements of the weights.

Each suspect says what a checkpoint's maker may have meant instead. The likely ones come first, for
the time may not suffice for all.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from dflash_jax.config import DFlashConfig, DSparkHarvest, RopeConfig
from dflash_jax.doctor.probe import CANDIDATES, Setting
from dflash_jax.draft import DFlashDraft
from dflash_jax.tables import tensor_table
from dflash_jax.targets import dense

THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)
WINDOWS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
EPSILONS = (1e-6, 1e-5)
MULTIPLIERS = (0.25, 0.5, 2.0, 4.0)
CAPS = (None, 10.0, 20.0, 30.0, 50.0)
FACTORS = (0.1, 10.0, 0.5, 2.0, -1.0)
MOST_ORDERS = 24
"""Orders of taps or layers tried: all where there are no more, else the reverse and neighbours."""


@dataclasses.dataclass(frozen=True)
class Suspect:
    """One other setting. name: of the config's key or the tensors; says: what it would be instead.

    calibrates: it also makes the drafter more or less sure of itself, so that only what it accepts
    can speak for it, not the probabilities.
    """

    name: str
    says: str
    setting: Setting
    calibrates: bool = False


def suspects(
    base: Setting, target: dense.DenseTarget, masks: Sequence[int], longest: int
) -> Iterator[Suspect]:
    """Every suspect around `base`, the likely ones first.

    masks: other ids that the mask token may be. longest: tokens of a text; wider windows than that
    show nothing.
    """
    config, layers = base.config, target.config.num_hidden_layers

    def other(name: str, says: object, calibrates: bool = False, **changes) -> Suspect:
        known = {f.name for f in dataclasses.fields(Setting)}
        ours = {k: v for k, v in changes.items() if k in known}
        rest = {k: v for k, v in changes.items() if k not in known}
        setting = dataclasses.replace(base, config=dataclasses.replace(config, **rest), **ours)
        return Suspect(name, str(says), setting, calibrates)

    for taps in other_taps(config.target_layer_ids, layers):
        says = str(list(taps))
        if sorted(taps) == sorted(config.target_layer_ids):  # the same thing, told from the file
            says += " (or fc.weight's column blocks, in that order)"
        yield other("target_layer_ids", says, target_layer_ids=taps)
    if layers - 1 in config.target_layer_ids:
        says = "the last layer's output " + ("before", "after")[base.raw_last] + " the final norm"
        yield other("target_layer_ids", says, raw_last=not base.raw_last)
    if config.family != "dflash2":
        flipped = DSparkHarvest.DFLASH if base.harvest.first_row == 0 else DSparkHarvest.DSPARK
        yield other("harvest", flipped.value, harvest=flipped)
    for rope in other_ropes(config.rope, target.config.rope):
        yield other("rope", rope_words(rope), rope=rope)
    for causal in other_flags(config.layer_causal):
        says = causal[0] if len(set(causal)) == 1 else list(causal)
        yield other("is_causal", str(says).lower(), layer_causal=causal)
    for window in other_windows(config.layer_window, longest):
        says = window[0] if len(set(window)) == 1 else list(window)
        yield other("sliding_window", "none" if says is None else says, layer_window=window)
    for size in dict.fromkeys((config.block_size // 2, config.block_size - 1)):
        if size >= 2:
            yield other("block_size", size, block_size=size)
    for mask in masks:
        yield other("mask_token_id", mask, mask_token_id=mask)
    for eps in dict.fromkeys((target.config.rms_norm_eps, *EPSILONS)):
        if not 0.5 < eps / config.rms_norm_eps < 2:
            yield other("rms_norm_eps", f"{eps:g}", rms_norm_eps=eps)
    for scale in (1.0, math.sqrt(config.hidden_size)):
        if scale != config.input_embedding_scale:
            yield other("input_embedding_scale", f"{scale:g}", input_embedding_scale=scale)
    if config.dflash2 is not None or config.dspark is not None:
        yield from _logit_suspects(config, other)
    yield from weight_suspects(base)


def _logit_suspects(config: DFlashConfig, other: Callable[..., Suspect]) -> Iterator[Suspect]:
    """What shapes the draft logits; a plain DFlash drafter's argmax does not depend on it."""
    multiplier = config.output_multiplier
    for value in dict.fromkeys((1.0, *(multiplier * m for m in MULTIPLIERS))):
        if value != multiplier:
            yield other("output_multiplier", f"{value:g}", True, output_multiplier=value)
    for cap in CAPS:
        if cap != config.final_logit_softcapping:
            says = "off" if cap is None else f"{cap:g}"
            yield other("final_logit_softcapping", says, True, final_logit_softcapping=cap)
    two = config.dflash2
    for k in (4, 8, CANDIDATES):
        if two is not None and k > two.selector_top_k:
            wider = dataclasses.replace(two, selector_top_k=k)
            yield other("selector_top_k", k, True, dflash2=wider)


def other_taps(taps: tuple[int, ...], layers: int) -> Iterator[tuple[int, ...]]:
    """All shifted by one or two, in another order, and one alone moved."""
    shifted = [tuple(t + by for t in taps) for by in (-1, 1, -2, 2)]
    moved = [(*taps[:i], taps[i] + by, *taps[i + 1 :]) for by in (-1, 1) for i in range(len(taps))]
    if len(taps) * layers <= MOST_ORDERS:
        moved += [(*taps[:i], t, *taps[i + 1 :]) for i in range(len(taps)) for t in range(layers)]
    found = [*shifted, *orders(taps), *moved]
    spread = len(taps)
    if spread > 1:
        found.append(tuple(round(1 + i * (layers - 4) / (spread - 1)) for i in range(spread)))
    for other in dict.fromkeys(found):
        inside = all(-1 <= t < layers for t in other)
        if inside and other != taps and len(set(other)) == len(other):
            yield other


def orders(items: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Other orders of the items: the reverse first, then all, or neighbours swapped."""
    found = [items[::-1]]
    if math.factorial(len(items)) <= MOST_ORDERS:
        found += list(itertools.permutations(items))
    for i in range(len(items) - 1):
        found.append((*items[:i], items[i + 1], items[i], *items[i + 2 :]))
    found += [(*items[1:], items[0]), (items[-1], *items[:-1])]
    return [other for other in dict.fromkeys(found) if other != items]


def other_ropes(rope: RopeConfig, targets: RopeConfig) -> Iterator[RopeConfig]:
    """The target's own, the scaling dropped, and common thetas."""
    found = [targets, RopeConfig(rope.theta)]
    found += [dataclasses.replace(rope, theta=theta) for theta in (targets.theta, *THETAS)]
    yield from (other for other in dict.fromkeys(found) if other != rope)


def rope_words(rope: RopeConfig) -> str:
    """A rope for a sentence: theta, and the scaling where there is one."""
    scaling = "" if rope.rope_type == "default" else f" with {rope.rope_type} x{rope.factor:g}"
    return f"theta {rope.theta:g}{scaling}"


def other_flags(causal: tuple[bool, ...]) -> Iterator[tuple[bool, ...]]:
    """All layers the one way, the other way, and each alone flipped."""
    found = [(True,) * len(causal), (False,) * len(causal)]
    found += [(*causal[:i], not causal[i], *causal[i + 1 :]) for i in range(len(causal))]
    yield from (other for other in dict.fromkeys(found) if other != causal)


def other_windows(
    windows: tuple[int | None, ...], longest: int
) -> Iterator[tuple[int | None, ...]]:
    """No window, common ones, half and double the stated one, and each layer alone without."""
    stated = {w for w in windows if w is not None}
    sizes = [v for w in stated for v in (w // 2, 2 * w)] + list(WINDOWS)
    found: list[tuple[int | None, ...]] = [(None,) * len(windows)]
    found += [(size,) * len(windows) for size in sizes if 1 < size < longest]
    found += [tuple(None if j == i else w for j, w in enumerate(windows)) for i in range(8)]
    visible = tuple(None if w is None or w >= longest else w for w in windows)
    yield from (other for other in dict.fromkeys(found) if other not in (windows, visible))


# --- other weights --------------------------------------------------------------------------------

Edit = Callable[[DFlashDraft], DFlashDraft]


class Tensors:
    """A drafter's tensors by the names they have on disk, to be read and replaced.

    Everything happens on the host: a hundred edits of as many shapes would each be compiled.
    """

    def __init__(self, draft: DFlashDraft):
        self._table = tensor_table(draft.config)
        flat, self._tree = jax.tree_util.tree_flatten_with_path(draft)
        paths = [jax.tree_util.keystr(p, simple=True, separator=".") for p, _ in flat]
        self._leaves = dict(zip(paths, [leaf for _, leaf in flat], strict=True))

    def get(self, name: str) -> np.ndarray:
        """The tensor, not to be written to."""
        entry = self._table[name]
        return np.asarray(self._leaves[entry.leaf])[entry.start : entry.start + entry.shape[0]]

    def set(self, name: str, value: np.ndarray) -> None:
        """Put `value` in its place."""
        entry = self._table[name]
        leaf = np.array(self._leaves[entry.leaf])
        leaf[entry.start : entry.start + entry.shape[0]] = value
        self._leaves[entry.leaf] = leaf

    def done(self) -> DFlashDraft:
        """The drafter with all that was set."""
        return jax.tree_util.tree_unflatten(self._tree, list(self._leaves.values()))


def replaced(names: Sequence[str], change: Callable[..., Sequence[np.ndarray]]) -> Edit:
    """The edit that gives tensors `names` what `change` makes of their values."""

    def edit(draft: DFlashDraft) -> DFlashDraft:
        tensors = Tensors(draft)
        for name, value in zip(names, change(*map(tensors.get, names)), strict=True):
            tensors.set(name, value)
        return tensors.done()

    return edit


def after(first: Edit | None, second: Edit) -> Edit:
    """Both edits, one after the other."""
    return second if first is None else lambda draft: second(first(draft))


def weight_suspects(base: Setting) -> Iterator[Suspect]:
    """Tensors swapped, turned over, scaled, or without effect."""
    config = base.config
    count, table = config.num_hidden_layers, tensor_table(config)

    def other(name: str, says: str, edit: Edit, calibrates: bool = False) -> Suspect:
        setting = dataclasses.replace(base, edit=after(base.edit, edit))
        return Suspect(name, says, setting, calibrates)

    def swap(a: str, b: str) -> Suspect:
        return other(f"{a} and {b}", "swapped", replaced((a, b), lambda x, y: (y, x)))

    for order in orders(tuple(range(count))):

        def reorder(draft: DFlashDraft, order=order) -> DFlashDraft:
            return draft.replace(layers=[draft.layers[i] for i in order])

        yield other("layers", f"in the order {list(order)}", reorder)
    for a, b in twins(config):
        yield swap(a, b)
    for name in table:
        for says, change in arrangements(name, table[name].shape, config):
            edit = replaced((name,), lambda x, change=change: (change(x),))
            yield other(name, says, edit, name == "norm.weight")
    yield from _rotary_suspects(config, other)
    for names, says in silences(config):
        quiet = replaced(names, lambda *xs: tuple(map(np.zeros_like, xs)))
        yield other(says, "left out", quiet, True)
    for factor in FACTORS:
        for name in table:
            if scale_matters(name):
                scaled = replaced((name,), lambda x, factor=factor: (x * factor,))
                yield other(name, f"times {factor:g}", scaled, True)


def twins(config: DFlashConfig) -> Iterator[tuple[str, str]]:
    """Pairs of tensors of one shape that may have been taken for each other."""
    table, heads = tensor_table(config), []
    if config.dflash2 is not None:
        side = "candidate_selector.{}_codebook".format
        heads = [(side("predecessor"), side("successor"))]
    if config.dspark is not None and config.dspark.markov_rank:
        heads = [("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")]
    yield from heads
    near = [
        ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight"),
        ("self_attn.q_proj.weight", "self_attn.o_proj.weight"),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
        ("input_layernorm.weight", "post_attention_layernorm.weight"),
        ("attention_conv.base_kernel", "mlp_conv.base_kernel"),
        ("attention_conv.kernel_projection.weight", "mlp_conv.kernel_projection.weight"),
    ]
    count = config.num_hidden_layers
    pairs = [(f"layers.{i}.{a}", f"layers.{i}.{b}") for i in range(count) for a, b in near]
    pairs.append(("hidden_norm.weight", "norm.weight"))
    ending = sorted({n.split(".", 2)[2] for n in table if n.startswith("layers.0.")})
    pairs += [
        (f"layers.{i}.{name}", f"layers.{i + 1}.{name}")
        for i in range(count - 1)
        for name in ending
    ]
    for a, b in pairs:
        if a in table and b in table and table[a].shape == table[b].shape:
            yield a, b


def arrangements(
    name: str, shape: tuple[int, ...], config: DFlashConfig
) -> Iterator[tuple[str, Callable[[np.ndarray], np.ndarray]]]:
    """Other ways in which a tensor's numbers may lie."""
    taps, hidden = len(config.target_layer_ids), config.hidden_size
    if name == "fc.weight" and taps > 1:
        yield (
            "with the taps' channels interleaved",
            lambda x: x.reshape(hidden, hidden, taps).swapaxes(1, 2).reshape(shape),
        )
    if len(shape) == 2 and shape[0] == shape[1]:
        yield "transposed", lambda x: x.T
    elif len(shape) == 2 and ("codebook" in name or "markov_w" in name):
        yield "transposed", lambda x: x.reshape(shape[::-1]).T
    if name.endswith("base_kernel"):
        yield "with its halves swapped", lambda x: x[::-1]
        yield "with its taps reversed", lambda x: x[:, ::-1]
        if shape[0] == shape[1]:
            yield "with halves and taps exchanged", lambda x: x.swapaxes(0, 1)
    if name.endswith("kernel_projection.weight") and config.dflash2 is not None:
        k = config.dflash2.conv_kernel_size
        yield "with its halves swapped", lambda x: x.reshape(2, -1, hidden)[::-1].reshape(shape)
        yield (
            "with its taps reversed",
            lambda x: x.reshape(2, k, -1, hidden)[:, ::-1].reshape(shape),
        )
        yield (
            "laid out by group",
            lambda x: x.reshape(-1, 2 * k, hidden).swapaxes(0, 1).reshape(shape),
        )
    if len(shape) == 1 and name.endswith("norm.weight"):
        yield "plus 1 (stored as an offset)", lambda x: x + 1
        yield "minus 1", lambda x: x - 1


def _rotary_suspects(config: DFlashConfig, other: Callable[..., Suspect]) -> Iterator[Suspect]:
    """Query and key rows in the other order of rotary pairs, in all layers at once."""
    names = [
        f"layers.{i}.self_attn.{part}.weight"
        for i in range(config.num_hidden_layers)
        for part in ("q_proj", "k_proj", "q_norm", "k_norm")
    ]
    dim = config.head_dim

    def halves(x: np.ndarray) -> np.ndarray:
        """Interleaved pairs 2i, 2i + 1 laid out as i, i + D / 2."""
        return x.reshape(-1, dim // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    def pairs(x: np.ndarray) -> np.ndarray:
        return x.reshape(-1, 2, dim // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    projections = [n for n in names if "proj" in n]
    for which, only in ((names, ""), (projections, ", projections only")):
        for change, says in ((halves, "rows un-interleaved"), (pairs, "rows interleaved")):
            edit = replaced(which, lambda *xs, change=change: tuple(map(change, xs)))
            yield other("q_proj and k_proj", f"{says} (rotary pairs{only})", edit)


def silences(config: DFlashConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Tensors that take a part out when zero, and the part's name."""
    for i in range(config.num_hidden_layers):
        yield (f"layers.{i}.self_attn.o_proj.weight",), f"layers.{i}.self_attn"
        yield (f"layers.{i}.mlp.down_proj.weight",), f"layers.{i}.mlp"
        if config.dflash2 is not None:
            for conv in ("attention_conv", "mlp_conv"):
                projection = f"layers.{i}.{conv}.kernel_projection.weight"
                yield (projection,), f"layers.{i}.{conv}.kernel_projection"
    if config.dflash2 is not None:
        yield ("candidate_selector.successor_codebook",), "candidate_selector"
    if config.dspark is not None and config.dspark.markov_rank:
        yield ("markov_head.markov_w2.weight",), "markov_head"


def scale_matters(name: str) -> bool:
    """Whether a factor on a tensor changes anything: fc, q and k are normed right behind."""
    normed = ("fc.weight", "q_proj.weight", "k_proj.weight", "markov_w2.weight")
    return not name.endswith(normed) and "confidence" not in name and "successor" not in name
