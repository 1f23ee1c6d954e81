from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from llmsched.cli import render
from llmsched.cli.serve.access import Access
from llmsched.cli.serve.app import build_app
from llmsched.cli.serve.lifecycle import Server, listen
from llmsched.engine.async_engine import AsyncEngine
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine


@contextmanager
def private_server(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Load a model and serve it to this process alone while the block runs. Yield the URL and the API key.

    Raises ModelError and ConfigError as `build_engine` does.
    """
    from llmsched.engine.build import build_engine

    with render.progress_bar() as progress:
        engine = build_engine(config, progress)
    key, (listener,) = secrets.token_urlsafe(), listen("127.0.0.1", 0)
    ready: Future[Server] = Future()
    thread = threading.Thread(
        target=lambda: asyncio.run(_serve(engine, listener, key, ready)), name="llmsched-server", daemon=True
    )
    thread.start()
    server = ready.result()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", key
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join()


async def _serve(engine: Engine, listener: socket.socket, key: str, ready: Future[Server]) -> None:
    """Serve until the server gets a signal. Set `ready` to the server when it accepts connections, or to an error."""
    try:
        service = AsyncEngine(engine)
        app = build_app(service, engine.model.name, Access(key), ui=False)
        server = Server(app, service, grace_s=0.0, on_ready=lambda: ready.set_result(server))
        service.start()
        await server.serve([listener])
    except BaseException as error:
        if ready.done():
            raise
        ready.set_exception(error)
