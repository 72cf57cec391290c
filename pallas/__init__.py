"""Pallas GPU kernels, imported as `dflash_jax.pallas`: one file an op, but for two that
`attention_mosaic` stands on, `attention_share` (who reads what) and `mosaic` (of no op).
"""

if __name__ != "dflash_jax.pallas":
    raise ImportError(f"import these kernels as dflash_jax.pallas, not as {__name__}")
