"""The door: lets waiting requests in, one after the other, while slots, budget and memory last."""

from __future__ import annotations

from collections.abc import Callable

from llmsched.engine.config import EngineConfig
from llmsched.engine.kv.manager import KVManager
from llmsched.engine.kv.misses import Miss, MissKind
from llmsched.engine.kv.prefix_tree import PrefixHit
from llmsched.engine.request import Request, RequestStatus
from llmsched.engine.scheduler.backfill import Passing
from llmsched.engine.scheduler.counters import SchedulerCounters
from llmsched.engine.scheduler.headroom import HeadroomControl
from llmsched.engine.scheduler.ledger import Detail, Ledger
from llmsched.engine.scheduler.peak_memory import Admission, Shortage
from llmsched.engine.scheduler.prediction import OutputPredictor
from llmsched.engine.scheduler.step import Step
from llmsched.engine.scheduler.waiting import WaitingQueue, is_short
from llmsched.engine.scheduler.waits import WaitFor, Waits

#: Requests that are offered a place in one step beyond those that get one.
OFFERS_BEYOND_SLOTS = 8
#: A prefix hit shorter than this moves nobody forward (tokens).
MIN_BONUS_HIT = 512


class Door:
    """Moves requests from `waiting` to `running`, which it shares with the scheduler.

    It remembers when there is no use in trying: an epoch ends whenever somebody arrives, ends, is preempted or let in,
    and an epoch in which nobody could be let in is not tried again unless more memory has come free (as chunks leave
    the windows of layers).
    """

    def __init__(
        self,
        kv: KVManager,
        config: EngineConfig,
        clock: Callable[[], float],
        *,
        waiting: WaitingQueue,
        running: list[Request],
        ledger: Ledger,
        counters: SchedulerCounters,
        predictor: OutputPredictor,
    ) -> None:
        assert config.max_num_batched_tokens is not None
        self.control = HeadroomControl(config, min(config.max_num_seqs, config.max_num_batched_tokens))
        self.passing = Passing(waiting, ledger, config.max_passes)
        self.waits = Waits(clock)
        self._admission = Admission(kv, config, predictor)
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
        self._shut_out: set[Request] = set()
        self._lane_places = 1.0
        self._first_lacks = WaitFor.STEP

    def new_step(self) -> None:
        """Nobody has been preempted in this step yet."""
        self._try_again = False
        self._shut_out.clear()
        self.passing.new_step()

    def changed(self) -> None:
        """Somebody has come, gone or lost memory: those who wait may have better luck now."""
        self._epoch += 1

    def shut_out(self, request: Request) -> None:
        """The request was preempted in this step, so it is not let in again in it."""
        self._shut_out.add(request)
        self._first_lacks = WaitFor.MEMORY
        self.changed()

    @property
    def is_full(self) -> bool:
        return len(self._running) >= self.control.max_running

    @property
    def worth_trying(self) -> bool:
        if not self._waiting:
            return False
        return self._epoch != self._stuck_epoch or self._kv.pool.num_available > self._stuck_available

    def lacking(self, step: Step) -> WaitFor:
        """What the first of those who wait after this step has been decided waits for."""
        if self.is_full:
            return WaitFor.SLOT
        return WaitFor.STEP if step.left <= 0 else self._first_lacks

    def admit_short_ones(self, step: Step, lane: int) -> list[Request]:
        """Let short requests in while the fast lane's `lane` tokens last; returns those let in.

        Where more wait than there are slots, the lane takes no more than its share of those either: else short requests
        could take every slot that comes free.
        """
        admitted: list[Request] = []
        scarce = len(self._waiting) > self.control.max_running - len(self._running)
        for request in self._waiting.short_ones(OFFERS_BEYOND_SLOTS):
            if lane <= 0 or (scarce and self._lane_places < 1.0) or self.is_full:
                break
            if self.admit(request):
                self._lane_places -= scarce
                lane -= step.give(request, lane)
                admitted.append(request)
        return admitted

    def admit_in_order(self, step: Step) -> None:
        """Offer places by rank and quota while budget and slots last; past one that does not fit, to those who may.

        If nobody could take one, there is no use in trying again until somebody arrives, ends or is preempted.
        """
        epoch, slots = self._epoch, self.control.max_running - len(self._running)
        if slots <= 0:
            return
        offers = self._waiting.in_order(slots + OFFERS_BEYOND_SLOTS, self._bonus, self._config.cache_bonus)
        for request in offers:
            if step.left <= 0 or self.is_full:
                return
            if request.status is not RequestStatus.RUNNING and self.admit(request):
                self._waiting.count_admission(request)
                self._lane_places = min(1.0, self._lane_places + self._lane_ratio)
                step.give(request, step.left)
        if self._lane_places < 1.0 and self._waiting.has_short:
            self._lane_places, self._try_again = 1.0, True  # slots that nobody could take in order
        if epoch == self._epoch and step.left > 0 and not self._try_again:
            self._stuck_epoch, self._stuck_available = epoch, self._kv.pool.num_available

    def admit(self, request: Request) -> bool:
        """Let a waiting request in, if there is a slot, its memory, and nobody is passed who may not be.

        One that was preempted in this step is not scheduled in it.
        """
        if self.is_full:
            return False
        if request in self._shut_out:
            self._try_again = True
            return False
        if not self.passing.may_go(request, self._admission):
            return False
        hit = self._kv.find_prefix(request)
        if self._waits_for_prefix(request, hit):
            return False
        headroom = int(self.control.headroom * self._kv.pool.num_blocks)
        shortage = self._admission.shortage(request, hit, self._running, headroom)
        if shortage is not None:
            self._note_shortage(request, shortage, headroom)
            return False
        self.passing.goes(request)
        self.start(request, hit)
        self._counters.num_headroom_changes += self.control.admitted()
        self.changed()
        return True

    def start(self, request: Request, hit: PrefixHit) -> None:
        """Move a request from waiting to running."""
        self._waiting.remove(request)
        miss = self._kv.classify(request, hit) if request.num_preemptions == 0 else None
        num_restored = self._kv.admit(request, hit)
        self._count_admission(request, miss, num_restored)
        request.status = RequestStatus.RUNNING
        self._running.append(request)

    def is_short(self, request: Request) -> bool:
        """Whether the fast lane is for this request, as things are in the cache now."""
        if self._config.fast_lane_share == 0:
            return False
        known = request.num_computed_tokens if request.swapped is None else request.swapped.num_tokens
        if request.status is not RequestStatus.RUNNING:
            known = max(known, self._kv.find_prefix(request).num_tokens)
        return is_short(request, known, self._config)

    def _waits_for_prefix(self, request: Request, hit: PrefixHit) -> bool:
        """Whether running requests are about to write what this one would have to compute as well."""
        if request.swapped is not None:
            return False
        coming = self._kv.find_in_flight(request, hit)
        if coming < self._kv.block_size:
            return False
        self._ledger.note(request.request_id, "waits for a prefix", tokens=coming)
        self._refused(request, WaitFor.PREFIX)
        self._try_again = True
        return True

    def _note_shortage(self, request: Request, shortage: Shortage, headroom: int) -> None:
        self._ledger.note(
            request.request_id,
            "does not fit",
            reason="now" if shortage.now else "predicted peak",
            missing_blocks=shortage.blocks,
            free_blocks=self._kv.pool.num_available,
            headroom_blocks=headroom,
            running=len(self._running),
        )
        self._refused(request, WaitFor.MEMORY)
        self.passing.blocked(request, shortage.blocks, self._running, self._admission)

    def _refused(self, request: Request, lacking: WaitFor) -> None:
        if request is self._waiting.first:
            self._first_lacks = lacking

    def _bonus(self, request: Request) -> float:
        if request.num_tokens <= MIN_BONUS_HIT:  # the last token is never taken from the cache
            return 0.0
        hit = self._kv.find_prefix(request)
        return self._config.cache_bonus if hit.num_tokens >= MIN_BONUS_HIT else 0.0

    def _count_admission(self, request: Request, miss: Miss | None, num_restored: int) -> None:
        """Prefix hits are counted once, on first admission; work that preemption makes us do again is kept apart."""
        cached: dict[str, Detail] = {"cached_tokens": request.num_computed_tokens, "tokens": request.num_tokens}
        if miss is not None:
            # What other tenants have sent is not for the eyes of this one.
            kind = MissKind.COLD if miss.kind is MissKind.OTHER_SALT else miss.kind
            cached |= {"prefix": kind.value, "known_tokens": miss.position}
            if miss.age is not None:
                cached["evicted_s_ago"] = round(miss.age, 3)
        if num_restored:
            cached["restored_blocks"] = num_restored
            self._counters.num_swapped_in += 1
        for what, seconds in self.waits.end(request).items():
            cached[f"waited_for_{what}_ms"] = round(1e3 * seconds, 3)
        self._ledger.note(request.request_id, "admitted", running=len(self._running), **cached)
        if request.num_preemptions:
            self._counters.recomputed_tokens += max(0, request.num_lost_tokens - request.num_computed_tokens)
            return
        request.first_scheduled_time = self._clock()
        request.num_cached_tokens = request.num_computed_tokens
        self._counters.prefix_queried_tokens += request.num_prompt_tokens
        self._counters.prefix_hit_tokens += request.num_computed_tokens
