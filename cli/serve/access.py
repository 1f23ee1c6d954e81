from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi import Request

from llmsched.cli.serve.api_errors import ApiError
from llmsched.engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Access:
    """Access rules of a server. `client` and `admin` are FastAPI dependencies, which run before a body is read.

    `loopback` is True if only programs on this machine can connect. Without an API key, such a server refuses requests
    with a foreign Host or Origin, because a web page in the user's browser may have sent them. A header is not foreign
    if it names this machine, one of `allowed_hosts` or, for Origin, one of `cors_origins`.
    """

    api_key: str | None = None
    admin_api_key: str | None = None
    loopback: bool = True
    allowed_hosts: Collection[str] = ()
    cors_origins: Collection[str] = ()

    async def client(self, request: Request) -> None:
        """Raise ApiError 401 or 403 if the sender may not use the model. The administrative key is accepted too."""
        if self.api_key is None:
            self._check_names(request)
        elif not _has_key(request, self.api_key, self.admin_api_key):
            raise _no_key("API key")

    async def admin(self, request: Request) -> None:
        """Raise ApiError 401 or 403 if the sender may not use administrative routes, 415 if the body is not JSON."""
        if self.admin_api_key is not None:
            if not _has_key(request, self.admin_api_key):
                raise _no_key("key for administrative routes (--admin-api-key)")
        else:
            await self.client(request)
            if self.api_key is not None or not self.loopback:
                raise ApiError(
                    403,
                    f"{request.url.path} shows or changes what all clients share; start the server with "
                    "--admin-api-key KEY and send that key",
                    code="admin_only",
                )
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"the Content-Type is {kind[:100]!r}; send application/json", code="not_json")

    def _check_names(self, request: Request) -> None:
        """Raise ApiError 403 if the Host or Origin shows that a foreign web page sent the request."""
        if not self.loopback or "*" in self.allowed_hosts:
            return
        for header, prefix in (("host", "//"), ("origin", "")):
            given = request.headers.get(header)
            if header == "origin" and (given in self.cors_origins or "*" in self.cors_origins):
                continue
            if given is not None and not self._is_own(prefix + given):
                raise ApiError(
                    403,
                    f"the {header} {given[:100]!r} is not this machine, and the server has no API key; to allow it, "
                    "start the server with --allowed-host NAME or with --api-key",
                    code="foreign_host",
                )

    def _is_own(self, url: str) -> bool:
        try:
            name = (urlsplit(url).hostname or "").rstrip(".")
        except ValueError:
            return False
        if name == "localhost" or name.endswith(".localhost") or name in self.allowed_hosts:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


def checked_key(option: str, key: str | None) -> str | None:
    """Return `key` without spaces around it. Raises ConfigError if the key is empty or cannot be sent in a header."""
    if key is None:
        return None
    key = key.strip()
    if not key or not key.isprintable():
        wrong = "has a character that cannot be sent in a header" if key else "is empty"
        raise ConfigError(option, f"{wrong}; give a key, or leave the option out to serve without one")
    return key


def are_loopback(listeners: Collection[socket.socket]) -> bool:
    """Return True if only programs of this machine can connect to the listeners."""
    names = (listener.getsockname()[0].partition("%")[0] for listener in listeners)
    return all(ipaddress.ip_address(name).is_loopback for name in names)


def _has_key(request: Request, *keys: str | None) -> bool:
    """Return True if the request has one of the keys. The duration of the comparison reveals nothing about a key."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    key = given.strip(" \t").encode("latin-1")  # headers are bytes decoded as Latin-1
    matches = [hmac.compare_digest(key, known.encode()) for known in keys if known is not None]
    return scheme.lower() == "bearer" and any(matches)


def _no_key(name: str) -> ApiError:
    return ApiError(
        401,
        f"the {name} is missing or wrong; send it as 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
