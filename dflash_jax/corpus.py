"""Text to train on: the target's own conversations, sampled on the device in large batches.

Every row is one conversation of exactly `length` tokens. It starts from a given prompt, or from
the bare opening of a user turn, where the target invents the user's part too; when a turn ends,
the chat template's tokens are put in and the other side goes on. So no row is ever idle and no
position is padding.
"""

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from dflash_jax.arrays import read_npz
from dflash_jax.blocks import Batch
from dflash_jax.keys import LARGEST
from dflash_jax.records import answer_ids, prompt_ids
from dflash_jax.sharding import DATA
from dflash_jax.targets import Target
from dflash_jax.training import spread

USER, ASSISTANT, PLAIN = 0, 1, 2
"""Who is speaking. PLAIN text has no turns; everything in it counts as answer."""

TEMPLATES = Path(__file__).parent / "assets" / "prompts" / "templates.json"
IDLE = 1 << 20


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """A chat template as token ids.

    opening: all before the first user text. to_assistant, to_user: all between the end of one
    side's text and the start of the other's; their first token ends the turn.
    """

    opening: tuple[int, ...]
    to_assistant: tuple[int, ...]
    to_user: tuple[int, ...]


def chat_format(codec: Any) -> ChatFormat:
    """Read the turns' tokens out of a codec's chat template (ValueError where that can't work)."""
    one, two, three = "first user text", "assistant text", "second user text"
    turns = [
        {"role": "user", "content": one},
        {"role": "assistant", "content": two},
        {"role": "user", "content": three},
    ]
    text = codec.render_chat(turns, add_generation_prompt=True)
    if [text.count(part) for part in (one, two, three)] != [1, 1, 1]:
        raise ValueError("chat template: expected it to keep the turns' texts, found them changed")
    opening, rest = text.split(one)
    to_assistant, rest = rest.split(two)
    to_user, _ = rest.split(three)

    def ids(piece: str) -> tuple[int, ...]:
        return tuple(codec.encode_plain(piece))

    return ChatFormat(ids(opening), ids(to_assistant), ids(to_user))


class Starts(struct.PyTreeNode):
    """How rows begin and how their answers are drawn.

    ids `[B, P]`, length `[B]`: given tokens. role `[B]`: who speaks after them. temperature `[B]`
    holds for the first `hot [B]` tokens of an answer; what follows is greedy.
    """

    ids: np.ndarray
    length: np.ndarray
    role: np.ndarray
    temperature: np.ndarray
    hot: np.ndarray


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """length: tokens a row. stages: cache sizes (rows) the loop grows through, ascending, the last
    at least length: what lies past it would stay empty.

    User turns are drawn at `user_temperature` and cut at `user_limit` tokens. min_p: tokens less
    likely than this share of the best one are never drawn.
    """

    length: int = 512
    stages: tuple[int, ...] = (256, 512)
    user_temperature: float = 1.0
    user_limit: int = 128
    min_p: float = 0.03

    def __post_init__(self):
        if not self.stages or self.stages[-1] < self.length:
            raise ValueError(
                f"stages: expected the last to hold {self.length} tokens, found {self.stages}"
            )


class _Walk(struct.PyTreeNode):
    """The state of the sampling loop; `place [B]` runs through the template tokens put in."""

    ids: jax.Array
    answer: jax.Array
    role: jax.Array
    age: jax.Array
    place: jax.Array
    state: Any


