from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import httpx

from llmsched.cli.figures.engine_counts import EngineCounts, changing_token
from llmsched.cli.figures.kv_memory import KVMeter, TargetState
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.figures.record import RequestFailed, RequestRecord
from llmsched.cli.load.load import Load, PlannedRequest
from llmsched.cli.load.prompts import COMMON_IDS, TextEncoder, load_encoder, usable_ids
from llmsched.cli.load.trace_load import TraceLoad
from llmsched.cli.targets.answer import read_answer, shorten
from llmsched.cli.targets.http1 import TransportPool
from llmsched.cli.targets.interface import OpenTarget, RunPlan, TargetUnreachableError
from llmsched.cli.targets.load_run import run_workload, warm_up
from llmsched.cli.targets.server_metrics import ServerMetrics
from llmsched.cli.timeline import read_timeline
from llmsched.engine.goodput import Slo
from llmsched.engine.memory.plan import MemoryParts
from llmsched.engine.progress import Progress
from llmsched.engine.provenance import Provenance
from llmsched.engine.proxies import proxy_variable

if TYPE_CHECKING:
    from llmsched.engine.core import Timeline

#: Number of requests about which an llmsched server remembers its scheduler's decisions.
_MOST_TIMELINES = 2000

#: API paths in which a URL that the user has copied may end.
_ENDPOINTS = ("/chat/completions", "/completions", "/models")

#: Compressed chunks would arrive late and cost time. Some gateways refuse requests without a User-Agent.
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "llmsched"}

#: Warning about texts that are sent without a cache salt.
_UNSALTED = (
    "the texts of a trace are the same in each run, and this server is not known to take a cache salt: empty its "
    "prefix cache before another run"
)

Endpoint = Literal["completions", "chat"]

