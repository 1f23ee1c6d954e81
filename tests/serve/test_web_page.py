"""The page at / is one file that fetches nothing from elsewhere and shows the server's data as text only."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

import httpx
import pytest
from html_pages import parsed
from scripted import ScriptedServer

from llmsched.cli.serve.access import Access


@pytest.fixture(scope="module")
def answer(shared_server: ScriptedServer) -> httpx.Response:
    return httpx.get(shared_server.url + "/")


def element(html: str, tag: str) -> str:
    """Return the content of the page's only element of this kind."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return str(content)


def test_the_policy_allows_only_the_pages_own_code(answer: httpx.Response) -> None:
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    hashes = {
        kind: f"'sha256-{base64.b64encode(hashlib.sha256(element(answer.text, tag).encode()).digest()).decode()}'"
        for kind, tag in (("script-src", "script"), ("style-src", "style"))
    }
    assert rules == hashes | {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }


def test_the_page_fetches_nothing_and_has_no_inline_handlers(answer: httpx.Response) -> None:
    page = parsed(answer.text)
    assert page.fetched == ["data:,"]  # no icon
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "style"]
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|import\(", answer.text)


def test_the_script_writes_text_not_html(answer: httpx.Response) -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|Function\(|setAttribute\(.on|Storage"
    assert not re.findall(forbidden, element(answer.text, "script"))


def test_the_script_finds_its_elements_and_routes(answer: httpx.Response, shared_server: ScriptedServer) -> None:
    script = element(answer.text, "script")
    ids = {value for name, value in parsed(answer.text).attributes if name == "id"}
    assert set(re.findall(r'get\("([\w-]+)"\)', script)) <= ids
    routes = re.findall(r'ask\(["`](v1/[^"`]+)["`]', script)
    assert len(routes) == 4
    for route in routes:
        path = re.sub(r"\$\{.*\}", "x", route)
        found = httpx.get(f"{shared_server.url}/{path}")
        assert found.status_code in ({200, 405} if path == route else {404}), route
        assert "this server answers" not in found.text, route  # that is the answer of an unknown route


@pytest.mark.parametrize("access", [Access("k"), Access(loopback=False), Access()])
def test_the_page_needs_no_key(make_server: Any, access: Access) -> None:
    server = make_server(access=access)
    headers = {"Host": "elsewhere.example"}
    assert httpx.get(server.url + "/", headers=headers).status_code == 200
    assert httpx.head(server.url + "/", headers=headers).text == ""


def test_the_page_can_be_turned_off(make_server: Any) -> None:
    server = make_server(ui=False)
    refused = httpx.get(server.url + "/")
    assert refused.status_code == 404
    assert refused.json()["error"]["type"] == "not_found_error"
    assert httpx.get(server.url + "/v1/stats").status_code == 200