def sample_rows(
    target: Target,
    chat: ChatFormat,
    starts: Starts,
    seed: int,
    options: SampleOptions,
    mesh: Mesh | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Sample conversations: ids `[B, length]` and which tokens are the target's answers.

    starts: given tokens beyond `length` are cut. mesh: devices that share out the rows, a multiple
    of their number (the target lies whole on each). Draws belong to (seed, row, token), whichever
    device makes them.
    """
    given = np.zeros((starts.ids.shape[0], options.length), np.int32)
    width = min(starts.ids.shape[1], options.length)
    given[:, :width] = starts.ids[:, :width]
    if mesh is not None and len(given) % mesh.size:
        raise ValueError(
            f"sample batch: expected a multiple of {mesh.size} devices, found {len(given)}"
        )
    number = np.arange(len(given), dtype=np.uint32)
    rows = spread((starts.replace(ids=given), number), mesh, rows=True)
    target = spread(target, mesh, rows=False)
    ids, answer = _sample(target, *rows, jnp.uint32(seed), chat, options, mesh)
    return np.array(ids), np.array(answer)


@partial(jax.jit, static_argnames=("chat", "options", "mesh"))
def _sample(target, starts, number, seed, chat, options, mesh):
    """`sample_rows` on the device(s): one loop a cache size, as long as its rows suffice."""

    def run(target, starts, number, seed):
        batch = number.shape[0]
        walk = _Walk(
            ids=starts.ids,
            answer=jnp.zeros(starts.ids.shape, bool),
            role=starts.role,
            age=jnp.zeros((batch,), jnp.int32),
            place=jnp.full((batch,), IDLE, jnp.int32),
            state=target.init_state(batch, options.stages[0]),
        )
        step = partial(_step, target, starts, number, jax.random.key(seed), chat, options)
        done = 0
        for slots in options.stages:
            stop = min(slots, options.length - 1)
            walk = walk.replace(state=_grow(target, walk.state, batch, slots))
            walk = jax.lax.fori_loop(done, stop, step, walk)
            done = stop
        return walk.ids, walk.answer

    if mesh is not None:
        one, each = PartitionSpec(), PartitionSpec(DATA)
        specs = {"in_specs": (one, each, each, one), "out_specs": each}
        run = jax.shard_map(run, mesh=mesh, check_vma=False, **specs)
    return run(target, starts, number, seed)


def _grow(target: Target, state: Any, batch: int, slots: int) -> Any:
    """The same state with room for `slots` rows."""

    def enlarge(old, new):
        if old.shape == new.shape:
            return old
        return jax.lax.dynamic_update_slice(new, old, (0,) * new.ndim)

    return jax.tree.map(enlarge, state, target.init_state(batch, slots))


def _step(target, starts, number, key, chat, options, t, walk):
    """Feed token t and decide the one after it."""
    widest = max(len(chat.to_user), len(chat.to_assistant))
    turns = [chat.to_user[1:], chat.to_assistant[1:], ()]  # by the role they introduce
    table = jnp.array([[*ids, *[0] * (widest - len(ids))] for ids in turns], jnp.int32)
    sizes = jnp.array([len(ids) for ids in turns], jnp.int32)
    ends = jnp.array([chat.to_assistant[0], chat.to_user[0], -1], jnp.int32)  # by who speaks
    fed = jax.lax.dynamic_slice_in_dim(walk.ids, t, 1, axis=1)
    out, state = target.forward(walk.state, fed, ())
    state = target.commit(state, jnp.ones_like(starts.length))
    logits = target.logits(out.hidden[:, 0])
    answering = jnp.where(walk.age < starts.hot, starts.temperature, 0.0)
    heat = jnp.where(walk.role == USER, options.user_temperature, answering)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(key, t), number)
    drawn = _draw(keys, logits, heat, options.min_p)
    end = ends[walk.role]
    drawn = jnp.where((walk.role == USER) & (walk.age >= options.user_limit), end, drawn)
    given = t + 1 < starts.length
    queued = walk.place < sizes[walk.role]
    inserted = table[walk.role, jnp.minimum(walk.place, widest - 1)]
    old = jax.lax.dynamic_slice_in_dim(walk.ids, t + 1, 1, axis=1)[:, 0]
    token = jnp.where(given, old, jnp.where(queued, inserted, drawn))
    free = ~given & ~queued
    ended = free & (token == end)
    mark = (free & (walk.role != USER))[:, None]
    return walk.replace(
        ids=jax.lax.dynamic_update_slice_in_dim(walk.ids, token[:, None], t + 1, axis=1),
        answer=jax.lax.dynamic_update_slice_in_dim(walk.answer, mark, t + 1, axis=1),
        role=jnp.where(ended, 1 - walk.role, walk.role),
        age=jnp.where(ended, 0, walk.age + free.astype(jnp.int32)),
        place=jnp.where(ended, 0, walk.place + queued.astype(jnp.int32)),
        state=state,
    )


def _draw(keys: jax.Array, logits: jax.Array, heat: jax.Array, min_p: float) -> jax.Array:
    """One token a row: the argmax where heat is 0, else a draw at that temperature."""
    hot = heat[:, None] > 1e-5
    scaled = logits / jnp.where(hot, heat[:, None], 1.0)
    likely = scaled >= scaled.max(axis=-1, keepdims=True) + jnp.log(min_p)
    gumbel = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    noisy = jnp.where(likely, scaled + gumbel, -jnp.inf)
    return jnp.argmax(jnp.where(hot, noisy, logits), axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Mix:
    """Shares of a corpus.

    invented: the target makes up the user's words; plain: no chat; the rest: templated prompts.
    Of the answers `greedy` are greedy, `warm` are so after a few drawn tokens (which leads them
    away from what they would always say), the rest are drawn at 0.7 or 1.0 to the end.
    """

    invented: float = 0.5
    plain: float = 0.05
    greedy: float = 0.5
    warm: float = 0.3


def draw_starts(
    rng: random.Random, count: int, codec: Any, chat: ChatFormat, mix: Mix, most: int = 160
) -> Starts:
    """Random beginnings of `count` rows, none longer than `most` tokens."""
    templates = PromptTemplates.load()
    ids, role, temperature, hot = [], [], [], []
    while len(ids) < count:
        u = rng.random()
        if u < mix.invented:
            row, speaker = list(chat.opening), USER
        elif u < mix.invented + mix.plain:
            row, speaker = codec.encode(templates.plain(rng)), PLAIN
        else:
            message = {"role": "user", "content": templates.draw(rng)}
            row, speaker = codec.encode_chat([message]), ASSISTANT
        if not 0 < len(row) <= most:
            continue
        ids.append(row)
        role.append(speaker)
        v = rng.random()
        if v < mix.greedy:
            temperature.append(0.0)
            hot.append(0)
        elif v < mix.greedy + mix.warm:
            temperature.append(0.8)
            hot.append(rng.randint(2, 48))
        else:
            temperature.append(rng.choice((0.7, 1.0)))
            hot.append(IDLE)
    return make_starts(ids, role, temperature, hot)


def make_starts(
    ids: Sequence[Sequence[int]],
    role: Sequence[int] | int,
    temperature: Sequence[float] | float = 0.0,
    hot: Sequence[int] | int = 0,
) -> Starts:
    """`Starts` from lists (or one value for all rows)."""
    table = np.zeros((len(ids), max(map(len, ids))), np.int32)
    for i, row in enumerate(ids):
        table[i, : len(row)] = row

    def column(values, dtype):
        return np.broadcast_to(np.asarray(values, dtype), (len(ids),)).copy()

    return Starts(
        ids=table,
        length=np.array([len(row) for row in ids], np.int32),
        role=column(role, np.int32),
        temperature=column(temperature, np.float32),
        hot=column(hot, np.int32),
    )


@dataclasses.dataclass(frozen=True)
class PromptTemplates:
    """Sentences with `{slots}`, filled at random; `openings` begin plain text."""

    templates: list[str]
    openings: list[str]
    slots: dict[str, list[str]]

    @classmethod
    def load(cls, path: Path = TEMPLATES) -> "PromptTemplates":
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(raw["templates"], raw["openings"], raw["slots"])

    def draw(self, rng: random.Random) -> str:
        """One user prompt."""
        return self._fill(rng, rng.choice(self.templates))

    def plain(self, rng: random.Random) -> str:
        """The beginning of a text that is no chat."""
        return self._fill(rng, rng.choice(self.openings))

    def _fill(self, rng: random.Random, text: str) -> str:
        for name, choices in self.slots.items():
            while "{" + name + "}" in text:
                text = text.replace("{" + name + "}", rng.choice(choices), 1)
        return text


@dataclasses.dataclass
class Corpus:
    """Rows to train on: ids `[n, T]`, segment `[n, T]` (0: padding), answer `[n, T]`."""

    ids: np.ndarray
    segment: np.ndarray
    answer: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def answer_tokens(self) -> int:
        """Tokens that can be labels."""
        return int(self.answer.sum())

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """The batch of a step: every row once an epoch, in an order drawn from (seed, epoch)."""
        places = np.arange(step * size, (step + 1) * size)
        rows = np.empty(size, np.int64)
        for epoch in np.unique(places // len(self)):
            mine = places // len(self) == epoch
            order = np.random.default_rng([seed, int(epoch)]).permutation(len(self))
            rows[mine] = order[places[mine] % len(self)]
        return self.rows(rows)

    def rows(self, index: Any) -> Batch:
        """A batch of the given rows."""
        return Batch(
            ids=jnp.asarray(self.ids[index], jnp.int32),
            segment=jnp.asarray(self.segment[index], jnp.int32),
            answer=jnp.asarray(self.answer[index]),
        )

    def save(self, path: str | Path) -> None:
        """Write a `.npz`."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez(file, ids=self.ids, segment=self.segment, answer=self.answer)

    @classmethod
    def load(cls, path: str | Path) -> "Corpus":
        """Read what `save` wrote; FileNotFoundError or ValueError naming the file."""
        stored = read_npz(path)
        for name, kind in (("ids", np.integer), ("segment", np.integer), ("answer", np.bool_)):
            part = stored.get(name)
            if part is None:
                raise ValueError(f"{path}: not a corpus (no {name} in it)")
            if part.ndim != 2 or not part.size or part.shape != stored["ids"].shape:
                raise ValueError(
                    f"{path}: {name}: expected rows of tokens, found {list(part.shape)}"
                )
            if not np.issubdtype(part.dtype, kind):
                raise ValueError(
                    f"{path}: {name}: expected {kind.__name__}, found {part.dtype.name}"
                )
        if stored["ids"].min() < 0 or stored["ids"].max() > LARGEST:
            raise ValueError(f"{path}: ids: expected token ids, found {stored['ids'].min()}")
        return cls(stored["ids"], stored["segment"], stored["answer"])

    @classmethod
    def join(cls, parts: Iterable["Corpus"]) -> "Corpus":
        """All rows of several corpora of one width; ValueError naming two that differ in it."""
        parts = list(parts)
        widths = {part.ids.shape[1] for part in parts}
        if len(widths) != 1:
            raise ValueError(f"corpus: expected rows of one length, found {sorted(widths)}")
        names = ("ids", "segment", "answer")
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in names))


