"""How large a step may be for tokens to keep coming in time (target_itl)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from llmsched.engine.config import EngineConfig
from llmsched.engine.executor.base import StepPlan
from llmsched.engine.executor.cost import StepTimeModel, shape_of
from llmsched.engine.request import Request

logger = logging.getLogger(__name__)

#: Prefill tokens that every step may take, so that prefills go on when decodes alone miss the target.
LEAST_PREFILL = 16
#: Steps on end in which decodes alone are predicted to miss the target before that is told, once.
TOLD_AFTER = 32


class Pacer:
    """Sizes the token budget of each step to the target, from a step-time model fitted to the steps so far.

    Without a target, without decodes (nobody waits for a next token), or before the model is trusted, the budget is
    max_num_batched_tokens. `latest` is the budget of the last step.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._target = config.target_itl
        self.model = StepTimeModel()
        self.latest = config.max_num_batched_tokens or 0
        self._misses = 0

    def token_budget(self, most: int, running: Sequence[Request], decodes: int) -> int:
        """The budget of the next step in which `decodes` of the running requests decode."""
        self.latest = self._budget(most, running, decodes)
        return self.latest

    def _budget(self, most: int, running: Sequence[Request], decodes: int) -> int:
        if self._target is None or decodes == 0 or not self.model.trusted:
            return most
        kv_tokens = sum(request.num_tokens for request in running)
        prefill = self.model.prefill_tokens_within(self._target, decodes, kv_tokens)
        if self._misses < TOLD_AFTER:
            self._note_miss(prefill == 0, decodes)
        return min(most, decodes + max(LEAST_PREFILL, prefill))

    def _note_miss(self, missed: bool, decodes: int) -> None:
        self._misses = self._misses + 1 if missed else 0
        if self._misses == TOLD_AFTER and self._target is not None:
            logger.warning(
                "target_itl %.3g ms is missed by decodes alone (%d of them): prefills get %d tokens a step, so first "
                "tokens come late; a longer target, or fewer running requests (max_num_seqs), would let them through",
                1e3 * self._target,
                decodes,
                LEAST_PREFILL,
            )

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Take in a step that has been computed."""
        if self._target is not None:
            self.model.learn(shape_of(plan), seconds)
