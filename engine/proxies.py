"""Proxies that environment variables name (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY)."""

from __future__ import annotations

import os
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from llmsched.engine.errors import LlmschedError

#: Schemes of proxies that httpx supports.
_SCHEMES = ("http", "https", "socks5", "socks5h")


def proxy_for(url: str) -> str | None:
    """Return the URL of the proxy through which a request to `url` goes, or None if the request goes directly.

    Raises LlmschedError, which names the environment variable, if the URL of the proxy is malformed.
    """
    target = urlsplit(url)
    if proxy_bypass(target.hostname or ""):
        return None
    proxies = getproxies()
    return next((_checked(name, proxies[name]) for name in (target.scheme, "all") if proxies.get(name)), None)


def check_proxies() -> None:
    """Raise LlmschedError if the environment names a proxy with a malformed URL."""
    proxies = getproxies()
    for name in ("https", "http", "all"):
        if proxies.get(name):
            _checked(name, proxies[name])


def _checked(name: str, value: str) -> str:
    """Return the URL of the proxy `value`, with the scheme http if `value` has no scheme (as in curl).

    Raises LlmschedError if the URL is malformed. `name` is the scheme that the proxy serves.
    """
    proxy = value if "://" in value else f"http://{value}"
    try:
        parts = urlsplit(proxy)
        valid = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no valid IPv6 address or port
        valid = False
    if not valid:
        variable = next((key for key in os.environ if key.lower() == f"{name}_proxy"), f"{name}_proxy")
        raise LlmschedError(
            f"{variable}={value!r} is not the URL of a proxy; expected one like http://host:port "
            f"({', '.join(_SCHEMES)}); correct or unset it, or list the host in NO_PROXY"
        )
    return proxy
