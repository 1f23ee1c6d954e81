"""The page at / tells a person with a browser how to use the server."""

from __future__ import annotations

from html import unescape
from typing import Any

import httpx
import pytest

from llmsched.cli.serve.access import Access


@pytest.mark.parametrize("api_key", [None, "secret"])
def test_the_page_shows_requests_to_copy(make_server: Any, api_key: str | None) -> None:
    server = make_server(access=Access(api_key))
    answer = httpx.get(server.url + "/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    text = unescape(answer.text)
    assert f"curl {server.url}/v1/chat/completions" in text
    assert f"llmsched chat --url {server.url}" in text
    assert ("Authorization: Bearer KEY" in text) == (api_key is not None)
    assert "secret" not in text


def test_the_address_is_escaped(make_server: Any) -> None:
    answer = httpx.get(make_server().url + "/", headers={"Host": "a<script>"})
    assert "<script>" not in answer.text
