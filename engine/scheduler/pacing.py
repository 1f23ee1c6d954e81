"""How large a step may be for tokens to keep coming in time (target_itl)."""

from __future__ import annotations

from collections.abc import Sequence

from llmsched.engine.config import EngineConfig
from llmsched.engine.executor.base import StepPlan
from llmsched.engine.executor.cost import StepTimeModel, shape_of
from llmsched.engine.request import Request

#: Prefill tokens that every step may take, so that prefills go on when decodes alone miss the target.
LEAST_PREFILL = 16


class Pacer:
    """Sizes the token budget of each step to the target, from a step-time model fitted to the steps so far.

    Without a target, without decodes (nobody waits for a next token), or before the model is trusted, the budget is
    max_num_batched_tokens.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._target = config.target_itl
        self.model = StepTimeModel()

    def token_budget(self, most: int, running: Sequence[Request], decodes: int) -> int:
        """The budget of the next step in which `decodes` of the running requests decode."""
        if self._target is None or decodes == 0 or not self.model.trusted:
            return most
        kv_tokens = sum(request.num_tokens for request in running)
        prefill = self.model.prefill_tokens_within(self._target, decodes, kv_tokens)
        return min(most, decodes + max(LEAST_PREFILL, prefill))

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Take in a step that has been computed."""
        if self._target is not None:
            self.model.learn(shape_of(plan), seconds)
