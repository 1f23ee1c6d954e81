"""Random lives of a scheduler: whatever comes, nothing leaks, nobody starves, every token is right."""

from __future__ import annotations

from fakes import BLOCK, Harness, make_request, reference
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llmsched.engine.request import FinishReason, Request, RequestStatus

PREFIXES = [[seed * 17 + i * 3 for i in range(70)] for seed in range(3)]


class SchedulerLife(RuleBasedStateMachine):
    """Arrivals, steps and aborts in any order, over a pool that is too small for what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    @initialize(
        blocks=st.integers(6, 40),
        budget=st.integers(1, 100),
        seqs=st.integers(1, 12),
        caching=st.booleans(),
        policy=st.sampled_from(["fair", "fair", "fair", "fcfs", "sptf", "serial", "static"]),
        prediction=st.sampled_from(["none", "max_tokens", "learned"]),
    )
    def start(self, blocks: int, budget: int, seqs: int, caching: bool, policy: str, prediction: str) -> None:
        self.capacity = blocks * BLOCK
        self.harness = Harness(
            blocks,
            budget,
            seqs,
            caching,
            scheduling_policy=policy,
            output_prediction=prediction,
            max_model_len=self.capacity + 1,
        )

    @rule(
        prefix=st.sampled_from(PREFIXES),
        shared=st.integers(0, 70),
        own=st.lists(st.integers(0, 999), min_size=1, max_size=60),
        max_tokens=st.integers(0, 70),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def arrive(self, prefix: list[int], shared: int, own: list[int], max_tokens: int, priority: int, salt: str) -> None:
        prompt = (prefix[:shared] + own)[: self.capacity]
        max_tokens = min(max_tokens, self.capacity + 1 - len(prompt))
        request = make_request(
            f"r{len(self.requests):03}",
            prompt,
            max_tokens,
            arrival=self.harness.time,
            priority=priority,
            cache_salt=salt,
        )
        self.requests.append(self.harness.add(request))

    @rule(count=st.integers(1, 20))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.harness.scheduler.has_work():
                self.harness.step()

    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        if self.requests:
            request = self.requests[which % len(self.requests)]
            self.harness.scheduler.finish(request, FinishReason.ABORT)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.scheduler.kv.reset_prefix_cache()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "harness"):
            self.harness.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        work = sum(r.num_tokens + r.sampling.max_tokens for r in self.requests)
        self.harness.run(limit=10 + 4 * work)
        for request in self.requests:
            assert request.status is RequestStatus.FINISHED
            prompt = request.token_ids[: request.num_prompt_tokens]
            output = request.token_ids[request.num_prompt_tokens :]
            assert output == reference(prompt, len(output))
            if request.finish_reason is not FinishReason.ABORT:
                assert len(output) == request.sampling.max_tokens
        assert self.harness.scheduler.kv.pool.num_used == 0


SchedulerLife.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None, derandomize=True)
TestSchedulerLife = SchedulerLife.TestCase
