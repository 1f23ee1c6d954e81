"""Lifecycle of the serving process: listen, serve, drain, exit."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from llmsched.cli.serve.connections import Connection, ConnectionPool
from llmsched.cli.serve.limits import HttpLimits
from llmsched.engine.errors import LlmschedError
from llmsched.engine.service import AsyncEngine

logger = logging.getLogger(__name__)

_HEALTH_CHECK_S = 0.2
#: Seconds that the process stays up after an engine failure, so that clients and probes get their answers.
_LINGER_S = 2.0
#: Seconds after the grace period within which the process exits, whatever hangs.
EXIT_S = 2.0
#: Seconds of these that the engine gets to finish its step, and clients to read the rest of their answers.
_STOPPING_S, _LATE_CLOSING_S = 1.0, 0.5
#: Seconds that clients get at most to read the rest of their answers if the grace period has not passed.
_CLOSING_S = 5.0
#: Connections that may wait while the model loads, and later for the event loop.
_BACKLOG = 2048
#: Connections that are accepted before the event loop turns to other work, and before those above the limit are closed.
_ACCEPT_BATCH = 16
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


#: Advice for a host on which the server cannot listen.
_HOSTS = "--host must be an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"


class PortInUseError(LlmschedError):
    """Error for an address on which the server cannot listen."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on all addresses of `host`, IPv4 first. Port 0 picks one free port for all of them.

    An address that this machine lacks is left out if there is another: "localhost" may have an IPv6 address although
    the machine has no IPv6. Raises PortInUseError on failure.

    Call this before the model is loaded: clients that connect meanwhile wait until `run` serves them. A socket that is
    bound but does not listen would not reserve the address for this process. An IPv6 address may have brackets.
    """
    host = host.removeprefix("[").removesuffix("]")
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    try:
        addresses = sorted(set(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)))
    except OSError as error:
        raise PortInUseError(f"cannot listen on {host!r}: {error.strerror or error}; {_HOSTS}") from error
    with contextlib.ExitStack() as on_failure:
        for family, kind, protocol, _, (address, _, *scope) in addresses:
            try:
                listener = on_failure.enter_context(socket.socket(family, kind, protocol))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((address, port, *scope))
                listener.listen(_BACKLOG)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise _in_use(host, port, error) from error
                missing = error
            else:
                listeners.append(listener)
                port = listener.getsockname()[1]
        if not listeners:
            assert missing is not None
            raise _in_use(host, port, missing) from missing
        on_failure.pop_all()
    return listeners


def _in_use(host: str, port: int, error: OSError) -> PortInUseError:
    reason = (error.strerror or str(error)).lower()
    advice = _HOSTS if error.errno == errno.EADDRNOTAVAIL else "choose another --port"
    return PortInUseError(f"cannot listen on {host}:{port}: {reason}; {advice}")


class _Server(uvicorn.Server):
    """uvicorn server that installs no signal handlers and calls `on_ready` when it accepts connections."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], Any]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # uvicorn has set it to _ACCEPT_BATCH
        self._on_ready()


async def run(
    app: ASGIApp,
    engine: AsyncEngine,
    listeners: list[socket.socket],
    *,
    grace_s: float,
    limits: HttpLimits | None = None,
    on_ready: Callable[[], Any] = lambda: None,
    on_drain: Callable[[], Any] = lambda: None,
    stop: asyncio.Event | None = None,
) -> int:
    """Serve until a signal arrives, `stop` is set or the engine fails. Return the exit code for the process.

    After the first SIGTERM or SIGINT, /health and new requests get 503. Running requests have `grace_s` seconds to
    finish; those that take longer end with an error. A second signal ends the process at once. The function returns at
    most 2 seconds after the grace period, even if the engine hangs; its thread then still runs, so end the process with
    `os._exit`. The exit code is 0 after draining, even if requests were cut off, and 1 if the engine failed or hangs.
    Raises PortInUseError, after stopping the engine, if one of the `listeners` cannot listen on its address.
    """
    stop, limits = stop or asyncio.Event(), limits or HttpLimits()
    pool = ConnectionPool(limits)
    asyncio.get_running_loop().set_exception_handler(pool.on_loop_error)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        http=partial(Connection, pool),  # type: ignore[arg-type]  # uvicorn only calls it
        ws="none",
        backlog=_ACCEPT_BATCH,
        timeout_keep_alive=limits.keep_alive_timeout,  # type: ignore[arg-type]  # uvicorn takes fractions
    )
    server = _Server(config, on_ready)
    with _signals(stop):
        serving = asyncio.create_task(server.serve(sockets=listeners))
        died, ended, closing_s = False, True, _CLOSING_S
        try:
            died = await _stopped_or_died(stop, engine, serving)
            if died:
                await asyncio.sleep(_LINGER_S)
            elif not serving.done():
                on_drain()
                until = time.monotonic() + grace_s
                await engine.drain(grace_s)
                closing_s = min(_CLOSING_S, max(_LATE_CLOSING_S, until - time.monotonic()))
        finally:
            ended = await engine.stop(_STOPPING_S)
        if not ended:
            logger.error("the engine does not end its step: exiting without it")
        # Not rounded up to whole seconds, as uvicorn declares it.
        server.config.timeout_graceful_shutdown = closing_s  # type: ignore[assignment]
        server.should_exit = True
        try:
            await serving
        except OSError as error:
            if server.started:
                raise
            host, port, *_ = listeners[0].getsockname()
            raise _in_use(host, port, error) from error
    return 1 if died or not ended else 0


async def _stopped_or_died(stop: asyncio.Event, engine: AsyncEngine, serving: asyncio.Task[None]) -> bool:
    """Wait until `stop` is set, the server ends or the engine fails. Return True if the engine failed."""
    stopped = asyncio.create_task(stop.wait())
    try:
        while not (stopped.done() or serving.done()):
            if not engine.healthy:
                return True
            engine.diagnose()
            await asyncio.wait({stopped, serving}, timeout=_HEALTH_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
        return not engine.healthy
    finally:
        stopped.cancel()


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """Make the first SIGTERM or SIGINT set `stop`, and the second end the process.

    Do nothing where asyncio cannot handle signals: outside the main thread, and on Windows.
    """
    loop = asyncio.get_running_loop()

    def handle(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    # asyncio raises outside the main thread, and on Windows.
    with contextlib.suppress(ValueError, RuntimeError):
        for number in _SIGNALS:
            loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
