"""Output of a sequence: text of the sampled tokens, stop strings, and latencies."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from llmsched.engine.metrics import EngineMetrics
from llmsched.engine.request import ChoiceRecord, FinishReason, Request, RequestOutput, TokenLogprob
from llmsched.engine.request_latency import tpot
from llmsched.engine.request_summary import RequestSummary
from llmsched.engine.scheduler.scheduler import Update
from llmsched.engine.text.detokenizer import Detokenizer
from llmsched.engine.text.stop import StopMatcher

if TYPE_CHECKING:
    from llmsched.engine.text.tokenizer import Tokenizer


class OutputStream:
    """Producer of the outputs of one sequence, which is choice `index` of the API request `group_id`."""

    def __init__(self, request: Request, group_id: str, index: int, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self.request = request
        self.group_id = group_id
        self.index = index
        self._detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens, sampling.shown_token_ids)
        self._stops = StopMatcher(sampling.stop, sampling.include_stop_str_in_output)
        self._prompt_logprobs: list[TokenLogprob | None] = [None]
        self._prompt_logprobs_due = sampling.prompt_logprobs is not None
        self._last_token_time: float | None = None
        self._gaps = array("d")
        self._longest_gap: float | None = None

    def take(self, update: Update) -> RequestOutput | None:
        """Return the output that `update`, the result of one step, adds to the sequence; None if there is no output.

        If a stop string ends the sequence, the output has a `finish_reason`, and the caller must finish the request in
        the scheduler.
        """
        request, result = self.request, update.result
        # After a preemption the prompt is computed, and reported, again: keep only the new entries.
        known = len(self._prompt_logprobs) - (update.start + 1)
        self._prompt_logprobs.extend(result.prompt_logprobs[max(0, known) :])
        if result.token_id is None and request.finish_reason is None:
            return None
        output = self.new_output(request.finish_reason, result.last.error)
        output.caused_by_request = result.last.caused_by_request
        results = [result, *result.more] if result.more else [result]
        num_later = sum(each.token_id is not None for each in results)
        for each in results:
            if each.token_id is not None:
                num_later -= 1
                self._add_token(output, each.token_id, each.logprob, num_later)
            if isinstance(output.stop_reason, str):
                # A draft may have added more tokens after the stop string, or have ended in an error there.
                del request.token_ids[len(request.token_ids) - num_later :]
                output.num_output_tokens -= num_later
                output.error = None
                break
        if output.finish_reason is not None and not isinstance(output.stop_reason, str):
            # Add the text that was held back: an incomplete character, then the beginning of a stop string.
            tail = self._detokenizer.flush()
            if output.pieces:
                output.pieces[-1] += tail
            self._add_text(output, tail, output.num_output_tokens)
            if not isinstance(output.stop_reason, str):
                output.text += self._stops.flush()
        return output

    def record(self, metrics: EngineMetrics, now: float, num_tokens: int) -> None:
        """Record the latency of the tokens that a step generated at the time `now`: TTFT for the first step, else ITL.

        Each of the tokens is one ITL sample, of gap / num_tokens.
        """
        request = self.request
        if self._last_token_time is None:
            request.first_token_time = now
            metrics.observe("time_to_first_token_seconds", now - request.arrival_time)
            self._record_queue_time(metrics)
        else:
            gap = (now - self._last_token_time) / num_tokens
            for _ in range(num_tokens):
                metrics.observe("inter_token_latency_seconds", gap)
                self._gaps.append(gap)
            self._longest_gap = max(now - self._last_token_time, self._longest_gap or 0.0)
        metrics.add("generation_tokens", num_tokens)
        self._last_token_time = now

    def record_end(self, metrics: EngineMetrics, reason: FinishReason, now: float) -> None:
        request, last = self.request, self._last_token_time
        metrics.finished(reason)
        if self.index == 0:
            metrics.add("prompt_tokens", request.num_prompt_tokens)
            metrics.add("prompt_tokens_cached", request.num_cached_tokens)
            metrics.observe("request_prompt_tokens", request.num_prompt_tokens)
            metrics.observe("request_params_n", request.sampling.n)
            metrics.observe("request_params_max_tokens", request.sampling.max_tokens)
        metrics.observe("request_generation_tokens", request.num_output_tokens)
        metrics.observe("e2e_request_latency_seconds", now - request.arrival_time)
        if last is None:
            self._record_queue_time(metrics)
        elif request.first_token_time is not None and request.first_scheduled_time is not None:
            metrics.observe("request_prefill_time_seconds", request.first_token_time - request.first_scheduled_time)
            metrics.observe("request_decode_time_seconds", last - request.first_token_time)
            metrics.observe("request_inference_time_seconds", last - request.first_scheduled_time)
            ttft, e2e = request.first_token_time - request.arrival_time, last - request.arrival_time
            if (per_token := tpot(ttft, e2e, request.num_output_tokens)) is not None:
                metrics.observe("request_time_per_output_token_seconds", per_token)

    def account(self, reason: FinishReason | None, now: float) -> ChoiceRecord:
        """Return the record of the sequence at the time `now`. A `reason` means that the sequence has ended."""
        request = self.request
        return ChoiceRecord(
            index=self.index,
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            num_preemptions=request.num_preemptions,
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=request.first_token_time,
            last_token_time=self._last_token_time,
            end_time=now,
            gaps=self._gaps,
        )

    def summary(self, reason: FinishReason | None, now: float) -> RequestSummary:
        """Return the summary of the sequence at the time `now`. A `reason` means that the sequence has ended."""
        stall, last = self._longest_gap, self._last_token_time
        if last is not None and reason is None:
            stall = max(now - last, stall or 0.0)
        return RequestSummary(self.group_id, self.request.status, self.account(reason, now), stall)

    def _record_queue_time(self, metrics: EngineMetrics) -> None:
        request = self.request
        if request.first_scheduled_time is not None:
            metrics.observe("request_queue_time_seconds", request.first_scheduled_time - request.arrival_time)

    def new_output(self, reason: FinishReason | None, error: str | None = None) -> RequestOutput:
        """Return an output without tokens. If a `reason` is given, the output is the last one of the sequence."""
        request = self.request
        output = RequestOutput(
            request_id=self.group_id,
            index=self.index,
            text="",
            token_ids=[],
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            finish_reason=reason,
            error=error,
        )
        if self._prompt_logprobs_due:
            output.prompt_logprobs, self._prompt_logprobs_due = self._prompt_logprobs, False
        return output

    def _add_token(self, output: RequestOutput, token_id: int, logprob: TokenLogprob | None, num_later: int) -> None:
        request = self.request
        output.token_ids.append(token_id)
        if logprob is not None:
            output.logprobs = [*(output.logprobs or []), logprob]
        stopped_by_id = not num_later and request.finish_reason is FinishReason.STOP and token_id in request.stop_ids
        if stopped_by_id:
            output.stop_reason = None if token_id not in request.sampling.stop_token_ids else token_id
        silent = stopped_by_id and not request.sampling.include_stop_str_in_output
        piece = "" if silent else self._detokenizer.push(token_id)
        output.pieces.append(piece)
        self._add_text(output, piece, request.num_output_tokens - num_later)

    def _add_text(self, output: RequestOutput, piece: str, num_output_tokens: int) -> None:
        if num_output_tokens <= self.request.sampling.min_tokens:
            output.text += piece
            return
        text, stop = self._stops.push(piece)
        output.text += text
        if stop is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP, stop
