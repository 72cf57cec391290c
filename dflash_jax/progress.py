"""A progress bar for what takes long: one line on stderr, rewritten in place."""

import sys
import time
from types import TracebackType
from typing import TextIO

PATIENCE = 0.5
"""Seconds before a bar shows itself, so that short work stays silent."""
EVERY = 0.1
"""Least seconds between two drawings."""
WIDTH = 24


class Progress:
    """Counts `total` units of work (bytes, steps, ...), drawn while the `with` block runs.

    Args:
      label: what is done, for the eye ("loading").
      total: units in all; scale, unit: units of 1e9 "GB" are drawn as `add`ed over 1e9.
      show: None draws on a terminal only, once the work has taken half a second; True always and
        at once, False never.

    >>> with Progress("loading", 4e9, scale=1e9, unit="GB", show=False) as bar:
    ...     bar.add(1e9)
    """

    def __init__(
        self,
        label: str,
        total: float,
        *,
        scale: float = 1.0,
        unit: str = "",
        show: bool | None = None,
        stream: TextIO | None = None,
    ):
        self._stream = stream or sys.stderr
        self._shown = self._stream.isatty() if show is None else show
        self._label, self._total, self._scale, self._unit = label, total, scale, unit
        self._began = time.monotonic()
        self._next = self._began + (0 if show else PATIENCE)
        self._drawn, self.done = False, 0.0

    def __enter__(self) -> "Progress":
        return self

    def add(self, units: float) -> None:
        """Count finished work, and redraw where it is time to."""
        self.done += units
        now = time.monotonic()
        if self._shown and now >= self._next:
            self._next = now + EVERY
            self._draw(now - self._began)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._drawn:  # what is printed next begins on a clean line
            self._stream.write("\r\033[K")
            self._stream.flush()

    def _draw(self, seconds: float) -> None:
        share = min(1.0, self.done / self._total) if self._total else 1.0
        filled = round(share * WIDTH)
        left = f", {seconds / share - seconds:.0f} s left" if share else ""
        self._stream.write(
            f"\r\033[K{self._label} [{'#' * filled}{'.' * (WIDTH - filled)}] "
            f"{self.done / self._scale:.1f}/{self._total / self._scale:.1f} {self._unit}{left}"
        )
        self._stream.flush()
        self._drawn = True
