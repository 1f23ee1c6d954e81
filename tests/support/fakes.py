"""Executor without a model. Its KV cache holds token ids, so that it detects a wrong block or position at once."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from configs import resolved

from llmsched.engine.executor.base import Executor, RowResult, ScheduledRow, StepPlan, StepResult
from llmsched.engine.kv.layout import KVLayout
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.kv.recurrent_state import StateMoves, num_state_slots
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.request import FinishReason, Request, Sequence
from llmsched.engine.sampling_params import SamplingParams
from llmsched.engine.step_loop import StepLoop

VOCAB = 1000
BLOCK = 16
#: Bytes of a block, for the swap space only: a copy of the fake executor takes `per_swapped_block` seconds.
BLOCK_BYTES = 1000
#: Recurrent state that no step has computed.
NO_STATE = [-9]


def next_token(token_ids: list[int]) -> int:
    """Return the fake model's next token, which depends on all of `token_ids` and their order."""
    return zlib.crc32(np.asarray(token_ids, dtype=np.int64).tobytes()) % VOCAB


def repeating_token(token_ids: list[int]) -> int:
    """Return the next token of a fake model that three times of four repeats the seventh token from the end."""
    chance = next_token(token_ids)
    return token_ids[-7] if chance % 4 and len(token_ids) >= 7 else chance


