"""Answer of /v1/responses: output items, whole or as events."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

from llmsched.cli.serve.api_errors import api_error
from llmsched.cli.serve.choice_formats import ChatFormat, ChoiceDelta
from llmsched.cli.serve.completion_response import CompletionResponse
from llmsched.cli.serve.request_context import RequestContext
from llmsched.cli.serve.responses_request import ResponsesRequest, renamed
from llmsched.cli.serve.sse_response import json_line
from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.errors import RequestError
from llmsched.engine.text.parsers.parts import Kind, Part

logger = logging.getLogger(__name__)

Event = dict[str, Any]

#: Types of output items -> the beginning of their ids.
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponsesFormat(ChatFormat):
    id_prefix = "resp"


class OutputItems:
    """Output items of a response, which grow with the deltas of its only choice."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    def add(self, delta: ChoiceDelta) -> Iterator[Event]:
        """Add a delta, and yield the events that report it to the client."""
        for part in delta.parts:
            if isinstance(part, Part):
                kind = "reasoning" if part.kind is Kind.REASONING else "message"
                if not self.items or self.items[-1]["type"] != kind or self.items[-1]["status"] != "in_progress":
                    yield from self._begin(kind)
                yield from self._add_text(part.text)
                continue
            if part.id is not None:
                yield from self._begin("function_call", call_id=part.id, name=part.name, arguments="")
            if part.arguments:
                self.items[-1]["arguments"] += part.arguments
                yield self._event("response.function_call_arguments.delta", delta=part.arguments)
        if delta.finish_reason is not None:
            yield from self._end("incomplete" if delta.finish_reason == "length" else "completed")

    def _begin(self, kind: str, **fields: Any) -> Iterator[Event]:
        yield from self._end("completed")
        item = {"id": f"{_PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        if kind != "function_call":
            item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self.items.append(item)
        yield self._event("response.output_item.added", item=_copy(item))
        if kind != "function_call":
            text_part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(text_part if kind == "message" else {"type": "reasoning_text", "text": ""})
            yield self._event("response.content_part.added", content_index=0, part=dict(item["content"][0]))

    def _add_text(self, text: str) -> Iterator[Event]:
        part = self.items[-1]["content"][0]
        part["text"] += text
        logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        yield self._event(f"response.{part['type']}.delta", content_index=0, delta=text, **logprobs)

    def _end(self, status: str) -> Iterator[Event]:
        if not self.items or self.items[-1]["status"] != "in_progress":
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            name, arguments = item["name"], item["arguments"]
            yield self._event("response.function_call_arguments.done", name=name, arguments=arguments)
        else:
            part = item["content"][0]
            logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
            yield self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **logprobs)
            yield self._event("response.content_part.done", content_index=0, part=dict(part))
        yield self._event("response.output_item.done", item=_copy(item))

    def _event(self, kind: str, **fields: Any) -> Event:
        item_id = {} if "item" in fields else {"item_id": self.items[-1]["id"]}
        return {"type": kind, "output_index": len(self.items) - 1, **item_id, **fields}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return {name: [dict(part) for part in value] if isinstance(value, list) else value for name, value in item.items()}


class ResponsesAnswer(CompletionResponse):
    """Response to a request to /v1/responses."""

    def __init__(
        self,
        request: ResponsesRequest,
        engine: AsyncEngine,
        choice_format: ResponsesFormat,
        model_name: str,
        context: RequestContext | None = None,
    ) -> None:
        self._request = request
        try:
            super().__init__(engine, choice_format, model_name, context)
        except RequestError as error:
            raise renamed(error) from error

    async def whole(self) -> dict[str, Any]:
        items, reason = OutputItems(), None
        for stream in self._streams:
            stream.wakes_at_end = True
        try:
            async for outputs in self._outputs():
                for prompt_index, output in outputs:
                    delta = self._delta(prompt_index, output)
                    reason = delta.finish_reason
                    for _ in items.add(delta):
                        pass
        finally:
            self.abort()
        return self._body(items, reason)

    async def events(self, write: Callable[[bytes], bool]) -> AsyncGenerator[bytes, None]:
        """Yield the answer as events of the Responses API. `write` is not used."""
        items, sequence_number, reason = OutputItems(), 0, None

        def encoded(event: Event) -> bytes:
            nonlocal sequence_number
            data = json_line({**event, "sequence_number": sequence_number})
            sequence_number += 1
            return b"event: " + str(event["type"]).encode() + b"\ndata: " + data + b"\n\n"

        try:
            for kind in ("response.created", "response.in_progress"):
                yield encoded({"type": kind, "response": self._body(items, None)})
            async for outputs in self._outputs():
                for prompt_index, output in outputs:
                    delta = self._delta(prompt_index, output)
                    reason = delta.finish_reason
                    if events := b"".join([encoded(event) for event in items.add(delta)]):
                        yield events
            body = self._body(items, reason)
            yield encoded({"type": f"response.{body['status']}", "response": body})
        except Exception as error:
            known = api_error(error)
            if known.code == "internal_error":
                logger.exception("response %s (X-Request-Id %s) failed", self.id, self._context.request_id)
            yield encoded({"type": "error", "code": known.code, "message": str(known), "param": known.param})
        finally:
            self.abort()

    def _body(self, items: OutputItems, reason: str | None) -> dict[str, Any]:
        """Return the response object so far. `reason` is the finish reason of the model's output, None if it runs."""
        request = self._request
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        usage = None if reason is None else self._response_usage()
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": items.items,
            "usage": usage,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "tools": request.tools or [],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "metadata": request.metadata or {},
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        }

    def _response_usage(self) -> dict[str, Any]:
        usage = self._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **usage.get("completion_tokens_details", {})},
            "total_tokens": usage["total_tokens"],
        }
