"""Headroom control: admission keeps more blocks free while preemptions are frequent, and fewer while they are rare."""

from __future__ import annotations

import logging
from collections import deque

from llmsched.engine.config import EngineConfig

logger = logging.getLogger(__name__)

#: Number of admissions over which the preemption rate is measured.
WINDOW = 64
#: The headroom grows above THRASH_RATE, decays below QUIET_RATE, and stays in between (hysteresis).
THRASH_RATE = 0.05
QUIET_RATE = 0.01
GROWTH = 1.3
DECAY = 0.95
#: A headroom this close to its minimum is set to the minimum, so that the decay, which is logged, comes to an end.
NEGLIGIBLE = 1e-3
#: Factors by which the concurrency cap shrinks and recovers.
CAP_SHRINK = 0.85
CAP_GROWTH = 1.1


class HeadroomControl:
    """Controller of `headroom`, the share of blocks that admission keeps free, and of a cap on running requests.

    Both depend on the preemption rate over the last WINDOW admissions. At most `max_running` requests may run: the cap,
    or `step_limit` if that is less.
    """

    def __init__(self, config: EngineConfig, max_running: int) -> None:
        self.headroom = config.headroom
        self._cap = self._most_running = max_running
        #: Most requests that a step has tokens for.
        self.step_limit = max_running
        self._least = config.headroom
        self._most = config.max_headroom
        self._preemptions: deque[int] = deque([0], maxlen=WINDOW)
        self._since_change = 0

    @property
    def max_running(self) -> int:
        return min(self._cap, self.step_limit)

    def admitted(self) -> bool:
        """Count an admission. Return True if the headroom or the cap changed."""
        self._preemptions.append(0)
        self._since_change += 1
        if self._since_change < WINDOW // 2:
            return False
        self._since_change = 0
        if self._rate >= QUIET_RATE or (self.headroom <= self._least and self._cap >= self._most_running):
            return False
        headroom = self.headroom * DECAY
        cap = min(self._most_running, int(self._cap * CAP_GROWTH) + 1)
        return self._set(headroom if headroom > self._least + NEGLIGIBLE else self._least, cap)

    def preempted(self, num_running: int) -> bool:
        """Count a preemption; `num_running` requests still run. Return True if the headroom or the cap changed."""
        self._preemptions[-1] += 1
        if sum(self._preemptions) <= THRASH_RATE * WINDOW or self._since_change < WINDOW // 8:
            return False
        self._since_change = 0
        cap = max(1, int(min(self._cap, num_running) * CAP_SHRINK))
        return self._set(min(self._most, max(self.headroom, 0.02) * GROWTH), cap)

    @property
    def _rate(self) -> float:
        return sum(self._preemptions) / len(self._preemptions)

    def _set(self, headroom: float, cap: int) -> bool:
        if (headroom, cap) == (self.headroom, self._cap):
            return False
        logger.info(
            "preemption rate %.1f%%: headroom %.1f%% -> %.1f%%, concurrency cap %d -> %d",
            100 * self._rate,
            100 * self.headroom,
            100 * headroom,
            self._cap,
            cap,
        )
        self.headroom, self._cap = headroom, cap
        return True
