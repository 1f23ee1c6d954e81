"""Making a target ready to be loaded, whichever it is: a server behind a URL, or a model in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import httpx

from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.load.load import Load
from llmsched.cli.load.prompts import COMMON_IDS, Encode, TokenizerEncode, usable_ids
from llmsched.cli.options.engine import EngineOptions
from llmsched.cli.options.target import ServerFlags
from llmsched.cli.targets.client import HttpOptions, HttpTarget
from llmsched.cli.targets.inprocess import EngineTarget, running_engine
from llmsched.cli.targets.run import run_workload, warm_up
from llmsched.engine.errors import LlmschedError, ModelError
from llmsched.engine.latency import Slo
from llmsched.engine.progress import Progress
from llmsched.engine.provenance import Provenance

_LOOKUP_TIMEOUT_S = 10.0
_IDLE_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do to a target, whichever it is. `timeout` is in seconds; warm-up requests: None for the usual number.

    `timelines`: an llmsched server is asked, after the load, what its scheduler decided. `partial`: of a load that the
    user ends, what has ended by then is measured.
    """

    workload: Load
    slo: Slo
    timeout: float
    warmup: int | None
    timelines: bool = False
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """A target that has been warmed up. `measure` sends it a load; a model in this process has nothing cached then."""

    name: str
    provenance: Provenance
    warmup: int
    measure: Callable[[Load, Slo, Progress], Awaitable[Measurement]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def experiment(self, workload: Load, slo: Slo) -> Experiment:
        """The target under this load, for a report."""
        return Experiment(self.name, self.provenance, workload, slo, self.warmup, self.settings)


@asynccontextmanager
async def open_model(model: str, options: EngineOptions, plan: Plan, progress: Progress) -> AsyncIterator[Opened]:
    """A model in this process. Raises ModelError and ConfigError."""
    config = options.config(model, {"max_queue_size": max(2048, plan.workload.num_requests)})
    warmup = 1 if plan.warmup is None else plan.warmup
    async with running_engine(config, progress) as engine:
        ids, target = usable_ids(engine.tokenizer, engine.model.vocab_size), EngineTarget(engine)
        await warm_up(target, plan.workload, warmup, ids=ids, timeout=plan.timeout)

        async def measure(workload: Load, slo: Slo, progress: Progress) -> Measurement:
            while engine.healthy and (engine.stats().num_running or engine.stats().num_waiting):
                await asyncio.sleep(_IDLE_POLL_S)  # what a timeout has aborted has yet to leave
            await engine.reset_prefix_cache()
            return await run_workload(
                target, workload, slo, ids=ids, timeout=plan.timeout, progress=progress, partial=plan.partial
            )

        settings = {name: value for name, value in asdict(engine.config).items() if value is not None}
        yield Opened(target.name, Provenance("in process"), warmup, measure, settings)


@asynccontextmanager
async def open_server(options: HttpOptions, flags: ServerFlags, plan: Plan) -> AsyncIterator[Opened]:
    """An OpenAI-compatible server. Raises TargetUnreachableError if none listens."""
    ids, encode = _vocabulary(flags.tokenizer)
    known = None if options.endpoint == "chat" or flags.text_prompts else ids
    target = HttpTarget(options)
    target.encode = encode
    warmup = plan.warmup or 0
    try:
        await target.connect()
        await warm_up(target, plan.workload, warmup, ids=known, timeout=plan.timeout)

        async def measure(workload: Load, slo: Slo, progress: Progress) -> Measurement:
            return await run_workload(
                target,
                workload,
                slo,
                ids=known,
                timeout=plan.timeout,
                progress=progress,
                count_tokens=None if encode is None else encode.count,
                partial=plan.partial,
            )

        yield Opened(target.name, Provenance(options.url), warmup, measure)
    finally:
        await target.close()


def http_options(url: str, plan: Plan, flags: ServerFlags, engine_options: EngineOptions) -> HttpOptions:
    """How to talk to the server. Raises LlmschedError for a URL that is none, and for flags that cannot act on it."""
    if engine_options.given:
        names = ", ".join("--" + name.replace("_", "-") for name in engine_options.given)
        raise LlmschedError(f"{names}: the settings of a running server cannot be changed from here")
    _check_url(url)
    if flags.api_key is not None and not (flags.api_key.isascii() and flags.api_key.isprintable()):
        raise LlmschedError("--api-key has a letter that a header cannot hold; allowed are printable ASCII letters")
    return HttpOptions(
        url,
        endpoint=flags.endpoint or ("chat" if url.rstrip("/").endswith("/chat/completions") else "completions"),
        model=flags.served_model_name,
        api_key=flags.api_key,
        ignore_eos=not flags.stop_at_eos,
        ask_usage=not flags.no_usage,
        lookup_timeout=min(_LOOKUP_TIMEOUT_S, plan.timeout),
        timelines=plan.timelines,
    )


def _check_url(url: str) -> None:
    """Raise LlmschedError for a URL that is none, or that has what cannot be sent."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as problem:
        raise LlmschedError(f"{url!r} is not a URL: {problem}") from problem
    if not parsed.host:
        raise LlmschedError(f"{url!r} names no host; write http://host:port")
    if parsed.port is not None and not 1 <= parsed.port <= 65535:
        raise LlmschedError(f"{url!r}: port {parsed.port} is none; allowed is 1 to 65535")
    if parsed.userinfo:
        raise LlmschedError("a user or a password in the URL cannot be sent; --api-key sends a key")
    if parsed.query or parsed.fragment:
        raise LlmschedError(f"{url!r} has a query or a fragment; name the URL up to /v1")


def refuse_server_flags(typed: Sequence[str]) -> None:
    """Raise LlmschedError if flags that only a URL has use for are among the `typed` ones.

    OPENAI_API_KEY may stand in the environment for other reasons, so a key there is no sign of a mistake.
    """
    useless = {"--" + f.name.replace("_", "-") for f in fields(ServerFlags)}
    if given := [name for name in typed if name in useless]:
        raise LlmschedError(
            f"{', '.join(given)}: only of use with the URL of a server, and the target is a model in this process"
        )


def _vocabulary(model: str | None) -> tuple[Sequence[int], Encode | None]:
    """Ids to draw prompts from, and how text becomes tokens where a tokenizer was named."""
    if model is None:
        return COMMON_IDS, None
    from llmsched.engine.model.loader import load_tokenizer
    from llmsched.engine.model.source import locate

    try:
        known = load_tokenizer(locate(model))
    except ModelError as problem:
        raise LlmschedError(f"--tokenizer: {problem}") from problem
    return usable_ids(known, known.vocab_size), TokenizerEncode(known)
