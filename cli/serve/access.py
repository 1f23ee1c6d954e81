from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi import Request

from llmsched.cli.serve.api_errors import ApiError
from llmsched.cli.serve.api_keys import ApiKey, KeyFile
from llmsched.engine.errors import ConfigError

#: Keys given by flags. Keys in a file have no such names.
_CLIENT, _ADMIN = ApiKey("--api-key"), ApiKey("--admin-api-key", admin=True)


@dataclass(frozen=True, slots=True)
class Access:
    """Access rules of a server. `client` and `admin` are FastAPI dependencies, which run before a body is read.

    They set `request.state.api_key` to the key that was sent, or to None if clients need no key.

    `loopback` is True if only programs on this machine can connect. Without an API key, such a server refuses requests
    with a foreign Host or Origin, because a web page in the user's browser may have sent them. A header is not foreign
    if it names this machine, one of `allowed_hosts` or, for Origin, one of `cors_origins`.
    """

    api_key: str | None = None
    admin_api_key: str | None = None
    loopback: bool = True
    allowed_hosts: Collection[str] = ()
    cors_origins: Collection[str] = ()
    key_file: KeyFile | None = None

    @property
    def has_keys(self) -> bool:
        """True if clients need a key."""
        return self.api_key is not None or self.key_file is not None

    async def client(self, request: Request) -> None:
        """Raise ApiError 401 or 403 if the sender may not use the model. The administrative key is accepted too."""
        request.state.api_key = self._key_of(request)
        if not self.has_keys:
            self._check_names(request)
        elif request.state.api_key is None:
            raise _no_key("API key")

    async def admin(self, request: Request) -> None:
        """Raise ApiError 401 or 403 if the sender may not use administrative routes, 415 if the body is not JSON."""
        request.state.api_key = key = self._key_of(request)
        if self.admin_api_key is not None or (self.key_file is not None and self.key_file.has_admin):
            if key is None or not key.admin:
                raise _no_key("key for administrative routes (--admin-api-key, or one with admin in --api-keys)")
        else:
            await self.client(request)
            if self.has_keys or not self.loopback:
                raise ApiError(
                    403,
                    f"{request.url.path} shows or changes what all clients share; start the server with "
                    "--admin-api-key KEY and send that key",
                    code="admin_only",
                )
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"the Content-Type is {kind[:100]!r}; send application/json", code="not_json")

    def _key_of(self, request: Request) -> ApiKey | None:
        """Return the key in the request, or None. The duration of the comparison reveals nothing about a key."""
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        sent = given.strip(" \t").encode("latin-1")  # headers are bytes decoded as Latin-1
        if scheme.lower() != "bearer":
            return None
        single = ((_CLIENT, self.api_key), (_ADMIN, self.admin_api_key))
        found = [key for key, known in single if known is not None and hmac.compare_digest(sent, known.encode())]
        if found:
            return found[-1]
        return None if self.key_file is None else self.key_file.find(sent)

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


def _no_key(name: str) -> ApiError:
    return ApiError(
        401,
        f"the {name} is missing or wrong; send it as 'Authorization: Bearer KEY'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
