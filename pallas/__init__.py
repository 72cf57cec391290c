"""Pallas GPU kernels, one file an op, imported as `dflash_jax.pallas`."""

if __name__ != "dflash_jax.pallas":
    raise ImportError(f"import these kernels as dflash_jax.pallas, not as {__name__}")
