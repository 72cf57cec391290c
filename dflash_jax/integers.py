"""Division that rounds up, of non-negative integers."""


def cdiv(n: int, size: int) -> int:
    """How many pieces of `size` hold `n`: `cdiv(9, 4) == 3`."""
    return -(-n // size)


def round_up(n: int, step: int) -> int:
    """The least multiple of `step` that is no less than `n`: `round_up(9, 4) == 12`."""
    return cdiv(n, step) * step
