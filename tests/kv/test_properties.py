"""Random operations on the KV manager: no block leaks, and every block holds the KV it should."""

from __future__ import annotations

from random import Random

from fakes import make_request, reference
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_driver import KVDriver

from llmsched.engine.errors import RequestError
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.request import Request

BLOCK = 8
TTL = 10.0

#: Texts with common prefixes. A prompt is the start of a text and some random tokens, so prompts diverge anywhere.
TEXTS = [[1] * common + [seed * 50 + i for i in range(50)] for seed, common in enumerate((0, 8, 20, 24))]
PROMPTS = st.tuples(st.sampled_from(TEXTS), st.integers(1, 50), st.lists(st.integers(1, 2), max_size=6)).map(
    lambda drawn: drawn[0][: drawn[1]] + drawn[2]
)
#: Windows of less than a block, of a block and a bit, of all but the longest.
WINDOWS = st.sampled_from([1, 2, 3, 8, 9, 10, 18, 30, 41])
RECURRENT = st.sampled_from([KVLayout(BLOCK, recurrent=True), KVLayout(BLOCK, 0, recurrent=True)])
WINDOWED = st.builds(KVLayout, st.just(BLOCK), st.integers(0, 2), st.integers(1, 3), WINDOWS)
LAYOUTS = st.just(KVLayout(BLOCK)) | WINDOWED | RECURRENT
SALTS = st.sampled_from(["", "", "tenant"])


