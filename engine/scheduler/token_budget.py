"""Token budget of a step: its size, and its distribution over the requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

from llmsched.engine.config import ResolvedConfig
from llmsched.engine.executor.base import ScheduledRow, StepPlan
from llmsched.engine.executor.cost import StepShape, StepTimeModel
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.request import Request
from llmsched.engine.scheduler.ledger import Detail, Ledger

logger = logging.getLogger(__name__)

#: The same as ScheduledRow(*fields) in half the time.
_new_row = cast("Callable[[tuple[object, ...]], ScheduledRow]", partial(tuple.__new__, ScheduledRow))

#: Prefill tokens that every step may compute, so that prefills continue even if decodes alone miss target_itl.
LEAST_PREFILL = 16
#: Without a target_itl, prefills may add EXTRA times the time that a step's decodes take alone, or EXTRA_SHARED times
#: this time x prefilling requests / decoding requests if that is more. In simulations of an H100, an L40S and a CPU,
#: throughput falls by at most 2 %. Without EXTRA_SHARED it falls by 20 % if requests are mostly prompt, because too few
#: of them decode at a time.
EXTRA, EXTRA_SHARED = 2.0, 4.0
#: Without a target_itl, steps of up to LEAST_TARGET seconds are allowed in any case: readers do not notice such gaps.
LEAST_TARGET = 0.04
#: Of the steps without prefills, the step-time model learns every LEARN_EVERY-th. If drafts are to be compared with
#: them, it learns all.
LEARN_EVERY = 8
#: A step that takes longer than OUTLIER times its predicted time counts as that long, so that one pause of the machine
#: does not change the budgets of hundreds of steps.
OUTLIER = 3.0
#: Consecutive steps in which decodes alone are predicted to miss target_itl before one warning is logged.
WARN_AFTER = 32
#: After this many steps with drafts, one step without drafts is measured for comparison: in the long run, and during
#: the first LEARNED_DRAFTS steps with drafts.
DRAFTS_IN_A_ROW, FIRST_DRAFTS_IN_A_ROW, LEARNED_DRAFTS = 32, 1, 8
#: Steps after which a budget that was lowered for lack of memory is doubled. The number doubles each time memory runs
#: out again afterwards, so that a lasting shortage costs ever fewer failed steps.
RAISE_AFTER = 1024


class DraftCosts(NamedTuple):
    """Predicted times in seconds of a step of decodes: `plain` without drafts, `base` + n x `per_token` with drafts.

    n is the number of draft tokens, at most `room`. With more, the prediction is too unsure or misses target_itl.
    """

    plain: float
    base: float
    per_token: float
    room: int


class Pacer:
    """Controller that predicts step times and limits each step's tokens, so that prefills delay decodes little."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.model = StepTimeModel()
        #: Most draft tokens of a step that the model has learned, the number of steps with drafts, and how many of them
        #: came after the latest step without drafts.
        self._most_drafted = self._num_with_drafts = self._drafts_in_a_row = 0
        #: `limit` is less than max_num_batched_tokens after a step that ran out of memory.
        self.step_budget = self.limit = self._most = config.max_num_batched_tokens
        #: Why the latest budget is below `limit`, as details for the ledger.
        self.pace: dict[str, Detail] = {}
        self._raise_after = RAISE_AFTER
        self._calm_steps = 0
        self._was_raised = False
        self._target = config.target_itl
        self._learn_every = 1 if config.speculative == "auto" else LEARN_EVERY
        self._is_baseline = config.scheduling_policy != "fair"
        self._misses = 0
        self._num_steps = -1

    def next_budget(self, decodes: Sequence[Request], behind: Sequence[Request], num_startable: int) -> int:
        """Return the most tokens that the next step may compute.

        `decodes` and `behind` are the running requests with one and with more uncomputed tokens. `num_startable` is the
        number of waiting requests that could start.
        """
        num_decodes, num_prefills = len(decodes), len(behind) + num_startable
        self.step_budget, self.pace = self.limit, {}
        if not num_decodes or self._is_baseline or not self.model.trusted:
            return self.limit
        target = self._target
        if target is None and not num_prefills:
            return self.limit
        kv_tokens = sum([len(request.token_ids) for request in decodes])
        if target is None:
            alone = self.model.predict(StepShape(0, num_decodes, kv_tokens))
            target = max(LEAST_TARGET, alone * (1 + max(EXTRA, EXTRA_SHARED * num_prefills / num_decodes)))
        kv_tokens += sum([request.num_computed_tokens for request in behind])
        prefill = self.model.prefill_tokens_within(target, num_decodes, kv_tokens)
        self._warn_of_misses(num_decodes, prefill)
        budget = num_decodes + max(LEAST_PREFILL, prefill)
        if budget < self.limit:
            self.step_budget = budget
            self.pace = {"reason": "itl", "step_ms": round(1e3 * target, 1), "decoding": num_decodes}
        return self.step_budget

    def _warn_of_misses(self, num_decodes: int, prefill: int) -> None:
        if self._target is None or self._misses >= WARN_AFTER:
            return
        self._misses = 0 if prefill else self._misses + 1
        if self._misses == WARN_AFTER:
            logger.warning(
                "target_itl %.3g ms is missed by decodes alone (%d of them): prefills get %d tokens a step, so "
                "first tokens come late; raise target_itl or lower max_num_seqs",
                1e3 * self._target,
                num_decodes,
                LEAST_PREFILL,
            )

    def draft_costs(self, num_decodes: int, kv_tokens: int) -> DraftCosts | None:
        """Return the costs of drafts in a step of decodes alone, or None if a step without drafts must be measured.

        Their room is at most twice the draft tokens of an earlier step, but at least one for each decode.
        """
        most = DRAFTS_IN_A_ROW if self._num_with_drafts >= LEARNED_DRAFTS else FIRST_DRAFTS_IN_A_ROW
        if not self.model.trusted or self._drafts_in_a_row >= most:
            return None
        shapes = [StepShape(0, count, kv_tokens) for count in (num_decodes, num_decodes + 1)]
        base, with_one = (self.model.predict(shape, drafts=True) for shape in shapes)
        per_token, room = with_one - base, max(num_decodes, 2 * self._most_drafted)
        if self._target is not None and base + room * per_token > self._target:
            room = int((self._target - base) / per_token) if self._target > base else 0
        return DraftCosts(self.model.predict(shapes[0]), base, per_token, room)

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """Add a computed plan and its time in seconds to the step-time model."""
        has_prefills = bool(plan.rows) and plan.rows[-1].num_tokens > 1  # decodes are the first rows
        if self._is_due(has_prefills or plan.num_draft_tokens > 0):
            # `shape_of` also counts what this model does not use, which takes time in every step.
            counts, num_drafted = [row.num_tokens for row in plan.rows], plan.num_draft_tokens
            kv_tokens = sum([row.start for row in plan.rows]) + sum(counts)
            if num_drafted:
                counts = [row.num_tokens - len(row.draft) for row in plan.rows]
            prefills = [count for count in counts if count > 1]
            shape = StepShape(sum(prefills), len(counts) - len(prefills) + num_drafted, kv_tokens)
            self._learn(shape, seconds, drafts=num_drafted > 0 and not prefills)
            if not prefills:
                self._most_drafted = max(self._most_drafted, num_drafted)
                self._num_with_drafts += num_drafted > 0
                self._drafts_in_a_row = self._drafts_in_a_row + 1 if num_drafted else 0
        if self.limit < self._most:
            self._calm_steps += 1
            if self._calm_steps >= self._raise_after:
                self._calm_steps, self._was_raised = 0, True
                self.limit = min(self._most, 2 * self.limit)
                logger.info("enough memory for %d steps: steps have at most %d tokens", self._raise_after, self.limit)

    def learn_decodes(self, shape: StepShape, seconds: float) -> None:
        """Add a step of decodes alone to the step-time model, as `learn(...)` does for a plan."""
        if self._is_due(has_more=False):
            self._learn(shape, seconds)

    def _is_due(self, has_more: bool) -> bool:
        self._num_steps += 1
        is_due = has_more or not self.model.trusted or self._num_steps % self._learn_every == 0
        return is_due and not self._is_baseline

    def _learn(self, shape: StepShape, seconds: float, *, drafts: bool = False) -> None:
        if self.model.trusted:
            seconds = min(seconds, OUTLIER * max(self.model.predict(shape, drafts=drafts), LEAST_TARGET))
        self.model.learn(shape, seconds, drafts=drafts)

    def lower(self, num_tokens: int) -> None:
        """Limit later steps to half of `num_tokens`, the size of a step that ran out of memory."""
        self.limit = max(1, num_tokens // 2)
        self._calm_steps = 0
        if self._was_raised:
            self._raise_after, self._was_raised = 2 * self._raise_after, False


class StepBuilder:
    """Builder of one step's rows (one per request) within a token budget."""

    def __init__(self, token_budget: int, kv: KVManager, ledger: Ledger, pace: dict[str, Detail]) -> None:
        self.left = token_budget
        self._pace = pace
        self._kv = kv
        self._ledger = ledger
        self._counts: dict[Request, int] = {}
        self._behind: set[Request] = set()
        self._drafts: dict[Request, tuple[int, ...]] = {}

    def give(self, request: Request, limit: int) -> int:
        """Schedule as many of the request's tokens as `limit`, the token budget and memory allow.

        Return their number.
        """
        given = self._counts.get(request, 0)
        start = request.num_computed_tokens + given
        count = min(limit, self.left, request.num_tokens - start)
        if count > 0:
            count = self._kv.blocks.reach(request, start + count) - start
        if count <= 0:
            return 0
        self._counts[request] = given + count
        self._behind.add(request)
        self.left -= count
        return count

    def decode(self, requests: Iterable[Request]) -> None:
        """Schedule one token for each request. Each must have exactly one uncomputed token.

        Call this before `give(...)`.
        """
        self._counts = dict.fromkeys(requests, 1)
        self.left -= len(self._counts)

    def draft(self, drafts: Mapping[Request, tuple[int, ...]]) -> int:
        """Add drafts to requests given to `decode(...)`, as far as the token budget and free blocks allow.

        Returns the number of draft tokens. Call this last, so that drafts get only tokens and blocks that no other
        request needs.
        """
        before = self.left
        for request, draft in drafts.items():
            known = request.num_computed_tokens + 1
            count = self._kv.blocks.lend(request, known + min(len(draft), self.left)) - known
            if count > 0:
                self._drafts[request] = draft[:count]
                self._counts[request] += count
                self.left -= count
        return before - self.left

    def rows(self) -> list[ScheduledRow]:
        """Return the rows to compute, and write the progress of each prefill to the ledger."""
        for request in self._behind:
            done = request.num_computed_tokens + self._counts[request]
            why = self._pace if self.left <= 0 and done < request.num_tokens else {}
            self._ledger.note(request.request_id, "computed", up_to=done, of=request.num_tokens, **why)
        rows, drafts = [], self._drafts
        for request, count in self._counts.items():
            start, end = request.num_computed_tokens, len(request.token_ids) + request.num_pending_tokens
            draft = drafts.get(request, ()) if drafts else ()
            sample = start + count - len(draft) == end and end - request.num_prompt_tokens < request.sampling.max_tokens
            assert request.block_table is not None  # faster than `request.table`, for every row of every step
            state = None if request.state is None else self._kv.row_state(request, count)
            rows.append(_new_row((request, start, count, request.block_table.ids, sample, draft, state)))
        return rows
