"""Admission of waiting requests while max_num_seqs, the token budget and memory allow it."""

from __future__ import annotations

from collections.abc import Callable

from llmsched.engine.config import ResolvedConfig
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.kv.misses import MissKind
from llmsched.engine.kv.prefix_tree import PrefixHit, blocks_of
from llmsched.engine.request import Request, RequestStatus
from llmsched.engine.scheduler.backfill import Backfill
from llmsched.engine.scheduler.headroom import HeadroomControl
from llmsched.engine.scheduler.ledger import Detail, Ledger, SchedulerCounters
from llmsched.engine.scheduler.prediction import OutputPredictor, forecast_peak
from llmsched.engine.scheduler.token_budget import StepBuilder
from llmsched.engine.scheduler.waiting_queue import WaitingQueue, WaitReason

#: Requests considered for admission in one step, beyond the number that may still run.
EXTRA_OFFERS = 8
#: Shortest prefix hit, in tokens, that earns a cache bonus.
MIN_BONUS_HIT = 512


class Admission:
    """Part of the scheduler that moves requests from `waiting` to `running`."""

    # An epoch ends whenever a request arrives, ends, or is preempted or admitted, and whenever a pin is released. If no
    # waiting request could be admitted, Admission does not try again in the same epoch, unless more blocks have become
    # available.

    def __init__(
        self,
        kv: KVManager,
        config: ResolvedConfig,
        clock: Callable[[], float],
        *,
        waiting: WaitingQueue,
        running: list[Request],
        ledger: Ledger,
        counters: SchedulerCounters,
        predictor: OutputPredictor,
    ) -> None:
        self.control = HeadroomControl(config, min(config.max_num_seqs, config.max_num_batched_tokens))
        self.backfill = Backfill(waiting, ledger, predictor, config)
        self._predictor = predictor
        self._kv = kv
        self._config = config
        self._lane_ratio = config.fast_lane_share / (1 - config.fast_lane_share)
        self._clock = clock
        self._waiting = waiting
        self._running = running
        self._ledger = ledger
        self._counters = counters
        self._epoch = 0
        self._stuck_epoch = -1
        self._stuck_available = 0
        self._try_again = False
        self._excluded: set[Request] = set()
        self._lane_places = 1.0
        self.first_lacks = WaitReason.STEP

    def new_step(self) -> None:
        self._try_again = False
        self._excluded.clear()
        self.backfill.new_step()

    def changed(self) -> None:
        """Note a change that makes it worth trying again to admit waiting requests."""
        self._epoch += 1

    def exclude(self, request: Request) -> None:
        """Keep a request that was preempted in this step from being admitted before the next step."""
        self._excluded.add(request)
        self.first_lacks = WaitReason.MEMORY
        self.changed()

    @property
    def is_full(self) -> bool:
        return len(self._running) >= self.control.max_running

    @property
    def worth_trying(self) -> bool:
        if not self._waiting:
            return False
        return self._epoch != self._stuck_epoch or self._kv.pool.num_available > self._stuck_available

    @property
    def num_startable(self) -> int:
        """Number of waiting requests for which max_running leaves room; 0 if `worth_trying` is False."""
        room = max(0, self.control.max_running - len(self._running))  # preemptions lower max_running
        return min(len(self._waiting), room) if self.worth_trying else 0

    def wait_reason(self, step: StepBuilder) -> WaitReason:
        if self.is_full:
            return WaitReason.MAX_RUNNING
        return WaitReason.STEP if step.left <= 0 else self.first_lacks

    def admit_short_ones(self, step: StepBuilder, lane: int) -> list[Request]:
        """Admit short requests and give them at most `lane` tokens of the step in total. Return these requests."""
        admitted: list[Request] = []
        scarce = len(self._waiting) > self.control.max_running - len(self._running)
        if not scarce:  # places that the lane took earlier keep no request waiting any more
            self._lane_places = 1.0
        for request in self._waiting.short_ones(EXTRA_OFFERS):
            if lane <= 0 or (scarce and self._lane_places < 1.0) or self.is_full:
                break
            if self._admit(request, min(lane, step.left)):
                self._lane_places -= scarce
                lane -= step.give(request, lane)
                admitted.append(request)
        return admitted

    def admit_in_order(self, step: StepBuilder) -> None:
        """Admit requests in the order of `WaitingQueue.offers(...)` while token budget and max_running allow it."""
        epoch, places = self._epoch, self.control.max_running - len(self._running)
        if places <= 0:
            return
        for offer in self._waiting.offers(places + EXTRA_OFFERS, self._bonus, self._config.cache_bonus):
            if step.left <= 0 or self.is_full:
                return
            if self._admit(offer.request, step.left):
                self._waiting.count_taken(offer)
                self._lane_places = min(1.0, self._lane_places + self._lane_ratio)
                step.give(offer.request, step.left)
        if self._lane_places < 1.0 and self._waiting.short_ones(1):
            self._lane_places, self._try_again = 1.0, True  # let the fast lane use the room that is left
        if epoch == self._epoch and step.left > 0 and not self._try_again:
            self._stuck_epoch, self._stuck_available = epoch, self._kv.pool.num_available

    def _admit(self, request: Request, left: int) -> bool:
        if self.is_full:
            return False
        if request in self._excluded:
            self._try_again = True
            return False
        if not self.backfill.may_pass(request, left):
            return False
        hit = self._kv.prefix_cache.find(request)
        coming = 0 if request.swapped is not None else self._kv.prefix_cache.num_coming(request, hit)
        if coming >= self._kv.block_size:  # running requests are computing KV that this request can reuse
            self._ledger.note(request.request_id, "waits for a prefix", tokens=coming)
            self._refused(request, WaitReason.PREFIX)
            self._try_again = True
            return False
        if self._lacks_memory(request, hit):
            return False
        self.backfill.admitted(request)
        self.start(request, hit)
        self._counters.num_headroom_changes += self.control.admitted()
        self.changed()
        return True

    def start(self, request: Request, hit: PrefixHit) -> None:
        """Move a request from `waiting` to `running`. `hit` is the prefix that need not be computed."""
        waited = self._waiting.remove(request)
        miss = self._kv.prefix_cache.classify(request, hit) if request.num_preemptions == 0 else None
        num_restored = self._kv.admit(request, hit)
        cached: dict[str, Detail] = {"cached_tokens": request.num_computed_tokens, "tokens": request.num_tokens}
        if miss is not None:
            # A tenant must not learn what other tenants have sent.
            kind = MissKind.COLD if miss.kind is MissKind.OTHER_SALT else miss.kind
            cached |= {"prefix": kind.value, "known_tokens": miss.position}
            if miss.age is not None:
                cached["evicted_s_ago"] = round(miss.age, 3)
        if num_restored:
            cached["restored_blocks"] = num_restored
            self._counters.num_swapped_in += 1
        cached |= {f"waited_for_{reason}_ms": round(1e3 * seconds, 3) for reason, seconds in waited.items()}
        self._ledger.note(request.request_id, "admitted", running=len(self._running), **cached)
        if request.num_preemptions:
            self._counters.recomputed_tokens += max(0, request.num_lost_tokens - request.num_computed_tokens)
        else:
            request.first_scheduled_time = self._clock()
            request.num_cached_tokens = request.num_computed_tokens
            self._counters.prefix_queried_tokens += request.num_prompt_tokens
            self._counters.prefix_hit_tokens += request.num_computed_tokens
            for reason, seconds in waited.items():
                self._counters.count_wait(reason, seconds)
        request.status = RequestStatus.RUNNING
        self._running.append(request)

    def is_short(self, request: Request) -> bool:
        """Return True if the request may use the fast lane.

        That is, if its uncached tokens are at most fast_lane_prompt, its max_tokens are at most fast_lane_output, and
        fast_lane_share is not 0.
        """
        config = self._config
        if config.fast_lane_share == 0:
            return False
        known = request.num_computed_tokens if request.swapped is None else request.swapped.num_tokens
        if request.status is not RequestStatus.RUNNING:
            known = max(known, self._kv.prefix_cache.find(request).num_tokens)
        uncached = request.num_tokens - known
        return uncached <= config.fast_lane_prompt and request.sampling.max_tokens <= config.fast_lane_output

    def _lacks_memory(self, request: Request, hit: PrefixHit) -> bool:
        """Return True if there is too little memory for the request, after reserving a start for it (see Backfill)."""
        if not self._running:
            return False
        pool = self._kv.pool
        headroom = int(self.control.headroom * pool.num_blocks)
        missing, reason = self._kv.num_missing(request, hit) + headroom - pool.num_available, "now"
        if missing <= 0 and self._config.output_prediction != "none":
            found = blocks_of(hit.nodes, ())
            held_by_others = len(found) - pool.count_cached(found)
            peak = forecast_peak(self._kv, self._predictor, request, self._running)
            missing = peak - held_by_others - pool.num_blocks
            reason = "predicted peak"
        if missing <= 0:
            return False
        self._ledger.note(
            request.request_id,
            "does not fit",
            reason=reason,
            missing_blocks=missing,
            free_blocks=pool.num_available,
            headroom_blocks=headroom,
            running=len(self._running),
        )
        self._refused(request, WaitReason.MEMORY)
        self.backfill.reserve(request, missing, self._running)
        return True

    def _refused(self, request: Request, lacking: WaitReason) -> None:
        if request is self._waiting.first:
            self.first_lacks = lacking

    def _bonus(self, request: Request) -> float:
        if request.num_tokens <= MIN_BONUS_HIT:  # the last token is never taken from the cache
            return 0.0
        hit = self._kv.prefix_cache.find(request)
        return self._config.cache_bonus if hit.num_tokens >= MIN_BONUS_HIT else 0.0
