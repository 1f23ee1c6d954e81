"""Properties of the scheduler under random events: no leak, no stall, no starvation, correct tokens."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from random import Random

from fakes import BLOCK, Harness, make_request, next_token, reference, repeating_token
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from witness import Witness

from llmsched.engine.errors import RequestError
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.request import FinishReason, Request, RequestStatus

#: Mostly without windows; with windows of less than a block, and of several; with recurrent layers.
LAYOUTS = [KVLayout(BLOCK)] * 3 + [KVLayout(BLOCK, 1, 1, 9), KVLayout(BLOCK, 1, 2, 40), KVLayout(BLOCK, 0, 1, 40)]
LAYOUTS += [KVLayout(BLOCK, recurrent=True)] * 2 + [KVLayout(BLOCK, 0, recurrent=True)]
#: Preemption mode, host blocks, seconds to copy a block (a step takes one second).
SWAPS = [("recompute", 0, 0.0), ("swap", 3, 0.0), ("swap", 100, 0.0), ("auto", 100, 1e-4), ("auto", 100, 0.1)]
PREFIXES = [[seed * 17 + i * 3 for i in range(70)] for seed in range(3)]


class SchedulerLife(RuleBasedStateMachine):
    """Arrivals, steps, aborts, failures and pins in any order, over a pool that is too small for the load."""

    looks_ahead = False

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    @initialize(
        blocks=st.integers(6, 24),
        budget=st.integers(1, 100),
        seqs=st.integers(1, 12),
        caching=st.booleans(),
        policy=st.sampled_from(["fair", "fair", "fair", "fcfs", "sptf", "serial", "static"]),
        prediction=st.sampled_from(["none", "none", "max_tokens", "learned"]),
        swap=st.sampled_from(SWAPS),
        pinned=st.sampled_from([0, 0, 2]),
        headroom=st.sampled_from([0.0, 0.1]),
        layout=st.sampled_from(LAYOUTS),
        max_passes=st.sampled_from([0, 1, 4]),
        lane=st.sampled_from([0.0, 0.3]),
        target_itl=st.sampled_from([None, None, 0.5, 2.0]),
        num_stop_ids=st.sampled_from([0, 30]),
        speculative=st.sampled_from(["off", "off", "ngram", "auto"]),
        draft=st.integers(1, 15),
    )
    def start(
        self,
        blocks: int,
        budget: int,
        seqs: int,
        caching: bool,
        policy: str,
        prediction: str,
        swap: tuple[str, int, float],
        pinned: int,
        headroom: float,
        layout: KVLayout,
        max_passes: int,
        lane: float,
        target_itl: float | None,
        num_stop_ids: int,
        speculative: str,
        draft: int,
    ) -> None:
        pinned = pinned * layout.num_groups if caching else 0
        blocks *= layout.num_groups
        speculative = "off" if layout.recurrent else speculative  # build_engine refuses both together
        self.capacity = min(layout.longest(blocks - pinned), 400)
        self.harness = Harness(
            blocks,
            budget,
            seqs,
            caching,
            scheduling_policy=policy,
            output_prediction=prediction,
            max_model_len=self.capacity + 1,
            preemption_mode=swap[0],
            swap_blocks=swap[1] * max(1, layout.num_groups),
            layout=layout,
            looks_ahead=self.looks_ahead,
            max_pinned_blocks=pinned,
            headroom=headroom,
            max_passes=max_passes,
            fast_lane_share=lane,
            fast_lane_prompt=24,
            fast_lane_output=40,
            target_itl=target_itl,
            priority_step=7.0,
            speculative=speculative,
            num_speculative_tokens=draft,
        )
        self.model = self.harness.executor.model = next_token if speculative == "off" else repeating_token
        self.harness.executor.per_swapped_block = swap[2]
        self.harness.scheduler.pacer._raise_after = 10  # so that the budget recovers within a run
        self.stop_ids = frozenset(range(num_stop_ids))
        #: Under sptf ranks are lengths: it bounds nothing.
        self.witness = None if policy == "sptf" else Witness(self.harness)

    @rule(
        prefix=st.sampled_from(PREFIXES),
        shared=st.integers(0, 70),
        own=st.lists(st.integers(0, 999), min_size=1, max_size=60),
        max_tokens=st.integers(0, 70),
        priority=st.integers(0, 2),
        salt=st.sampled_from(["", "", "tenant"]),
        n=st.sampled_from([1, 1, 1, 3]),
    )
    def one(
        self, prefix: list[int], shared: int, own: list[int], max_tokens: int, priority: int, salt: str, n: int
    ) -> None:
        """One request; its choices are as many sequences."""
        for _ in range(n):
            self.arrive(prefix, shared, own, max_tokens, priority, salt)

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
        request.stop_ids = self.stop_ids
        self.requests.append(self.harness.add(request))
        if self.witness:
            self.witness.see()

    @rule(seed=st.integers(0, 2**32), count=st.integers(3, 12))
    def crowd(self, seed: int, count: int) -> None:
        """Many at once that begin small and grow."""
        random = Random(seed)
        for _ in range(count):
            own = random.choices(range(1000), k=random.randint(1, 20))
            shared = random.choice([0, 0, 20, 40])
            priority, salt = random.choice([0, 0, 1]), random.choice(["", "tenant"])
            self.arrive(random.choice(PREFIXES), shared, own, random.randint(20, 100), priority, salt)

    @rule(count=st.integers(1, 20))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.harness.has_work():
                self.harness.step()

    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        if self.requests:
            self.end(self.requests[which % len(self.requests)])

    @rule()
    def abort_one_that_was_preempted(self) -> None:
        for request in [r for r in self.harness.scheduler.waiting if r.num_preemptions][:1]:
            self.end(request)

    def end(self, request: Request) -> None:
        self.harness.scheduler.finish(request, FinishReason.ABORT)
        if self.witness:
            self.witness.ended(request)

    @rule(which=st.integers(0, 1000))
    def fail(self, which: int) -> None:
        """The next row of a request fails, if there is one."""
        if self.requests:
            self.harness.executor.failing.add(self.requests[which % len(self.requests)].request_id)

    @rule(parts=st.lists(st.integers(0, 8), min_size=1, max_size=3))
    def run_out_of_memory(self, parts: list[int]) -> None:
        """The next attempts at a step run out of memory, after some parts of their work."""
        self.harness.executor.exhausted += parts

    @rule(prefix=st.sampled_from(PREFIXES), length=st.integers(16, 40), ttl=st.sampled_from([None, 5.0]))
    def pin(self, prefix: list[int], length: int, ttl: float | None) -> None:
        with suppress(RequestError):
            self.harness.scheduler.kv.pins.pin(prefix[:length], "", ttl, self.harness.time)

    @rule()
    def unpin(self) -> None:
        for state in self.harness.scheduler.kv.pins.states()[:1]:
            self.harness.scheduler.unpin(state.pin_id)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.harness.scheduler.kv.prefix_cache.drop()

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
            assert output == reference(prompt, len(output), self.model)
            if request.finish_reason is FinishReason.LENGTH:
                assert len(output) == request.sampling.max_tokens
            stopped = request.finish_reason is FinishReason.STOP
            assert [token in self.stop_ids for token in output] == [False] * (len(output) - stopped) + [True] * stopped
            failed = request.request_id in self.harness.executor.failing
            assert request.finish_reason is not FinishReason.ERROR or failed
        assert self.witness is None or not self.witness.waits
        kv = self.harness.scheduler.kv
        assert kv.pool.num_used == kv.pins.num_blocks
        assert kv.swap.num_free == kv.swap.num_blocks
        ended = [name for plan in self.harness.executor.plans for name in plan.finished]
        ended += self.harness.scheduler._finished
        assert Counter(ended) == Counter(request.request_id for request in self.requests), "each ends once"


class LookAheadLife(SchedulerLife):
    """The same with a step in flight."""

    looks_ahead = True


for life in (SchedulerLife, LookAheadLife):
    life.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None, derandomize=True)
TestSchedulerLife = SchedulerLife.TestCase
TestLookAheadLife = LookAheadLife.TestCase
