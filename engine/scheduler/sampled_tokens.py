"""Effect of sampled tokens on their request: acceptance of drafts, grammars, and reasons to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from llmsched.engine.executor.base import RowResult
from llmsched.engine.request import FinishReason, Request

if TYPE_CHECKING:
    from llmsched.engine.grammar.compiler import Matcher


def matched(matcher: Matcher, result: RowResult) -> RowResult:
    """Return the result after its token was added to the matcher: an error if the grammar does not allow the token."""
    error = matcher.accept(cast("int", result.token_id))
    return result if error is None else RowResult(error=error, caused_by_request=True)


def accept(request: Request, draft: tuple[int, ...], result: RowResult) -> FinishReason | None:
    """Add the tokens sampled for a row with a draft to the request, up to the first one that differs from the draft.

    Drops later results, and results after the end of the request. Returns why the request ends, or None.
    """
    kept: list[RowResult] = []
    reason = None
    for found, guess in zip((result, *result.more), (*draft, None), strict=False):
        kept.append(found)
        if found.error is not None or found.token_id is None:
            reason = FinishReason.ERROR
            break
        request.token_ids.append(found.token_id)
        reason = reason_to_end(request, found.token_id)
        if reason is not None or found.token_id != guess:
            break
    result.more = kept[1:]
    request.num_computed_tokens = len(request.token_ids) - 1
    return reason


def reason_to_end(request: Request, token_id: int | None) -> FinishReason | None:
    num_tokens, sampling = len(request.token_ids), request.sampling
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if token_id in request.stop_ids and num_output_tokens > sampling.min_tokens:
        return FinishReason.STOP
    if request.matcher is not None and request.matcher.finished:  # even before min_tokens, because nothing can follow
        return FinishReason.STOP
    if num_output_tokens < sampling.max_tokens:
        return None
    complete = token_id is not None or request.num_computed_tokens >= num_tokens
    return FinishReason.LENGTH if complete else None
