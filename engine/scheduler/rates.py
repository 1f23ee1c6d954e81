"""What a token and a block cost, measured while serving."""

from __future__ import annotations

from llmsched.engine.executor.base import StepPlan, StepResult

#: Assumed until prefills, or copies, have been measured: tokens and bytes per second. A victim has been computed, so
#: the first hardly ever matters. The second is what PCIe 4 x16 moves, rather too much than too little: copies that are
#: never made are never measured.
ASSUMED_PREFILL_RATE = 10_000.0
ASSUMED_COPY_RATE = 20e9
#: After so many measurements of a kind older ones count half.
HALF_LIFE = 64
#: How far each decision against a copy takes its measured cost back to the assumed one, so that it is tried again some
#: time: the machine may have been busy when it was measured.
FADING = 0.02


class _Mean:
    """Seconds per unit over the measurements so far, newer ones counting more."""

    def __init__(self, assumed: float) -> None:
        self._seconds = self._units = 0.0
        self._assumed = assumed

    def add(self, seconds: float, units: int) -> None:
        forget = 0.5 ** (1 / HALF_LIFE)
        self._seconds = self._seconds * forget + seconds
        self._units = self._units * forget + units

    def fade(self) -> None:
        """Believe what was measured a little less."""
        self._seconds += FADING * (self._assumed * self._units - self._seconds)

    @property
    def per_unit(self) -> float:
        return self._seconds / self._units if self._units else self._assumed


class Rates:
    """Seconds per prefill token and per block copied from or to host memory.

    A prefill token costs what steps with prefills take longer than steps of decodes alone, since decodes go on beside
    a recomputation anyway.
    """

    def __init__(self, block_bytes: int) -> None:
        self._prefill = _Mean(1 / ASSUMED_PREFILL_RATE)
        self._copy = _Mean(block_bytes / ASSUMED_COPY_RATE)
        self._decode = _Mean(0.0)

    @property
    def per_prefill_token(self) -> float:
        return self._prefill.per_unit

    @property
    def per_block(self) -> float:
        return self._copy.per_unit

    def not_copied(self) -> None:
        """It was decided against copying blocks, because of what that costs."""
        self._copy.fade()

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """Take in a step."""
        if result.swap_elapsed > 0:
            self._copy.add(result.swap_elapsed, len(plan.swap_out) + len(plan.swap_in))
        computing = result.elapsed - result.swap_elapsed
        num_prefill_tokens = plan.num_tokens - len(plan.rows)
        if num_prefill_tokens == 0:
            self._decode.add(computing, 1)
        else:
            self._prefill.add(max(0.0, computing - self._decode.per_unit), num_prefill_tokens)
