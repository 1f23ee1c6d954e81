"""Static batching, the baseline: a batch lives until its longest member is done."""

from __future__ import annotations

from llmsched.engine.request import FinishReason, Request, RequestStatus
from llmsched.engine.scheduler.scheduler import Scheduler
from llmsched.engine.scheduler.step import Step
from llmsched.engine.scheduler.waits import WaitFor


class StaticScheduler(Scheduler):
    """Forms a batch of up to max_num_seqs requests when the last one is done, each with KV for max_model_len reserved.

    Members that end early keep their place and their blocks until the batch ends, as in a padded batch. Kinder to the
    baseline than most real ones: prompts are not padded, and each token is handed out as soon as it is there.
    """

    def _secure_memory(self) -> bool:
        """Only layers with a window need other blocks than those that were reserved: they give as many back."""
        for request in self.running:
            self.kv.grow(request)
        return False

    def _lacking(self, step: Step) -> WaitFor | None:
        """A place in the next batch, whatever is free in this one."""
        return WaitFor.SLOT if self.waiting else None

    def _prefill(self, step: Step, behind: list[Request], *, admit: bool) -> None:
        if not self.running:
            behind = self._form_batch()
        for request in behind:
            step.give(request, step.left)

    def _form_batch(self) -> list[Request]:
        assert self.config.max_model_len is not None
        reserved = self.kv.num_blocks_for(self.config.max_model_len)
        size = min(self.door.control.max_running, max(1, self.kv.max_request_blocks // reserved))
        for request in list(self.waiting)[:size]:
            self.door.start(request, self.kv.find_prefix(request))
        for request in self.running:
            self.kv.reserve(request, self.config.max_model_len)
        return list(self.running)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request; its blocks stay taken while other members run.

        Those of one that fails come free: amid a step it has more of windows than was reserved for it.
        """
        if request.status is RequestStatus.RUNNING and len(self.running) > 1 and reason is not FinishReason.ERROR:
            self.kv.static_batch.add(request)
        super().finish(request, reason)
        if not self.running:
            self.kv.static_batch.release()