#: `owned_by` in /v1/models -> request fields that make the server report the number of tokens in each chunk.
_COUNT_CHUNKS: Mapping[str, Mapping[str, Any]] = {
    "llmsched": {"return_token_ids": True},
    "vllm": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "sglang": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Settings for the requests to a server."""

    url: str  # may end in /v1 or in an endpoint below it
    endpoint: Endpoint = "completions"
    model: str | None = None  # None: the first model that the server lists
    api_key: str | None = None
    ignore_eos: bool = True
    ask_usage: bool = True
    tokenizer: str | None = None  # model whose tokenizer supplies random tokens and encodes the texts of a trace
    text_prompts: bool = False
    lookup_timeout: float = 10.0  # seconds, for requests that are not part of the load
    timelines: bool = False  # ask an llmsched server, after the load, what its scheduler decided

    @property
    def root(self) -> str:
        """URL of the server, without /v1 and the endpoint."""
        root = self.url.rstrip("/")
        for endpoint in _ENDPOINTS:
            root = root.removesuffix(endpoint)
        return root.rstrip("/").removesuffix("/v1")


class HttpTarget:
    """OpenAI-compatible server. Call `connect()` first and `close()` last."""

    in_process = False
    encode: TextEncoder | None = None
    sample_interval = 1.0
    meter: KVMeter | None = None
    salts = False
    settings: Mapping[str, Any] = MappingProxyType({})  # of the engine, as far as the server tells them

    def __init__(self, options: HttpOptions, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.name = options.model or options.url
        self._options = options
        self._root = options.root
        self._model = options.model
        self._count_chunks: Mapping[str, Any] = {}
        self._answers_lookups = True
        self._is_ours = False
        self._memory: MemoryParts | None = None
        key = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._headers = {**_HEADERS, **key}
        self._transports = TransportPool(options.url, transport)
        self._lookups = httpx.AsyncClient(
            headers=self._headers,
            timeout=options.lookup_timeout,
            limits=httpx.Limits(max_connections=1),
            transport=transport,
            proxy=None if transport else self._transports.proxy,
            verify=self._transports.verify,
            trust_env=False,  # the two lines above follow the environment
        )

    async def connect(self) -> None:
        """Look up the model and the kind of server in /v1/models, if that exists. Raises TargetUnreachableError."""
        try:
            response = await self._look_up("/v1/models")
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as problem:
            variable = proxy_variable(self._options.url)
            through = f" through the proxy in {variable}, which NO_PROXY can avoid" if variable else ""
            raise TargetUnreachableError(f"{_detail(problem)}{through}") from problem
        except (httpx.RequestError, TimeoutError):
            self._answers_lookups = False
            return
        first: Any = None
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            first = response.json()["data"][0]
        if not isinstance(first, dict):
            first = {}
        owner = str(first.get("owned_by"))
        self._count_chunks = _COUNT_CHUNKS.get(owner, {})
        self.salts = owner in _COUNT_CHUNKS  # all servers in this table take a cache_salt
        self._is_ours = owner == "llmsched"
        if isinstance(longest := first.get("max_model_len"), int):
            self.settings = {"max_model_len": longest}
        if self._is_ours:
            self.sample_interval = 0.25  # the server takes 1.4 ms to answer
        if self._model is None and isinstance(name := first.get("id"), str):
            self._model, self.name = name, shorten(name)

    async def close(self) -> None:
        await self._lookups.aclose()
        await self._transports.close()

    async def send(self, request: PlannedRequest, record: RequestRecord) -> None:
        now = asyncio.get_running_loop().time

        async def trace(event: str, info: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.started":
                record.connecting = now()
            elif event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                record.connected = now()
            elif event == "http11.send_request_headers.started":
                record.sent = now()

        url = f"{self._root}/v1/{'chat/completions' if self._options.endpoint == 'chat' else 'completions'}"
        body, extensions = self._body(request), {"trace": trace}
        outgoing = httpx.Request("POST", url, headers=self._headers, json=body, extensions=extensions)
        record.asked_tokens = request.output_len if self._options.ignore_eos else None
        record.prompt_len = request.prompt.length
        try:
            async with self._transports.lend() as transport:
                response = await transport.handle_async_request(outgoing)
                try:
                    await read_answer(response, record, now)
                finally:
                    await response.aclose()
        except (httpx.ConnectError, httpx.ConnectTimeout) as problem:
            raise RequestFailed("connect", _detail(problem)) from problem
        except httpx.RequestError as problem:
            reason = "cut without [DONE]" if record.chunks else "connection lost"
            raise RequestFailed(reason, _detail(problem)) from problem

    def _body(self, request: PlannedRequest) -> dict[str, Any]:
        prompt = request.prompt
        body: dict[str, Any] = {"max_tokens": request.output_len, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self._count_chunks}
        if not self._options.ask_usage:
            del body["stream_options"]
        if self._model is not None:
            body["model"] = self._model
        if self._options.ignore_eos:
            body["ignore_eos"] = True
        if self.salts and request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        if self._options.endpoint == "chat":
            body["messages"] = prompt.messages
        else:
            token_ids = prompt.token_ids
            body["prompt"] = prompt.text if token_ids is None else token_ids
        return body

    async def counts(self) -> EngineCounts:
        if (metrics := await self._metrics()) is None:
            return EngineCounts()
        counts = metrics.counts()
        if self._is_ours:
            with suppress(httpx.RequestError, TimeoutError, ValueError, RecursionError):
                counts = replace(counts, prompt_change=changing_token((await self._look_up("/v1/cache")).json()))
        return counts

    async def state(self) -> TargetState | None:
        metrics = await self._metrics()
        return None if metrics is None else metrics.sample(asyncio.get_running_loop().time())

    async def timelines(self, records: Sequence[RequestRecord]) -> list[Timeline | None]:
        if not (self._options.timelines and self._is_ours):
            return [None] * len(records)
        found: list[Timeline | None] = [None] * len(records)
        for index, record in list(enumerate(records))[-_MOST_TIMELINES:]:
            if record.request_id is not None and record.sent is not None:
                with suppress(httpx.RequestError, TimeoutError, ValueError, LookupError, TypeError, RecursionError):
                    response = await self._look_up(f"/v1/requests/{quote(record.request_id, safe='')}/explain")
                    # The request is assumed to have arrived when it was sent.
                    found[index] = read_timeline(response.json(), record.sent)
        return found

    def memory(self) -> MemoryParts | None:
        return self._memory

    async def _look_up(self, path: str) -> httpx.Response:
        async with asyncio.timeout(self._options.lookup_timeout):
            return await self._lookups.get(f"{self._root}{path}")

    async def _metrics(self) -> ServerMetrics | None:
        if not self._answers_lookups:
            return None
        try:
            response = await self._look_up("/metrics")
        except (httpx.RequestError, TimeoutError):
            return None
        metrics = ServerMetrics.of(response.text) if response.status_code == httpx.codes.OK else None
        if metrics is not None:
            self._memory = metrics.memory()
        return metrics


def _detail(problem: Exception) -> str:
    said = shorten(str(problem)) or type(problem).__name__
    return f"{said} (SSL_CERT_FILE names certificates to trust)" if "CERTIFICATE_VERIFY_FAILED" in said else said


@asynccontextmanager
async def open_server(options: HttpOptions, plan: RunPlan) -> AsyncIterator[OpenTarget]:
    """Connect to a server, warm it up, and yield it as a target. Raises TargetUnreachableError and ConfigError."""
    encode = None if options.tokenizer is None else load_encoder(options.tokenizer)
    ids: Sequence[int] | None = COMMON_IDS
    if options.endpoint == "chat" or options.text_prompts:
        ids = None
    elif encode is not None:
        ids = usable_ids(encode.tokenizer, encode.tokenizer.vocab_size)
    target, warmup = HttpTarget(options), plan.warmup or 0
    target.encode = encode
    try:
        await target.connect()
        await warm_up(target, plan.workload, warmup, ids=ids, timeout=plan.timeout)

        async def measure(workload: Load, slo: Slo, progress: Progress) -> Measurement:
            figures = await run_workload(
                target,
                workload,
                slo,
                ids=ids,
                timeout=plan.timeout,
                progress=progress,
                count_tokens=None if encode is None else encode.count,
                partial=plan.partial,
            )
            if target.salts or not (isinstance(workload, TraceLoad) and workload.trace.of_text):
                return figures
            return replace(figures, warnings=(*figures.warnings, _UNSALTED))

        yield OpenTarget(target.name, Provenance(options.url), warmup, measure, target.settings)
    finally:
        await target.close()
