"""What is refused at the door: requests that can never be served, and those for which too many wait already."""

from __future__ import annotations

from collections.abc import Callable

from llmsched.engine.errors import QueueFullError, RequestError
from llmsched.engine.scheduler.scheduler import Scheduler


def check_length(scheduler: Scheduler, max_model_len: int, num_prompt_tokens: int, max_tokens: int) -> None:
    """Raise RequestError for a request longer than the context, or than what all KV blocks hold."""
    asked = f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}"
    if num_prompt_tokens + max_tokens > max_model_len:
        raise RequestError(
            "max_tokens" if num_prompt_tokens < max_model_len else "prompt",
            f"the context of this server is {max_model_len} tokens; {asked}, "
            f"{num_prompt_tokens + max_tokens} in all; shorten the prompt or lower max_tokens",
            code="context_length_exceeded",
        )
    if not scheduler.fits_alone(num_prompt_tokens, max_tokens):
        kv = scheduler.kv
        raise RequestError(
            "max_tokens",
            f"{asked}: that needs more than the {kv.pool.num_blocks} KV blocks of {kv.block_size} tokens "
            f"({kv.layout.longest(kv.pool.num_blocks)} tokens) that this server has",
            code="context_length_exceeded",
        )


def check_queue(num_waiting: int, num_new: int, max_queue_size: int, retry_after: Callable[[], float]) -> None:
    """Raise QueueFullError if `num_new` more would be too many; `retry_after` tells after how many seconds to retry."""
    if num_waiting + num_new > max_queue_size:
        raise QueueFullError(f"{num_waiting} requests are waiting; at most {max_queue_size} may", retry_after())
