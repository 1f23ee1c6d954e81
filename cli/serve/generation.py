"""Generation: the run of one HTTP request on the engine, answered as a whole or as server-sent events."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from llmsched.cli.serve.api_errors import ApiError, api_error
from llmsched.cli.serve.choices import ChoiceDelta, ChoiceFormat
from llmsched.cli.serve.http_body import DONE, event
from llmsched.engine.request import FinishReason, RequestOutput
from llmsched.engine.request_stream import RequestStream
from llmsched.engine.service import AsyncEngine

logger = logging.getLogger(__name__)


def engine_ids(request_id: str, num_prompts: int) -> list[str]:
    """Return the ids of the engine's requests, one per prompt, for an HTTP request whose answer has this id."""
    return [request_id] if num_prompts == 1 else [f"{request_id}-{index}" for index in range(num_prompts)]


class Generation:
    """Run of one HTTP request on the engine. Each prompt of the HTTP request is a request to the engine.

    If the engine refuses one, the constructor aborts the others and raises RequestError, QueueFullError or
    EngineDeadError. If the answer fails or is cancelled, `whole` and `events` abort the prompts that are still running.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        choice_format: ChoiceFormat,
        model_name: str,
        priority: int = 0,
        http_request_id: str = "",
    ) -> None:
        self.id = f"{choice_format.id_prefix}-{uuid.uuid4().hex}"
        self._http_request_id = http_request_id
        self._format = choice_format
        self._head = {"created": int(time.time()), "model": model_name}
        #: The latest output of each choice, by prompt index and choice index.
        self._latest: dict[tuple[int, int], RequestOutput] = {}
        self._streams: list[RequestStream] = []
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
                    priority=priority,
                    cache_salt=request.cache_salt or "",
                )
                self._streams.append(stream)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Abort the prompts that are still running."""
        for stream in self._streams:
            stream.abort()

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer. Raises ApiError if a prompt fails, and EngineDeadError if the engine fails."""
        choices: dict[int, ChoiceDelta] = {}
        try:
            async for delta in self._deltas():
                if (begun := choices.setdefault(delta.index, delta)) is not delta:
                    begun.add(delta)
        finally:
            self.abort()
        bodies = [self._format.choice(choices[index], whole=True) for index in sorted(choices)]
        return self._envelope(self._format.whole_object, bodies) | {"usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events. If the request fails, the last event is an error, not [DONE]."""
        try:
            for choice in self._format.opening():
                yield self._chunk([choice])
            async for delta in self._deltas():
                if (choice_or_none := self._format.chunk(delta)) is not None:
                    yield self._chunk([choice_or_none])
            if self._include_usage:
                yield event(self._envelope(self._format.chunk_object, []) | {"usage": self._usage()})
            yield DONE
        except Exception as error:
            known = api_error(error)
            if known.code == "internal_error":
                logger.exception("request %s (X-Request-Id %s) failed", self.id, self._http_request_id)
            yield event(known.body())
        finally:
            self.abort()

    async def _deltas(self) -> AsyncIterator[ChoiceDelta]:
        async for prompt_index, output in _merged(self._streams):
            if output.finish_reason is FinishReason.ERROR:
                raise ApiError(500, f"the request failed: {output.error}", code="generation_failed")
            if output.finish_reason is FinishReason.ABORT:
                raise ApiError(503, "the request was ended by the server", code="aborted")
            self._latest[prompt_index, output.index] = output
            yield self._format.delta(prompt_index, output)

    def _usage(self) -> dict[str, Any]:
        """Return OpenAI's `usage` object with the token counts so far. A prompt with many choices counts once."""
        prompt = sum(len(prompt.token_ids) for prompt in self._format.prompts)
        completion = sum(output.num_output_tokens for output in self._latest.values())
        cached = sum(output.num_cached_tokens for (_, choice), output in self._latest.items() if choice == 0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        chunk = self._envelope(self._format.chunk_object, choices)
        if self._usage_so_far:
            chunk["usage"] = self._usage()
        elif self._include_usage:
            chunk["usage"] = None
        return event(chunk)

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, **self._head, "choices": choices}


async def _merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield the outputs of all streams as they arrive, each with the index of its stream."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting = {_next_of(stream): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = waiting.pop(task)
                if (output_or_none := task.result()) is not None:
                    waiting[_next_of(streams[index])] = index
                    yield index, output_or_none
    finally:
        for task in waiting:
            task.cancel()


def _next_of(stream: RequestStream) -> asyncio.Task[RequestOutput | None]:
    async def take() -> RequestOutput | None:
        return await anext(stream, None)

    return asyncio.create_task(take())
