"""Laws to grow draft trees by, and answers to walk them by."""

import jax
import jax.numpy as jnp
import numpy as np


def tree_problem(batch, slots, befores, candidates, *, tied=False, seed=0):
    """Laws `[batch, slots, candidates]`, with `befores` of more than 1 in their last but one axis;
    candidates and anchors. Tied: laws are small whole numbers.
    """
    rng = np.random.default_rng(seed)
    shape = (batch, slots, befores, candidates)
    laws = jax.nn.log_softmax(jnp.asarray(2 * rng.normal(size=shape), jnp.float32))
    if tied:
        laws = jnp.asarray(-rng.integers(0, 3, shape), jnp.float32)
    ids = [rng.permutation(1000)[:candidates] for _ in range(batch * slots)]
    cand = jnp.asarray(np.reshape(ids, (batch, slots, candidates)), jnp.int32)
    anchor = jnp.asarray(rng.integers(0, 1000, batch), jnp.int32)
    return laws[:, :, 0] if befores == 1 else laws, cand, anchor


def answers(grown, longest, *, seed=1):
    """What a target says after each node, `[B, n]`, mostly the token of one of its children; and
    caps `[B]` of 1 to `longest` + 1.
    """
    rng = np.random.default_rng(seed)
    tokens, parent = np.asarray(grown.tokens), np.asarray(grown.parent)
    after = rng.integers(0, 1000, tokens.shape)
    for b, node in np.argwhere(rng.random(tokens.shape) < 0.8):
        children = np.flatnonzero(parent[b] == node)
        children = children[children > 0]
        if children.size:
            after[b, node] = tokens[b, rng.choice(children)]
    cap = rng.integers(1, longest + 2, len(tokens))
    return jnp.asarray(after, jnp.int32), jnp.asarray(cap, jnp.int32)
