"""Connections to one server, each in a transport of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.request import getproxies, proxy_bypass

import httpx

from llmsched.cli.targets.http1 import Http1Transport


class Connections:
    """Lends a transport to each request, first the one that came back last, since its connection may still be open.

    All requests go through `transport` if one is given.
    """

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._shared = transport
        self._free: list[httpx.AsyncBaseTransport] = []
        self._proxy = _proxy_of(httpx.URL(url))
        # Loading certificates takes tens of milliseconds: once, and only where they are needed.
        self._verify = httpx.create_ssl_context(verify=url.startswith("https:"))

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[httpx.AsyncBaseTransport]:
        """A transport that nobody else uses until the block ends."""
        if self._shared is not None:
            yield self._shared
            return
        transport = self._free.pop() if self._free else self._new()
        try:
            yield transport
        finally:
            self._free.append(transport)

    def _new(self) -> httpx.AsyncBaseTransport:
        """A transport; of those that talk to a proxy httpx knows more."""
        if self._proxy is None:
            return Http1Transport(self._verify)
        return httpx.AsyncHTTPTransport(self._verify, proxy=self._proxy)

    async def close(self) -> None:
        """Close all connections; no request is under way."""
        for transport in self._free:
            await transport.aclose()


def _proxy_of(url: httpx.URL) -> str | None:
    """The proxy that the environment names for this server."""
    proxies = getproxies()
    return None if proxy_bypass(url.host) else proxies.get(url.scheme) or proxies.get("all")