def reference(prompt: list[int], count: int, model: Callable[[list[int]], int] = next_token) -> list[int]:
    """Return the `count` output tokens of a request that is served alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(model(tokens))
    return tokens[len(prompt) :]


@dataclass(eq=False)
class LaunchedStep:
    """Launched step of the fake executor. It has copies of the block tables and token ids as they were at the launch.

    `exhausted` is the number of parts of the step (see FakeExecutor) after which the executor runs out of memory. A
    `spoilt` step computes nonsense, because it depends on tokens of a step that failed.
    """

    plan: StepPlan
    rows: list[ScheduledRow]
    token_ids: list[list[int]]
    exhausted: int | None = None
    spoilt: bool = False
    result: StepResult | None = None


class FakeExecutor(Executor):
    """Executor that writes token ids into the KV cache and checks them when it reads them through the block table.

    A launched step runs only when its result or that of a later step is collected. If `looks_ahead` is set, a step may
    use tokens of the step before, even if the result of that step has not been collected.

    `model` gives the next token after some tokens. The recurrent state in a slot is the token ids from which it was
    computed.

    A step takes `elapsed` seconds, and `per_swapped_block` seconds more for each block that is copied from or to host
    memory. Rows of the requests whose ids are in `failing` fail. The parts of a step are the three kinds of copies
    (swap-out, copy-on-write, swap-in), the copies of recurrent states, and then each row. Each number in `exhausted`
    makes one step run out of memory after that many parts: in `launch` if the step has an even number of rows, else in
    `collect`.
    """

    elapsed = 1.0
    per_swapped_block = 0.0

    def __init__(
        self, num_blocks: int, block_size: int, num_host_blocks: int = 0, layout: KVLayout | None = None
    ) -> None:
        self.layout = layout or KVLayout(block_size)
        self.kv = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.host = np.full((num_host_blocks, block_size), -2, dtype=np.int64)
        self.states: dict[int, list[int]] = {}
        self.host_states: dict[int, list[int]] = {}
        self.block_size = block_size
        self.plans: list[StepPlan] = []
        self.failing: set[str] = set()
        self.exhausted: list[int] = []
        self.model: Callable[[list[int]], int] = next_token
        self._queue: list[LaunchedStep] = []
        self._sampled: dict[Sequence, int] = {}

    def launch(self, plan: StepPlan) -> LaunchedStep:
        assert len({row.sequence.request_id for row in plan.rows}) == len(plan.rows), "a sequence has two rows"
        rows = [row._replace(block_table=row.block_table.copy()) for row in plan.rows]
        step = LaunchedStep(plan, rows, [[*row.sequence.token_ids, *row.draft] for row in plan.rows])
        assert sum(len(row.draft) for row in rows) == plan.num_draft_tokens
        for row, ids in zip(rows, step.token_ids, strict=True):
            assert not row.draft or (row.sample and row.start + row.num_tokens == len(ids)), "a draft in the middle"
            missing = row.start + row.num_tokens - len(ids)
            assert missing <= (self.looks_ahead and row.num_tokens == 1), "ids are not known yet"
        step.exhausted = self.exhausted.pop() if self.exhausted else None
        self._queue.append(step)
        if step.exhausted is not None and len(rows) % 2 == 0:
            self.collect(step)
        return step

    def collect(self, step: LaunchedStep) -> StepResult:
        while step in self._queue:
            self._run(self._queue.pop(0))
        if step.result is None:
            raise MemoryError("told to run out")
        return step.result

    def _run(self, step: LaunchedStep) -> None:
        plan = step.plan
        for row, ids in zip(step.rows, step.token_ids, strict=True):
            if row.start + row.num_tokens > len(ids):
                ids.append(-7 if step.spoilt else self._sampled[row.sequence])
        parts = [
            partial(self._move, self.kv, self.host, plan.swap_out),
            partial(self._copy, plan.copies),
            partial(self._move, self.host, self.kv, plan.swap_in),
            partial(self._move_states, plan.state_moves),
            *(partial(self._write, row, ids) for row, ids in zip(step.rows, step.token_ids, strict=True)),
        ]
        for part in parts[: step.exhausted]:
            part()
        if step.exhausted is not None:
            for later in self._queue:
                later.spoilt = True
        elif not step.spoilt:
            self.plans.append(plan)
            swapping = self.per_swapped_block * (len(plan.swap_out) + len(plan.swap_in))
            results = [self._read(row, ids) for row, ids in zip(step.rows, step.token_ids, strict=True)]
            step.result = StepResult(results, self.elapsed + swapping, swapping)

    def _move(self, source: np.ndarray, destination: np.ndarray, pairs: ListLike[tuple[int, int]]) -> None:
        assert len({to for _, to in pairs}) == len(pairs), "two copies into one place"
        for origin, to in pairs:
            destination[to] = source[origin]

    def _copy(self, copies: ListLike[tuple[int, int]]) -> None:
        before = self.kv.copy()
        assert len({destination for _, destination in copies}) == len(copies), "two copies into one block"
        for source, destination in copies:
            assert (self.kv[source] == before[source]).all(), "a copy of a copy"
            self.kv[destination] = self.kv[source]

    def _move_states(self, moves: StateMoves) -> None:
        # A state is missing if it comes from a step that failed; then this step is spoilt.
        self.host_states |= {host: self.states.get(slot, NO_STATE) for slot, host in moves.swap_out}
        self.states |= {slot: self.states.get(source, NO_STATE) for source, slot in moves.copies}
        self.states |= {slot: self.host_states.get(host, NO_STATE) for host, slot in moves.swap_in}

    def _write(self, row: ScheduledRow, token_ids: list[int]) -> None:
        assert row.num_tokens > 0
        if row.state is not None:
            before = self.states.get(row.state.slot, NO_STATE) if row.start else []
            for at, slot in [*row.state.saves, (row.start + row.num_tokens, row.state.slot)]:
                assert row.start < at <= row.start + row.num_tokens
                self.states[slot] = before + token_ids[row.start : at]
        for position in range(row.start, row.start + row.num_tokens):
            blocks = row.block_table[:, position // self.block_size]
            assert len(set(blocks.tolist())) == len(blocks), "two groups write to one block"
            self.kv[blocks, position % self.block_size] = token_ids[position]

    def _read(self, row: ScheduledRow, token_ids: list[int]) -> RowResult:
        end = row.start + row.num_tokens
        for group, table in enumerate(row.block_table):
            # The tokens to which the row's tokens attend; in a window group, those in the window of its first token.
            start = 0 if group < self.layout.full_groups else max(0, row.start - self.layout.window + 1)
            held = self.kv[table].reshape(-1)[start:end].tolist()
            assert held == token_ids[start:end], f"{row.sequence.request_id}: the KV is not its own"
        if row.state is not None:
            assert self.states[row.state.slot] == token_ids[:end], f"{row.sequence.request_id}: not its own state"
        if not row.sample:
            return RowResult(error="told to fail" if row.sequence.request_id in self.failing else None)
        first, *more = (self.model(token_ids[: end - later]) for later in range(len(row.draft), -1, -1))
        self._sampled[row.sequence] = first
        if row.sequence.request_id in self.failing:
            failed = RowResult(error="told to fail")
            return RowResult(token_id=first, more=[failed] * len(more)) if more else failed
        return RowResult(token_id=first, more=[RowResult(token_id=token) for token in more])


def make_request(name: str, prompt: list[int], max_tokens: int = 8, arrival: float = 0.0, **more: object) -> Request:
    """Make a greedy request that ends only at `max_tokens`."""
    return Request(
        request_id=name,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        seed=0,
        stop_ids=frozenset(),
        arrival_time=arrival,
        **more,  # type: ignore[arg-type]
    )


class Harness(StepLoop):
    """Step loop with a fake executor. Each call of `step` checks the scheduler and moves its clock on by one second."""

    executor: FakeExecutor
    max_attempts = 10_000

    def __init__(
        self,
        num_blocks: int,
        budget: int = 64,
        max_num_seqs: int = 16,
        caching: bool = True,
        *,
        swap_blocks: int = 0,
        max_pinned_blocks: int = 0,
        layout: KVLayout | None = None,
        looks_ahead: bool = False,
        **knobs: Any,
    ) -> None:
        self.time = 0.0
        config = resolved(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, swap_space=swap_blocks * BLOCK_BYTES, **knobs
        )
        kv = KVManager(
            num_blocks,
            layout or KVLayout(BLOCK),
            enable_prefix_caching=caching,
            max_pinned_blocks=max_pinned_blocks,
            swap=SwapSpace(swap_blocks, BLOCK_BYTES, swap_blocks and max_num_seqs // 2),
            num_states=num_state_slots(max_num_seqs, enable_prefix_caching=caching),
            max_pinned_states=1,
            max_running=max_num_seqs,
        )
        super().__init__(config, kv, FakeExecutor(num_blocks, BLOCK, swap_blocks, layout), lambda: self.time)
        self.executor.looks_ahead = looks_ahead
        self._failed: StepPlan | None = None
        self._widths: dict[Request, int] = {}  # of block tables after a step that ran out of memory
        self._schedule, self.scheduler.schedule = self.scheduler.schedule, self.schedule  # type: ignore[method-assign]

    def add(self, request: Request) -> Request:
        assert self.scheduler.fits_alone(request.num_prompt_tokens, request.sampling.max_tokens)
        self.scheduler.add(request)
        return request

    def schedule(self) -> StepPlan:
        scheduler, failed = self.scheduler, self._failed
        ran, preemptions = set(scheduler.running), scheduler.counters.num_preemptions
        plan = self._schedule()
        assert len(scheduler.running) <= scheduler.config.max_num_seqs
        preempted = failed is not None or scheduler.counters.num_preemptions > preemptions
        if preempted and ran & set(scheduler.running):
            assert ran >= set(scheduler.running), "a step that preempted admits no request"
        assert plan.num_tokens <= scheduler.pacer.step_budget
        assert failed is None or plan.num_tokens <= max(1, failed.num_tokens // 2)
        self._failed = None
        return plan

    def _abandon(self, plan: StepPlan, error: Exception) -> None:
        super()._abandon(plan, error)
        self._failed = plan
        self.scheduler.check_integrity()
        # A block for a token that the step would have sampled may stay until the token is sampled.
        self._widths = {request: len(request.table) for request in self.scheduler.running}
        for request in self.scheduler.running:  # no blocks of windows are left over
            width = request.table.layout.width(request.num_tokens)
            assert request.table.window_end <= request.table.needed_window_end(width)

    def step(self) -> None:
        self.run_step()
        self.scheduler.check_integrity()
        if self.config.scheduling_policy != "static":
            for request in self.scheduler.running:  # no blocks of drafts are left over
                width = request.table.layout.width(request.num_tokens)
                assert len(request.table) <= max(width, self._widths.get(request, 0))
        self.time += 1.0

    def run(self, limit: int = 10_000) -> int:
        """Step until there is no work, and return the number of steps."""
        for steps in range(limit):
            if not self.has_work():
                return steps
            self.step()
        raise AssertionError(f"not idle after {limit} steps")


def tokens(count: int, seed: int = 0) -> list[int]:
    """Return a prompt of `count` ids. Prompts whose seeds differ and are below 25 differ in their first id."""
    return [(seed * 7919 + i * 31 + seed) % 1000 for i in range(count)]


def assert_right(*requests: Request, model: Callable[[list[int]], int] = next_token) -> None:
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        output = request.token_ids[request.num_prompt_tokens :]
        assert output == reference(prompt, request.sampling.max_tokens, model), request.request_id
        assert request.finish_reason is FinishReason.LENGTH
