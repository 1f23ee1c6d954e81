from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from llmsched.cli.serve.connections import Connection, ConnectionPool
from llmsched.cli.serve.http_limits import HttpLimits
from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.errors import LlmschedError

logger = logging.getLogger(__name__)

#: Seconds that the process stays up after an engine failure, so that clients and probes get their answers.
_LINGER_S = 2.0
#: Seconds after the grace period within which the process exits, whatever hangs.
EXIT_S = 2.0
#: Parts of EXIT_S: seconds for the engine to finish its step, and for clients to read the rest of their answers.
_STOPPING_S, _LATE_CLOSING_S = 1.0, 0.4
#: Most seconds for clients to read the rest of their answers if requests finished within the grace period.
_CLOSING_S = 5.0
#: Seconds after which a thread that computes lets a waiting one run. With Python's default of 5 ms, the event loop
#: would wait 5 ms each time that it has checked its sockets while another thread parses a request.
_SWITCH_S = 0.0005
#: Connections that may wait to be accepted while the model loads or the event loop is busy.
_BACKLOG = 2048
#: Connections that are accepted in one turn of the event loop, before those above the limit are closed.
_ACCEPT_BATCH = 16

#: Advice for a host on which the server cannot listen.
_HOSTS = "--host must be an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"


class PortInUseError(LlmschedError):
    """Error for an address on which the server cannot listen."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on all addresses of `host`, IPv4 first. Raises PortInUseError.

    Port 0 picks one free port for all of them. Clients that connect wait until they are served.
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


def favour_latency() -> None:
    """Keep pauses of this process short. Call this after the model has been loaded."""
    sys.setswitchinterval(_SWITCH_S)
    # The objects loaded so far live until the end: keep the garbage collector from scanning them between tokens.
    gc.collect()
    gc.freeze()
    # A full scan of the objects of thousands of streams takes 0.1 s, so that it must be rare.
    gc.set_threshold(5_000, 5, 80)


def _in_use(host: str, port: int, error: OSError) -> PortInUseError:
    reason = (error.strerror or str(error)).lower()
    advice = _HOSTS if error.errno == errno.EADDRNOTAVAIL else "choose another --port"
    return PortInUseError(f"cannot listen on {host}:{port}: {reason}; {advice}")


class Server(uvicorn.Server):
    """HTTP server of an engine. `serve(...)` runs until a signal arrives or the engine fails, and sets `exit_code`.

    After the first SIGTERM or SIGINT, /health and new requests get 503, and running requests have `grace_s` seconds to
    finish. A second signal ends the process at once. `serve(...)` returns at most 2 seconds after the grace period. As
    the engine's thread may hang even then, end the process with `os._exit`. The exit code is 1 if the engine failed or
    hangs, else 0. `on_ready` is called when the server accepts connections, `on_drain` when the grace period begins.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: AsyncEngine,
        limits: HttpLimits | None = None,
        *,
        grace_s: float,
        on_ready: Callable[[], Any] = lambda: None,
        on_drain: Callable[[], Any] = lambda: None,
    ) -> None:
        limits = limits or HttpLimits()
        self._pool = ConnectionPool(limits)
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            http=partial(Connection, self._pool),  # type: ignore[arg-type]  # uvicorn only calls it
            ws="none",
            backlog=_ACCEPT_BATCH,
            timeout_keep_alive=limits.keep_alive_timeout,  # type: ignore[arg-type]  # uvicorn takes fractions
        )
        super().__init__(config)
        self._engine, self._grace_s = engine, grace_s
        self._on_ready, self._on_drain = on_ready, on_drain
        self._is_stopping = False
        self._draining: asyncio.Task[None] | None = None
        #: Time at which the grace period ends; infinite if it has not begun.
        self._until = math.inf
        self.exit_code = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on these listening sockets. If serving fails, stop the engine before the error is raised."""
        sys.setswitchinterval(_SWITCH_S)
        asyncio.get_running_loop().set_exception_handler(self._pool.on_loop_error)
        try:
            await super().serve(sockets)
        except BaseException:
            await self._engine.stop(_STOPPING_S)
            raise

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # uvicorn has set it to _ACCEPT_BATCH
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain at the first signal, and end the process at the second."""
        if self._is_stopping:
            os._exit(128 + sig)
        self._is_stopping = True

    async def on_tick(self, counter: int) -> bool:
        """Begin to drain after a signal or an engine failure; return True once the connections may be closed."""
        self._engine.diagnose()
        self._engine.recent.sample()
        if self._draining is None and (self._is_stopping or not self._engine.healthy):
            self._draining = asyncio.create_task(self._drain())
        return await super().on_tick(counter) or (self._draining is not None and self._draining.done())

    async def _drain(self) -> None:
        """Wait until running requests finish. If the engine has failed, wait a moment for error answers to be sent."""
        if not self._engine.healthy:
            await asyncio.sleep(_LINGER_S)
            return
        self._on_drain()
        self._until = time.monotonic() + self._grace_s
        await self._engine.drain(self._grace_s)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the engine, then close the connections after a moment in which clients can read their answers."""
        if self._draining is not None:
            await self._draining
        has_failed = not self._engine.healthy
        has_stopped = await self._engine.stop(_STOPPING_S)
        if not has_stopped:
            logger.error("the engine does not end its step: exiting without it")
        self.exit_code = int(has_failed or not has_stopped)
        closing_s = min(_CLOSING_S, max(_LATE_CLOSING_S, self._until - time.monotonic()))
        # Not rounded up to whole seconds, as uvicorn declares it.
        self.config.timeout_graceful_shutdown = closing_s  # type: ignore[assignment]
        await super().shutdown(sockets)
