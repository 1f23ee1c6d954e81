"""Drafts for speculative decoding: guesses of a request's next tokens, looked up in its prompt and output.

A step computes a draft as a short prefill after the request's last token, and samples a token after each of its tokens.
The samples are kept up to the first one that differs from the draft. The output equals decoding without drafts: a
sampled token depends only on the logits and a key, and the key only on the seed and the position. So a token sampled
after correct draft tokens is the token that plain decoding samples there. Samples after a wrong draft token are
dropped. By induction, the outputs are equal token by token for every seed, and therefore equal in distribution. A draft
token is kept with its probability under the model, which is the best that rejection sampling can do with a fixed guess
(Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", ICML 2023, with a draft model
that is certain of its guess).

Lookup of n-grams: A. Saxena, "Prompt lookup decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmsched.engine.config import MAX_DRAFT_TOKENS, ResolvedConfig
from llmsched.engine.executor.base import RowResult
from llmsched.engine.request import Request
from llmsched.engine.scheduler.ledger import Ledger, SchedulerCounters
from llmsched.engine.scheduler.ngram_index import Match, NgramIndex, continuation
from llmsched.engine.scheduler.token_budget import DraftCosts, Pacer

#: Share of draft tokens that are assumed to be right before any is checked, and the number of checked tokens whose
#: weight this assumption has.
ASSUMED_SHARE, ASSUMED_WEIGHT = 0.5, 4.0
#: Factor by which each checked token lowers the weight of those before it.
FORGET = 0.95
#: In mode auto, drafts must promise this many times the tokens per second of a step without drafts. To draft, an engine
#: that looks ahead waits for the results of the step in flight, whose cost no step-time model knows.
LEAST_GAIN, LEAST_GAIN_AHEAD = 1.03, 1.15
#: Steps without drafts after which a few draft tokens that seemed too slow are tried, so that their time is measured
#: again. The number doubles with each try in a row, up to LONGEST_PATIENCE.
TRY_AGAIN, LONGEST_PATIENCE = 64, 1024


class Acceptance:
    """Shares of checked draft tokens that were correct, by the kind of the match from which they come."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._right = [[0.0, 0.0] for _ in range(longest + 1)]  # by length, and for those with a disputed match
        self._checked = [[0.0, 0.0] for _ in range(longest + 1)]

    def add(self, match: Match, place: int, right: bool) -> None:
        """Count the token at index `place` of the draft that comes from `match`."""
        length, disputed = self._kind(match, place)
        self._right[length][disputed] = FORGET * self._right[length][disputed] + right
        self._checked[length][disputed] = FORGET * self._checked[length][disputed] + 1

    def share(self, match: Match, place: int, assumed: float) -> float:
        length, disputed = self._kind(match, place)
        right, checked = self._right[length][disputed], self._checked[length][disputed]
        return (right + ASSUMED_WEIGHT * assumed) / (checked + ASSUMED_WEIGHT)

    def _kind(self, match: Match, place: int) -> tuple[int, bool]:
        # Each correct token makes the match longer by one.
        return min(match.length + place, self._longest), match.disputed and place == 0


class History:
    """Tokens of one request in an index, and how often its drafts were correct."""

    __slots__ = ("acceptance", "guess", "index", "latest", "match", "num_accepted", "num_drafted")

    def __init__(self, shortest: int, longest: int) -> None:
        self.index = NgramIndex(shortest, longest)
        self.acceptance = Acceptance(longest)
        self.match: Match | None = None  # the latest
        self.guess: tuple[int, int] | None = None  # index in token_ids, and the token expected there
        self.num_drafted = self.num_accepted = 0
        self.latest = (0, 0)  # number of right tokens of the latest draft, and of tokens of the request after it


class Proposal(NamedTuple):
    request: Request
    draft: list[int]
    chances: list[float]  # of each token of the draft: that it and those before it are right


