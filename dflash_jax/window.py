"""How much of a proposal the target verifies and accepts."""

import jax
import jax.numpy as jnp


def dspark_accept_prefix(cand: jax.Array, vam: jax.Array, vt: jax.Array | int) -> jax.Array:
    """Accepted drafts m of one round, by token equality.

    Args:
      cand: `[..., w]` verify rows: the anchor (already decided), then the drafts.
      vam: `[..., w]` the target's argmax after each row: vam[j] predicts the token after row j.
      vt: `[...]` verify width, anchor included; rows from vt on are not looked at.

    m grows while m < vt - 1 and cand[m + 1] == vam[m]; rows 0..m are committed and vam[m] is the
    next anchor.

    >>> import jax.numpy as jnp
    >>> int(dspark_accept_prefix(jnp.array([5, 6, 7, 9]), jnp.array([6, 7, 8, 1]), 4))
    2
    """
    agree = cand[..., 1:] == vam[..., :-1]
    slot = jnp.arange(1, cand.shape[-1])
    agree = agree & (slot < jnp.asarray(vt)[..., None])
    return jnp.cumprod(agree.astype(jnp.int32), axis=-1).sum(axis=-1)
