"""Proxies in environment variables (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY)."""

from __future__ import annotations

import os
from contextlib import suppress
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from llmsched.engine.errors import LlmschedError

#: Schemes of proxies that httpx supports.
_SCHEMES = ("http", "https", "socks5", "socks5h")


def proxy_for(url: str) -> str | None:
    """Return the URL of the proxy through which a request to `url` goes, or None if the request goes directly.

    Raises LlmschedError, which names the environment variable, if the URL of the proxy is malformed.
    """
    name = _proxy_name(url)
    return None if name is None else _checked(name, getproxies()[name])


def proxy_variable(url: str) -> str | None:
    """Return the name of the environment variable with the proxy for `url`, or None if a request goes directly."""
    name = _proxy_name(url)
    return None if name is None else _variable(name)


def _proxy_name(url: str) -> str | None:
    target, proxies = urlsplit(url), getproxies()
    host = target.hostname or ""
    if proxy_bypass(host) or proxy_bypass(target.netloc) or _in_networks(host, proxies.get("no", "")):
        return None
    return next((name for name in (target.scheme, "all") if proxies.get(name)), None)


def _in_networks(host: str, no_proxy: str) -> bool:
    """Return True if `host` is an address in a network that NO_PROXY lists, such as 127.0.0.0/8."""
    for entry in no_proxy.split(","):
        with suppress(ValueError):
            if "/" in entry and ip_address(host) in ip_network(entry.strip(), strict=False):
                return True
    return False


def _variable(name: str) -> str:
    return next((key for key in os.environ if key.lower() == f"{name}_proxy"), f"{name}_proxy")


def check_proxies() -> None:
    """Raise LlmschedError if the URL of a proxy in the environment is malformed."""
    proxies = getproxies()
    for name in ("https", "http", "all"):
        if proxies.get(name):
            _checked(name, proxies[name])


def _checked(name: str, value: str) -> str:
    proxy = value if "://" in value else f"http://{value}"
    try:
        parts = urlsplit(proxy)
        valid = parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no valid IPv6 address or port
        valid = False
    if not valid:
        raise LlmschedError(
            f"{_variable(name)}={value!r} is not the URL of a proxy; expected one like http://host:port "
            f"({', '.join(_SCHEMES)}); correct or unset it, or list the host in NO_PROXY"
        )
    return proxy
