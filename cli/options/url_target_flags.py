from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated

import httpx
import typer

from llmsched.cli.options.config_flags import EngineOptions, refuse_engine_options
from llmsched.cli.options.flags import flag
from llmsched.cli.targets.http_target import Endpoint, HttpOptions
from llmsched.cli.targets.interface import RunPlan
from llmsched.engine.errors import LlmschedError


@dataclass(frozen=True, slots=True)
class UrlTargetFlags:
    """Flags that apply only if the target is a URL. A flag that was not given is None or False."""

    endpoint: Annotated[
        Endpoint | None, typer.Option(show_default="completions", help="API endpoint to send requests to.")
    ] = None
    served_model_name: Annotated[
        str | None,
        typer.Option(show_default="the first of /v1/models", help="Name of the model in requests."),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(envvar=["LLMSCHED_API_KEY", "OPENAI_API_KEY"], help="Key to send as bearer token."),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model whose tokenizer to use to draw random prompts, to turn a trace's texts into token ids, and to "
            "count the tokens of answers if the server reports no usage.",
        ),
    ] = None
    text_prompts: Annotated[
        bool,
        typer.Option(
            "--text-prompts", help="Send prompts as words instead of token ids. The chat endpoint always gets words."
        ),
    ] = False
    stop_at_eos: Annotated[
        bool,
        typer.Option(
            "--stop-at-eos",
            help="Let answers end at end-of-sequence (do not send ignore_eos), for servers that reject that field.",
        ),
    ] = False
    no_usage: Annotated[
        bool,
        typer.Option(
            "--no-usage",
            help="Do not ask for token counts (stream_options), for servers that reject that field. Tokens are then "
            "counted with --tokenizer.",
        ),
    ] = False


def http_options(url: str, plan: RunPlan, flags: UrlTargetFlags, engine_options: EngineOptions) -> HttpOptions:
    """Return the settings for requests to a server.

    Raises LlmschedError for an invalid URL or API key, or if a flag of the engine was given.
    """
    refuse_engine_options(engine_options)
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as problem:
        raise LlmschedError(f"{url!r} is not a URL: {problem}") from problem
    if not parsed.host:
        raise LlmschedError(f"{url!r} names no host; write http://host:port")
    if parsed.port is not None and not 1 <= parsed.port <= 65535:
        raise LlmschedError(f"{url!r}: port must be 1 to 65535, not {parsed.port}")
    if parsed.userinfo:
        raise LlmschedError("a user or password in the URL is not supported; --api-key sends a key")
    if parsed.query or parsed.fragment:
        raise LlmschedError(f"{url!r} has a query or a fragment; give the URL up to /v1")
    if flags.api_key is not None and not (flags.api_key.isascii() and flags.api_key.isprintable()):
        raise LlmschedError("--api-key may contain only printable ASCII, because it is sent in an HTTP header")
    return HttpOptions(
        url,
        endpoint=flags.endpoint or ("chat" if url.rstrip("/").endswith("/chat/completions") else "completions"),
        model=flags.served_model_name,
        api_key=flags.api_key,
        ignore_eos=not flags.stop_at_eos,
        ask_usage=not flags.no_usage,
        tokenizer=flags.tokenizer,
        text_prompts=flags.text_prompts,
        lookup_timeout=min(10.0, plan.timeout),
        timelines=plan.timelines,
    )


def refuse_url_target_flags(typed: Sequence[str]) -> None:
    """Raise LlmschedError if `typed` has flags that apply only to a URL."""
    useless = {flag(f.name) for f in fields(UrlTargetFlags)}
    if given := [name for name in typed if name in useless]:
        raise LlmschedError(
            f"{', '.join(given)}: only has an effect with the URL of a server; the target is a model in this process"
        )
