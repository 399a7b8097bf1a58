"""How many bytes a node may send each second, among all that sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

BURST_SECONDS: Final = 0.05
"""Seconds of sending that may be saved up: short, so that the limit holds for every moment, and the ranks take turns."""
LEAST: Final = 4096
SHORTEST: Final = 0.0001
"""Seconds to sleep at least: less may not move the clock."""


class TokenBucket:
    """Bytes that may be sent, as time gives them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        self._clock, self._sleep = clock, sleep
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._rate: float | None = None
        self._tokens, self._at = 0.0, clock()

    def limit(self, rate: int | None) -> None:
        """Let *rate* bytes a second through from now on; None: any number."""
        with self._lock:
            self._rate, self._tokens, self._at = rate, 0.0, self._clock()

    def take(self, size: int) -> int:
        """Return how many of *size* bytes may be sent, at least one, as soon as it may. Who comes first is served first."""
        with self._turn:
            while True:
                with self._lock:
                    if self._rate is None:
                        return size
                    now = self._clock()
                    most = max(LEAST, self._rate * BURST_SECONDS)
                    self._tokens, self._at = min(most, self._tokens + (now - self._at) * self._rate), now
                    want = min(size, int(most))
                    if self._tokens >= want:
                        self._tokens -= want
                        return want
                    pause = (want - self._tokens) / self._rate
                self._sleep(min(max(pause, SHORTEST), 0.25))  # a new limit may come meanwhile