def generate_corpus(
    target: Target,
    codec: Any,
    rows: int,
    seed: int,
    *,
    batch: int = 2048,
    options: SampleOptions = SampleOptions(),
    mix: Mix = Mix(),
    seconds: float = float("inf"),
    mesh: Mesh | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Corpus:
    """Sample `rows` conversations (whole batches; fewer where `seconds` run out first).

    The same seed gives the same rows, whatever the number of them, and of devices on the mesh.
    """
    chat, began, parts, done = chat_format(codec), time.perf_counter(), [], 0
    most = min(160, options.length // 2)
    target = spread(target, mesh, rows=False)  # once, not with every batch
    while done < rows:
        rng = random.Random(f"{seed}/{done}")
        starts = draw_starts(rng, batch, codec, chat, mix, most)
        ids, answer = sample_rows(target, chat, starts, seed * 1_000_003 + done, options, mesh)
        segment = np.ones(ids.shape, np.uint8)
        parts.append(Corpus(_compact(ids), segment, answer))
        done += batch
        spent = time.perf_counter() - began
        tokens = sum(p.answer_tokens for p in parts)
        report(
            f"corpus {done}/{rows} rows, {tokens / 1e6:.2f}M answer tokens, "
            f"{done * options.length / spent / 1e3:.0f}k tokens/s, {spent:.0f} s"
        )
        if spent + spent / len(parts) > seconds:
            break
    return Corpus.join(parts)


def _compact(ids: np.ndarray) -> np.ndarray:
    return ids.astype(np.uint16) if ids.max(initial=0) < 1 << 16 else ids.astype(np.int32)


def corpus_from_records(
    records: Iterable[dict[str, Any]], codec: Any, length: int, end: Sequence[int] = ()
) -> Corpus:
    """Rows of `length` tokens out of records with prompt and answer, packed first come first in.

    Answers are cut at `length`; records whose prompt leaves no room for one are dropped. A row
    holds one document: the target's forward knows no borders inside a row.
    """
    rows = []
    for record in records:
        prompt, answer = prompt_ids(record, codec), answer_ids(record, codec, end)
        if answer and len(prompt) < length - 1:
            rows.append((prompt, answer[: length - len(prompt)]))
    if not rows:
        raise ValueError("data: expected records with an answer that fits, found none")
    ids = np.zeros((len(rows), length), np.int32)
    segment, marked = np.zeros(ids.shape, np.uint8), np.zeros(ids.shape, bool)
    for i, (prompt, answer) in enumerate(rows):
        n = len(prompt) + len(answer)
        ids[i, :n] = prompt + answer
        segment[i, :n] = 1
        marked[i, len(prompt) : n] = True
    return Corpus(_compact(ids), segment, marked)
