"""Input and output of the engine: requests, with their scheduling state, and outputs."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from llmsched.engine.kv.prefix_tree import PrefixKey
from llmsched.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmsched.engine.grammar.compiler import Matcher
    from llmsched.engine.kv.recurrent_state import SequenceState
    from llmsched.engine.kv.table import BlockTable, SwappedKV

#: Adapter of a sequence that uses the model as it is.
NO_ADAPTER = -1


def prefix_key(adapter: int, cache_salt: str) -> PrefixKey:
    return cache_salt if adapter == NO_ADAPTER else (adapter, cache_salt)


class RequestStatus(StrEnum):
    """State of a sequence. A SWAPPED sequence waits like a WAITING sequence, with its KV in host memory."""

    WAITING = "waiting"
    SWAPPED = "swapped"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Reason why a sequence ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or max_model_len was reached
    ABORT = "abort"  # for example, the client disconnected
    ERROR = "error"  # see RequestOutput.error
    DEADLINE = "deadline"  # the request could not meet its deadline, see RequestOutput.error


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and sampling parameters of one choice of a request: the part of a Request that executors see."""

    request_id: str
    token_ids: list[int]  # prompt and output, without pending tokens
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int  # combines the request's seed and the index of the choice
    stop_ids: frozenset[int]  # the first output token in this set ends the sequence
    adapter: int = field(default=NO_ADAPTER, kw_only=True)  # index of a LoRA adapter
    #: Tokens (0 or 1) at the end that a launched step samples; num_tokens counts them.
    num_pending_tokens: int = field(default=0, init=False)
    #: State of the sampling's grammar after the output in `token_ids`.
    matcher: Matcher | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        sampling = self.sampling
        if sampling.grammar is not None:
            self.matcher = sampling.grammar.matcher(ignore_eos=sampling.ignore_eos, after=sampling.grammar_after)

    @property
    def depends_on_tokens(self) -> bool:
        """True if the host must know all tokens before it can sample the next one."""
        return self.matcher is not None or self.sampling.has_penalties

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens

    def ahead(self, count: int) -> Sequence:
        """Return the sequence with `count` more pending tokens. The result shares `token_ids` with this one.

        The sequence must not depend on tokens (see `depends_on_tokens`).
        """
        if not count:
            return self
        assert not self.depends_on_tokens
        fields = (self.request_id, self.token_ids, self.num_prompt_tokens, self.sampling, self.seed, self.stop_ids)
        later = Sequence(*fields)
        later.num_pending_tokens = self.num_pending_tokens + count
        return later

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


@dataclass(slots=True, eq=False)
class Request(Sequence):
    """Sequence with its scheduling state. An API request with n > 1 becomes n Requests.

    Times are in seconds of the engine's clock.
    """

    arrival_time: float = 0.0
    priority: int = 0
    deadline: float = math.inf  # by which the output must be complete
    rank: float = 0.0  # order in the queue, lowest first
    cache_salt: str = ""
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0  # the first tokens, whose KV `block_table` holds once the launched steps are computed
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_lost_tokens: int = 0  # num_computed_tokens at the last preemption
    num_passed: int = 0  # requests that were admitted while this request was first in the queue
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    block_table: BlockTable | None = None
    state: SequenceState | None = None  # of recurrent layers, while the request runs
    swapped: SwappedKV | None = None  # KV in host memory, while the request waits
    encoded: bytes = b""  # token ids as bytes, while the request waits

    @property
    def prefix_key(self) -> PrefixKey:
        return prefix_key(self.adapter, self.cache_salt)

    @property
    def table(self) -> BlockTable:
        assert self.block_table is not None, f"request {self.request_id} has no blocks"
        return self.block_table


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one token, before temperature, penalties and filters are applied."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability) of the most likely tokens, best first


@dataclass(frozen=True, slots=True)
class ChoiceRecord:
    """Counts and times of a choice. Times are in seconds of the engine's clock; None: not reached yet."""

    index: int
    finish_reason: FinishReason | None  # None: the choice has not ended
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    end_time: float  # if the choice has not ended, the time of this record
    gaps: array[float]  # between one token and the next, in seconds


@dataclass(slots=True)
class RequestOutput:
    """New output of one sequence since its previous RequestOutput."""

    request_id: str
    index: int
    text: str  # new text
    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    #: Text of each new token, "" while a character is incomplete; a stop string cuts only `text`.
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    #: Only in the first output, one per prompt token (None for the first).
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    caused_by_request: bool = False  # False if the engine or the model caused the error
    record: ChoiceRecord | None = None  # only in the last output

    @property
    def finished(self) -> bool:
        """True for the last output of the sequence."""
        return self.finish_reason is not None
