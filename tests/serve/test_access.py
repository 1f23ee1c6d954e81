"""Keys, administrative routes, and requests that foreign web pages make a browser send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from scripted import ScriptedServer

from llmsched.cli.serve.access import Access, are_loopback, checked_key
from llmsched.cli.serve.lifecycle import listen
from llmsched.engine.errors import ConfigError

ADMIN = [("GET", "/v1/cache"), ("GET", "/v1/prefixes"), ("POST", "/v1/prefixes"), ("DELETE", "/v1/prefixes/pin-1")]
ADMIN += [("POST", "/reset_prefix_cache"), ("GET", "/v1/requests/slowest")]
MODEL = ("POST", "/v1/completions")


def status(server: ScriptedServer, route: tuple[str, str], key: str | None = None, **headers: str) -> int:
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    method, path = route
    return httpx.request(method, server.url + path, headers=headers).status_code


@pytest.mark.parametrize(
    ("access", "key", "expected"),
    [
        (Access(), None, None),
        (Access(loopback=False), None, 403),
        (Access("k"), "k", 403),
        (Access("k"), "wrong", 401),
        (Access("k"), None, 401),
        (Access("k", "a"), "k", 401),
        (Access("k", "a"), "a", None),
        (Access(None, "a"), None, 401),
        (Access(None, "a", loopback=False), "a", None),
    ],
)
def test_administrative_routes_are_for_one_user_or_the_administrator(
    make_server: Callable[..., ScriptedServer], access: Access, key: str | None, expected: int | None
) -> None:
    server = make_server(access=access)
    for route in ADMIN:
        got = status(server, route, key)
        assert got == expected or (expected is None and got in (200, 400, 404)), route
    assert status(server, MODEL, key) == (401 if access.api_key and key not in ("k", "a") else 400)


@pytest.mark.parametrize("route", [*ADMIN, MODEL])
@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ({"Host": "evil.example"}, True),
        ({"Host": "127.0.0.1.evil.example:8000"}, True),
        ({"Host": "[::1"}, True),
        ({"Host": ""}, True),
        ({"Origin": "http://evil.example"}, True),
        ({"Origin": "null"}, True),
        ({"Origin": "http://localhost.evil.example"}, True),
        ({"Host": "localhost:8000", "Origin": "http://127.0.0.1:3000"}, False),
        ({"Host": "[::1]:8000"}, False),
        ({"Host": "app.localhost"}, False),
        ({"Host": "proxy.example", "Origin": "https://proxy.example"}, False),
    ],
)
def test_foreign_names_are_refused_on_loopback(
    named_server: ScriptedServer, route: tuple[str, str], headers: dict[str, str], refused: bool
) -> None:
    assert (status(named_server, route, **headers) == 403) == refused
    assert status(named_server, ("GET", "/health"), **headers) == 200


@pytest.fixture(scope="module")
def named_server() -> Any:
    server = ScriptedServer(access=Access(allowed_hosts={"proxy.example"})).start()
    yield server
    server.close()


@pytest.mark.parametrize("access", [Access("k"), Access(loopback=False), Access(allowed_hosts={"*"})])
def test_names_do_not_matter_where_no_browser_is_trusted(
    make_server: Callable[..., ScriptedServer], access: Access
) -> None:
    headers = {"Host": "example.org", "Origin": "https://example.org"}
    assert status(make_server(access=access), MODEL, "k", **headers) == 400


@pytest.mark.parametrize("route", [("POST", "/reset_prefix_cache"), ("POST", "/v1/prefixes")])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_administrative_routes_take_only_json(named_server: ScriptedServer, route: tuple[str, str], kind: str) -> None:
    assert status(named_server, route, **{"Content-Type": kind}) == 415
    assert status(named_server, route, **{"Content-Type": "application/json; charset=utf-8"}) != 415


@pytest.mark.parametrize("given", ["secret", "secret\n", " secret\r\n", "\tsecret"])
def test_white_space_around_a_key_is_removed(given: str) -> None:
    assert checked_key("api_key", given) == "secret"


@pytest.mark.parametrize("given", ["", " \n", "two\nlines", "nul\0"])
def test_keys_that_no_client_can_send_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="api_key: "):
        checked_key("api_key", given)


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("0.0.0.0", False)])
def test_loopback_addresses(host: str, loopback: bool) -> None:
    with listen(host, 0)[0] as listener:
        assert are_loopback([listener]) == loopback
