"""Laws to grow draft trees by."""

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