class KVLife(RuleBasedStateMachine):
    """Admissions, steps of any running requests, preemption and return, pins and resets, in any order.

    Several requests come and go between two steps, so that blocks change hands while copies from and to them wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.preempted: list[Request] = []
        self.now = 0.0

    @initialize(layout=LAYOUTS, blocks=st.integers(8, 40), slots=st.sampled_from([0, 4, 40]))
    def start(self, layout: KVLayout, blocks: int, slots: int) -> None:
        blocks, slots = blocks * layout.num_groups, slots * layout.num_groups
        self.driver = KVDriver(blocks, BLOCK, blocks // 4, slots, layout)
        self.kv = self.driver.kv

    def fits(self, request: Request) -> bool:
        missing = self.kv.num_missing(request, self.kv.prefix_cache.find(request))
        return not self.driver.is_full and missing <= self.kv.pool.num_available

    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=4), salt=SALTS)
    def come(self, prompts: list[list[int]], salt: str) -> None:
        for prompt in prompts:
            self.come_alone(prompt, salt)

    def come_alone(self, prompt: list[int], salt: str) -> None:
        if not self.driver.is_full and self.kv.layout.num_blocks(len(prompt)) <= self.kv.pool.num_available:
            request = self.driver.come(prompt, salt=salt, name=f"r{len(self.requests)}")
            assert request.num_computed_tokens < len(prompt)
            self.requests.append(request)

    @rule(prompt=PROMPTS, salt=SALTS)
    def ask(self, prompt: list[int], salt: str) -> None:
        """Check that the hit, the prefix in flight and the reason for a miss agree."""
        request = make_request("probe", prompt, cache_salt=salt)
        hit = self.kv.prefix_cache.find(request)
        coming = self.kv.prefix_cache.num_coming(request, hit)
        assert hit.num_tokens + coming < len(prompt)
        assert self.kv.prefix_cache.classify(request, hit).position >= len(hit.nodes) * BLOCK

    @rule(seed=st.integers(0, 2**32), rounds=st.integers(1, 12))
    def traffic(self, seed: int, rounds: int) -> None:
        """Run rounds of random arrivals, departures and steps."""
        random = Random(seed)
        for _ in range(rounds):
            for _ in range(random.randint(0, 3)):
                text, cut = random.choice(TEXTS), random.randint(1, 50)
                self.come_alone(
                    text[:cut] + random.choices([1, 2], k=random.randint(0, 6)), random.choice(["", "tenant"])
                )
            for _ in range(random.randint(0, 3)):
                if self.driver.running and random.random() < 0.4:
                    self.go(random.randrange(99), random.random() < 0.7, random.random() < 0.7)
                if self.preempted:
                    self.come_back()
            self.step(random.randrange(2**32), random.choice([1, 8, 30, 60]))

    @rule(seed=st.integers(0, 2**32), most=st.sampled_from([1, 8, 30, 60]))
    def step(self, seed: int, most: int) -> None:
        """Compute tokens of some running requests; release a request that cannot grow or is long enough."""
        random, chunks = Random(seed), {}
        for request in list(self.driver.running):
            if request.num_tokens > 70 or request.table.num_growing(request.num_tokens) > self.kv.pool.num_available:
                self.driver.leave(request)
            elif chunk := random.choice([0, most, random.randint(1, most)]):
                self.kv.blocks.grow(request)
                chunks[request] = chunk
        self.driver.step(chunks)

    @precondition(lambda self: hasattr(self, "driver") and self.driver.running)
    @rule(which=st.integers(0, 99), back=st.booleans(), swap=st.booleans())
    def go(self, which: int, back: bool, swap: bool) -> None:
        request = self.driver.running[which % len(self.driver.running)]
        if back and swap and self.driver.may_swap(request):
            self.driver.swap_out(request)
        else:
            self.driver.leave(request)
        if back:
            request.num_preemptions += 1
            self.preempted.append(request)

    @precondition(lambda self: self.preempted)
    @rule()
    def come_back(self) -> None:
        if self.fits(self.preempted[0]):
            self.driver.admit(self.preempted.pop(0))

    @precondition(lambda self: hasattr(self, "driver") and self.driver.swapped)
    @rule()
    def give_up(self) -> None:
        request = self.driver.swapped.pop()
        self.preempted.remove(request)
        self.kv.swap.discard(request)

    @rule(prompt=PROMPTS, salt=SALTS, ttl=st.sampled_from([None, TTL]))
    def pin(self, prompt: list[int], salt: str, ttl: float | None) -> None:
        before = self.kv.pins.states()
        try:
            self.kv.pins.pin(prompt, salt, ttl, self.now)
        except RequestError:
            assert self.kv.pins.states() == before

    @precondition(lambda self: hasattr(self, "driver") and self.kv.pins.states())
    @rule(which=st.integers(0, 99))
    def unpin(self, which: int) -> None:
        states = self.kv.pins.states()
        self.kv.pins.delete(states[which % len(states)].pin_id)

    @rule(seconds=st.sampled_from([1.0, TTL]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.kv.expire(self.now)
        assert all(state.expires_at is None or state.expires_at > self.now for state in self.kv.pins.states())

    @rule()
    def reset(self) -> None:
        self.kv.prefix_cache.drop()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check()

    @invariant()
    def pins_hold_what_is_written(self) -> None:
        if not hasattr(self, "driver"):
            return
        pins = self.kv.pins.states()
        assert self.kv.pins.num_waiting == sum(pin.num_written_tokens < pin.num_tokens for pin in pins)
        assert self.kv.pool.num_available <= self.kv.pool.num_blocks - self.kv.pins.num_blocks

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        for request in list(self.driver.running):
            self.driver.leave(request)
        for request in self.driver.swapped:
            self.kv.swap.discard(request)
        for places in (self.kv.swap.blocks, self.kv.swap.states):
            places.take()
            assert places.num_free == places.count
        for request in self.requests:
            output = request.token_ids[request.num_prompt_tokens :]
            assert output == reference(request.token_ids[: request.num_prompt_tokens], len(output))
        assert self.kv.pool.num_used == self.kv.pins.num_blocks
        for state in self.kv.pins.states():
            self.kv.pins.delete(state.pin_id)
        self.kv.prefix_cache.drop()
        assert self.kv.pool.num_free == self.kv.pool.num_blocks
        if self.kv.states is not None:
            assert self.kv.states.pool.num_free == self.kv.states.pool.num_blocks
        assert len(self.kv.prefix_cache.tree) == 0
        assert not self.kv.prefix_cache.tree._roots
        assert self.kv.prefix_cache.in_flight.requests() == []


KVLife.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None, derandomize=True)
TestKVLife = KVLife.TestCase
