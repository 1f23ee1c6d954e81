"""Page at /, for people who open the server's address in a browser."""

from __future__ import annotations

from llmsched.cli.html_page import Page


def commands_to_try(url: str, *, has_key: bool) -> tuple[str, str]:
    """Return an `llmsched chat` and a curl command for the server at `url`."""
    chat = "llmsched chat" if url.endswith("127.0.0.1:8000") else f"llmsched chat --url {url}"
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    curl = f"curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    return f"{chat}{' --api-key KEY' if has_key else ''}", curl


def home_page(url: str, *, has_key: bool) -> str:
    page = Page("llmsched")
    page.say("This server answers requests of OpenAI's API. Give a client this base URL:")
    page.example(f"{url}/v1")
    if has_key:
        page.say("Requests need the API key with which the server was started.")
    page.heading("Try it")
    for command in commands_to_try(url, has_key=has_key):
        page.example(command)
    page.heading("Routes")
    page.table(
        ("route", "answer"),
        (
            ("POST /v1/chat/completions", "the answer to chat messages"),
            ("POST /v1/completions", "the continuation of a text"),
            ("POST /v1/responses", "the answer to chat messages, in the form of OpenAI's Responses API"),
            ("GET /v1/models", "the model and its context length"),
            ("GET /health", "200 while the server can answer, else 503 with the reason"),
            ("GET /metrics", "metrics for Prometheus and Grafana"),
        ),
        text_columns=2,
    )
    return page.html()
