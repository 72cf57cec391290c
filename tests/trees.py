"""Laws to grow draft trees by, and answers to walk them by."""

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY = 40
KINDS = ["random", "tied", "zeros", "holes"]
"""Of laws, see `tree_problem`."""


def tree_problem(batch, slots, befores, candidates, *, kind="random", seed=0):
    """Laws `[batch, slots, candidates]`, with `befores` of more than 1 in their last but one axis;
    candidates and anchors.

    Kinds: `random` laws; `tied` ones, small whole numbers; `zeros`, tied ones whose zeros are of
    both signs; `holes`, tied ones of which a third are -inf, slots without another among them.
    """
    rng = np.random.default_rng(seed)
    shape = (batch, slots, befores, candidates)
    laws = -rng.integers(0, 3, shape).astype(np.float32)
    if kind == "random":
        laws = np.asarray(jax.nn.log_softmax(2 * rng.normal(size=shape).astype(np.float32)))
    elif kind == "zeros":
        laws = np.where(laws == 0, rng.choice(np.float32([0.0, -0.0]), shape), laws)
    elif kind == "holes":
        laws[rng.random(shape) < 1 / 3] = -np.inf
        laws[rng.random((batch, slots)) < 1 / 8] = -np.inf
    ids = [rng.permutation(VOCABULARY)[:candidates] for _ in range(batch * slots)]
    cand = jnp.asarray(np.reshape(ids, (batch, slots, candidates)), jnp.int32)
    anchor = jnp.asarray(rng.integers(0, VOCABULARY, batch), jnp.int32)
    return jnp.asarray(laws[:, :, 0] if befores == 1 else laws), cand, anchor


def answers(grown, longest, *, seed=1):
    """What a target says after each node, `[B, n]`, mostly the token of the spine's next node or of
    a leaf beside it; and caps `[B]` of 1 to `longest` + 1.
    """
    rng = np.random.default_rng(seed)
    tokens, depth = np.asarray(grown.tokens), np.asarray(grown.depth)
    after = rng.integers(0, VOCABULARY, tokens.shape)
    for b, node in np.argwhere(rng.random(tokens.shape) < 0.9):
        children = np.flatnonzero(depth[b] == node + 1)
        if children.size:
            child = children[0] if rng.random() < 0.6 else rng.choice(children)
            after[b, node] = tokens[b, child]
    cap = rng.integers(1, longest + 2, len(tokens))
    return jnp.asarray(after, jnp.int32), jnp.asarray(cap, jnp.int32)


def check_candidates(grow, value):
    """A tree of laws of which some are `value`, no law, has its slots' candidates all the same."""
    laws, cand, anchor = tree_problem(3, 3, 5, 5)
    laws = laws.at[0, 1, 2].set(value).at[1, 0].set(value).at[2].set(value)
    grown = grow(laws, cand, anchor, 14)
    np.testing.assert_array_equal(grown.tokens[:, 0], anchor)
    for b in range(3):
        nodes = zip(grown.depth[b, 1:].tolist(), grown.tokens[b, 1:].tolist(), strict=True)
        assert all(token in cand[b, depth - 1].tolist() for depth, token in nodes)
    assert (grown.depth[:, 1:] >= 1).all()
