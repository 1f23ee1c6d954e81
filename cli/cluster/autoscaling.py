"""Autoscaling by the expected wait for a first token, not by the number of requests."""

from __future__ import annotations

import logging
import math
from typing import Any

from ray.serve.config import AutoscalingContext

logger = logging.getLogger(__name__)

#: Name of the figure that replicas report: seconds that an empty prompt would wait for its first token now.
WAIT = "expected_wait_s"
#: Replicas are added above the first share of the allowed wait, and removed below the second.
_HIGH, _LOW = 0.5, 0.1


def desired_replicas(waits: list[float], allowed: float) -> int:
    """Return how many replicas should run. `waits` has the expected wait of each running replica in seconds.

    Replicas are added so that the mean wait, with the backlog spread over all of them, falls to half of `allowed`. One
    is removed if the mean wait of the others, with the backlog spread over them, stays below a tenth of `allowed`.
    """
    count = len(waits)
    total = sum(waits)
    if total > _HIGH * allowed * count:
        return max(count + 1, math.ceil(total / (_HIGH * allowed)))
    if count > 1 and total < _LOW * allowed * (count - 1):
        return count - 1
    return count


class WaitPolicy:
    """Autoscaling policy of Ray Serve. `allowed_s` is the wait for a first token, in seconds, that is acceptable."""

    def __init__(self, allowed_s: float) -> None:
        self._allowed = allowed_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and the policy's state, which is empty."""
        reported = (context.aggregated_metrics or {}).get(WAIT, {})
        waits = [reported.get(replica, 0.0) for replica in context.running_replicas]
        if not waits:
            return context.target_num_replicas, {}
        wanted = desired_replicas(waits, self._allowed)
        if wanted != len(waits):
            shown = ", ".join(f"{wait:.2f}" for wait in waits)
            logger.info(
                "%d replicas wanted, %d run: expected waits of %s s, with %.2f s allowed (scale_ttft)",
                wanted,
                len(waits),
                shown,
                self._allowed,
            )
        return wanted, {}