class Drafter:
    """Chooser of drafts, as the setting `speculative` says.

    With ngram, each request whose last tokens occur earlier in its prompt or output gets a draft. With auto, a step
    gets the drafts that promise the most output tokens per second, according to the share of correct drafts so far and
    the step-time model. If a step leaves a draft out, its first token is still compared with the token that the step
    samples, so that the share stays up to date.
    """

    def __init__(self, config: ResolvedConfig, pacer: Pacer, ledger: Ledger, counters: SchedulerCounters) -> None:
        self._pacer = pacer
        self._ledger = ledger
        self._counters = counters
        self._always = config.speculative == "ngram"
        self._most = config.most_draft_tokens
        self._shortest, self._longest = config.shortest_lookup, config.prompt_lookup_max
        self._acceptance = Acceptance(self._longest)
        self._histories: dict[Request, History] = {}
        self._num_declined, self._patience = 0, TRY_AGAIN

    def forget(self, request: Request) -> None:
        """Forget a request that has ended.

        Draft tokens that were cut off after a stop string are subtracted from the accepted ones.
        """
        history = self._histories.pop(request, None)
        if history is not None and (num_cut := history.latest[1] - len(request.token_ids)) > 0:
            num_right = history.latest[0]
            self._count_accepted(range(num_right - num_cut, num_right), -1)

    def tokens_per_decode(self, requests: Iterable[Request]) -> float:
        """Return how many output tokens a decode of these requests has made on average, accepted drafts included."""
        made = accepted = 0
        for request in requests:
            made += request.num_output_tokens
            accepted += self._histories[request].num_accepted if request in self._histories else 0
        return made / max(1, made - accepted) if accepted else 1.0

    def choose(self, decodes: Sequence[Request], room: int, *, ahead: bool = False) -> dict[Request, tuple[int, ...]]:
        """Return drafts for some of the requests that decode in the next step, with at most `room` tokens in all.

        With `ahead`, a step in flight samples tokens of these requests. The drafts then follow the tokens that the step
        is expected to sample. The result is empty if it is faster not to wait for that step.
        """
        room = min(room, MAX_DRAFT_TOKENS)
        if room <= 0:
            return {}
        proposals = [proposal for request in decodes if (proposal := self._propose(request)) is not None]
        if not proposals:
            return {}
        if self._always:
            counts = _first_come(proposals, room)
        else:
            counts = self._counts(proposals, decodes, room, LEAST_GAIN_AHEAD if ahead else LEAST_GAIN)
        return {each.request: tuple(each.draft[:count]) for each, count in zip(proposals, counts, strict=True) if count}

    def settled(self, request: Request, draft: Sequence[int], result: RowResult) -> None:
        """Note the result of a request with a draft, without the samples that were dropped."""
        history, counters = self._histories[request], self._counters
        for place, (guess, found) in enumerate(zip(draft, (result, *result.more), strict=False)):
            self._check(history, place, guess == found.token_id)
        history.guess = None
        history.num_drafted += len(draft)
        history.num_accepted += len(result.more)
        counters.num_drafts += 1
        counters.draft_tokens += len(draft)
        history.latest = len(result.more), len(request.token_ids)
        self._count_accepted(range(len(result.more)), 1)
        accepted, drafted = history.num_accepted, history.num_drafted
        self._ledger.note(request.request_id, "drafted", accepted=accepted, of=drafted)

    def _propose(self, request: Request) -> Proposal | None:
        pending = request.num_pending_tokens
        most = min(self._most, request.sampling.max_tokens - request.num_output_tokens - 1)
        if most <= 0 or request.depends_on_tokens:
            return None
        if (history := self._histories.get(request)) is None:
            history = self._histories[request] = History(self._shortest, self._longest)
        token_ids = request.token_ids
        if history.guess is not None and history.guess[0] < len(token_ids):
            place, token = history.guess
            self._check(history, 0, token_ids[place] == token)
            history.guess = None
        match = history.index.find(token_ids) if history.index.extend(token_ids) else None
        if match is None:
            return None
        draft = continuation(token_ids, match.end, most + pending)
        history.match, history.guess = match, (len(token_ids), draft[0])
        chances, chance = [], 1.0
        for place, token in enumerate(draft):
            chance *= history.acceptance.share(match, place, self._acceptance.share(match, place, ASSUMED_SHARE))
            chances.append(chance)
            if token in request.stop_ids:
                break
        draft = draft[pending : len(chances)]
        return Proposal(request, draft, chances[pending:]) if draft else None

    def _count_accepted(self, positions: range, times: int) -> None:
        counters = self._counters
        counts = [*counters.accepted_by_position, *[0] * (positions.stop - len(counters.accepted_by_position))]
        for position in positions:
            counts[position] += times
        counters.accepted_by_position = tuple(counts)
        counters.accepted_tokens += times * len(positions)

    def _check(self, history: History, place: int, right: bool) -> None:
        if history.match is not None:
            history.acceptance.add(history.match, place, right)
            self._acceptance.add(history.match, place, right)

    def _counts(
        self, proposals: Sequence[Proposal], decodes: Sequence[Request], room: int, least_gain: float
    ) -> list[int]:
        kv_tokens = sum([len(request.token_ids) for request in decodes])
        if (costs := self._pacer.draft_costs(len(decodes), kv_tokens)) is None:
            return [0] * len(proposals)
        room = min(room, costs.room)
        counts = best_counts(proposals, len(decodes), room, costs, least_gain)
        if any(counts):
            self._patience = TRY_AGAIN
            return counts
        free = costs._replace(base=costs.plain, per_token=0.0)
        trial = best_counts(proposals, len(decodes), min(room, max(1, len(decodes) // 4)), free, LEAST_GAIN)
        self._num_declined += any(trial)
        if self._num_declined < self._patience:
            return counts
        self._num_declined, self._patience = 0, min(2 * self._patience, LONGEST_PATIENCE)
        return trial


def best_counts(
    proposals: Sequence[Proposal], num_decodes: int, room: int, costs: DraftCosts, least_gain: float
) -> list[int]:
    """Return how many tokens of each proposal give the step the most expected tokens per second, at most `room` in all.

    All are 0 if this is less than `least_gain` times the tokens per second of a step without drafts.
    """
    # Tokens are added by their chance, the likeliest first, while each raises the rate. A token's chance is at most
    # that of the tokens before it in its draft, so it comes after them.
    counts = [0] * len(proposals)
    seconds, tokens = costs.base, float(num_decodes)
    ranked = [(-chance, place, i) for i, each in enumerate(proposals) for place, chance in enumerate(each.chances)]
    for negative, _, number in sorted(ranked)[:room]:
        if -negative * seconds <= costs.per_token * tokens:
            break
        seconds += costs.per_token
        tokens -= negative
        counts[number] += 1
    if tokens * costs.plain < least_gain * num_decodes * seconds:
        return [0] * len(proposals)
    return counts


def _first_come(proposals: Sequence[Proposal], room: int) -> list[int]:
    counts = []
    for proposal in proposals:
        counts.append(min(room, len(proposal.draft)))
        room -= counts[-1]
    return counts
