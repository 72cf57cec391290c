"""`python -m dflash_jax.cli`."""

import sys

from dflash_jax.cli import main

sys.exit(main())
