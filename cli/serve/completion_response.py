from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

from llmsched.cli.serve.api_errors import ApiError, api_error
from llmsched.cli.serve.choice_formats import ChoiceDelta, ChoiceFormat
from llmsched.cli.serve.request_context import RequestContext
from llmsched.cli.serve.sse_response import DONE, event, json_line
from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.errors import LlmschedError
from llmsched.engine.request import FinishReason, RequestOutput
from llmsched.engine.request_stream import RequestStream

logger = logging.getLogger(__name__)

#: Text that is replaced in a frame; see `CompletionResponse._frame`.
_PLACEHOLDER = "\0"


def engine_ids(request_id: str, num_prompts: int) -> list[str]:
    """Return the ids of the engine's requests, one per prompt, that make up the answer with the id `request_id`."""
    return [request_id] if num_prompts == 1 else [f"{request_id}-{index}" for index in range(num_prompts)]


class CompletionResponse:
    """Response to a request for completions or chat, whole or as events. Each prompt is sent to the engine.

    `model_name` is the name of the served model, or of one of its adapters, which then computes the answer.
    If the engine refuses a prompt, the constructor aborts the others and raises RequestError, QueueFullError or
    EngineDeadError. If the answer fails or is cancelled, `whole()` and `events(...)` abort the prompts that are still
    running.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        choice_format: ChoiceFormat,
        model_name: str,
        context: RequestContext | None = None,
    ) -> None:
        self.id = f"{choice_format.id_prefix}-{uuid.uuid4().hex}"
        self._context = context = context or RequestContext()
        self._format = choice_format
        self._head = {"created": int(time.time()), "model": model_name}
        #: The latest output of each choice, by prompt index and choice index.
        self._latest: dict[tuple[int, int], RequestOutput] = {}
        #: Bytes before and after the text of a chunk that has nothing but text, for each choice that has begun.
        self._frames: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        self._streams: list[RequestStream] = []
        self._ready = asyncio.Event()
        self._is_waiting = False
        self._write: Callable[[bytes], bool] = lambda _: False
        request = choice_format.request
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._usage_so_far = bool(options and options.continuous_usage_stats)
        try:
            names = engine_ids(self.id, len(choice_format.prompts))
            for name, prompt in zip(names, choice_format.prompts, strict=True):
                stream = engine.submit(
                    name,
                    prompt.token_ids,
                    prompt.sampling,
                    priority=context.priority,
                    cache_salt=request.cache_salt or "",
                    deadline=context.deadline,
                    adapter=model_name if model_name in engine.core.adapters else None,
                )
                stream.ready, stream.on_end = self._ready, self._end
                self._streams.append(stream)
        except BaseException:
            self.abort()
            raise

    def _end(self) -> None:
        if all(stream.finished for stream in self._streams):
            self._context.on_end(self.id, [record for stream in self._streams for record in stream.records])

    def abort(self) -> None:
        for stream in self._streams:
            stream.abort()

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer. Raises ApiError if a prompt fails, and EngineDeadError if the engine fails."""
        choices: dict[int, ChoiceDelta] = {}
        for stream in self._streams:
            stream.wakes_at_end = True
        try:
            async for outputs in self._outputs():
                for prompt_index, output in outputs:
                    delta = self._delta(prompt_index, output)
                    if (begun := choices.setdefault(delta.index, delta)) is not delta:
                        begun.add(delta)
        finally:
            self.abort()
        bodies = [self._format.choice(choices[index], whole=True) for index in sorted(choices)]
        return self._envelope(self._format.whole_object, bodies) | {"usage": self._usage()}

    async def events(self, write: Callable[[bytes], bool]) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events. Events that are ready at the same time are joined.

        While this generator waits, events may be passed to `write` instead. If `write` returns False, it has sent
        nothing, and the generator yields the event. If the request fails, the last event is an error, not [DONE].
        """
        if len(self._streams) == 1 and (self._format.request.n or 1) == 1:
            self._write, self._streams[0].pass_on = write, self._pass_on
        try:
            if opening := b"".join(self._chunk([choice]) for choice in self._format.opening()):
                yield opening
            async for outputs in self._outputs():
                if events := b"".join([self._event(prompt_index, output) for prompt_index, output in outputs]):
                    yield events
            if self._include_usage:
                yield event(self._envelope(self._format.chunk_object, []) | {"usage": self._usage()})
            yield DONE
        except Exception as error:
            known = api_error(error)
            if known.code == "internal_error":
                logger.exception("request %s (X-Request-Id %s) failed", self.id, self._context.request_id)
            yield event(known.body())
        finally:
            self.abort()

    async def _outputs(self) -> AsyncIterator[list[tuple[int, RequestOutput]]]:
        """Yield lists of pairs (index of a prompt, output). Raises the error of a prompt that fails."""
        error: LlmschedError | None = None
        finished = False
        while not finished:
            self._is_waiting = True
            try:
                await self._ready.wait()
            finally:
                self._is_waiting = False
            self._ready.clear()
            finished = all(stream.finished for stream in self._streams)
            outputs = []
            for prompt_index, stream in enumerate(self._streams):
                for output in stream.take():
                    if (failure := _failure(output)) is not None:
                        error, output.finish_reason = failure, None
                    if failure is None or output.token_ids:
                        outputs.append((prompt_index, output))
                error = error or stream.error
            if outputs:
                yield outputs
            if error is not None:
                raise error

    def _delta(self, prompt_index: int, output: RequestOutput) -> ChoiceDelta:
        self._latest[prompt_index, output.index] = output
        return self._format.delta(prompt_index, output)

    def _event(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Return the event for an output; b"" if there is nothing to send."""
        choice = prompt_index, output.index
        if output.finish_reason is None and (frame := self._frames.get(choice)) is not None:
            self._latest[choice] = output
            return frame[0] + json_line(output.text) + frame[1] if output.text else b""
        delta = self._delta(prompt_index, output)
        if self._format.has_only_text(delta.index) and not self._usage_so_far:
            self._frames[choice] = self._frame(delta.index)
        content = self._format.chunk(delta)
        return b"" if content is None else self._chunk([content])

    def _pass_on(self, output: RequestOutput) -> bool:
        """Write the event for an output at once. Return False if this is not possible."""
        # To wake `events` for an event would take ten times as long.
        is_next = self._is_waiting and not self._ready.is_set()
        if not is_next or output.finish_reason is not None or (0, output.index) not in self._frames:
            return False
        event_or_empty = self._event(0, output)
        return not event_or_empty or self._write(event_or_empty)

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text of a chunk, which are the same in most chunks of a choice."""
        content = self._format.choice(ChoiceDelta(index, _PLACEHOLDER, []), whole=False)
        before, _, after = self._chunk([content]).partition(json_line(_PLACEHOLDER))
        return before, after

    def _usage(self) -> dict[str, Any]:
        """Return OpenAI's `usage` object with the token counts so far. A prompt with many choices counts once."""
        prompt = sum(len(prompt.token_ids) for prompt in self._format.prompts)
        completion = sum(output.num_output_tokens for output in self._latest.values())
        cached = sum(output.num_cached_tokens for (_, choice), output in self._latest.items() if choice == 0)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        details = self._format.usage_details()
        return usage | {"completion_tokens_details": details} if details else usage

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        chunk = self._envelope(self._format.chunk_object, choices)
        if self._usage_so_far:
            chunk["usage"] = self._usage()
        elif self._include_usage:
            chunk["usage"] = None
        return event(chunk)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, **self._head, "choices": choices}


class AnswerFailedError(ApiError):
    """Error of a request that failed after it was accepted."""


def _failure(output: RequestOutput) -> AnswerFailedError | None:
    """Return the error to report if a choice failed or was aborted."""
    if output.finish_reason is FinishReason.ERROR:
        status = 400 if output.caused_by_request else 500
        return AnswerFailedError(status, f"the request failed: {output.error}", code="generation_failed")
    if output.finish_reason is FinishReason.DEADLINE:
        return AnswerFailedError(504, f"the request was dropped: {output.error}", code="deadline_exceeded")
    if output.finish_reason is FinishReason.ABORT:
        return AnswerFailedError(503, "the request was ended by the server", code="aborted")
    return None
