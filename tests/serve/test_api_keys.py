"""Named API keys: their file, rights, budgets, headers and metrics; nothing that the server writes has a key."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from exposition import samples
from scripted import ScriptedServer

from llmsched.cli.serve.access import Access
from llmsched.cli.serve.api_errors import ApiError
from llmsched.cli.serve.api_keys import ApiKey, KeyFile
from llmsched.cli.serve.key_budgets import KeyBudgets
from llmsched.engine.errors import ConfigError
from llmsched.engine.metrics import EngineMetrics

TEAM, OPERATOR = "sk-team-secret", "sk-operator-secret"
DIGEST = hashlib.sha256(OPERATOR.encode()).hexdigest()
FILE = f"""
[[keys]]
name = "team"
key = "{TEAM}"
requests_per_minute = 4
tokens_per_minute = 50

[[keys]]
name = "operator"
hash = "sha256:{DIGEST}"
admin = true
"""
LINES = [
    {"name": "team", "key": TEAM, "requests_per_minute": 4, "tokens_per_minute": 50},
    {"name": "operator", "hash": f"sha256:{DIGEST}", "admin": True},
]


def write(folder: Path, text: str, name: str = "keys.toml") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("lines", [False, True])
def test_both_forms_of_the_file(tmp_path: Path, lines: bool) -> None:
    text = "\n\n".join(map(json.dumps, LINES)) if lines else FILE
    file = KeyFile(write(tmp_path, text, "keys.jsonl" if lines else "keys.toml"))
    assert file.find(TEAM.encode()) == ApiKey("team", False, 4, 50)
    assert file.find(OPERATOR.encode()) == ApiKey("operator", admin=True)
    assert file.find(b"") is file.find(DIGEST.encode()) is file.find(b"\xff") is None
    assert (len(file), file.has_admin) == (2, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must consist of tables"),
        ("keys = []", "has no keys"),
        ("[[keys]]\nname = 'a'\n", "table 1: give either key or hash"),
        (f"[[keys]]\nname = 'a'\nkey = '{TEAM}'\nhash = 'sha256:{DIGEST}'", "give either key or hash"),
        (f"[[keys]]\nname = 'a b'\nkey = '{TEAM}'", "table 1: name: string should match"),
        (f"[[keys]]\nname = 'a'\nkey = '{TEAM} '", "key: string should match"),
        ("[[keys]]\nname = 'a'\nkey = 'short'", "at least 8"),
        (f"[[keys]]\nname = 'a'\nhash = '{OPERATOR}'", "hash: string should match"),
        (
            f"[[keys]]\nname = 'a'\nkey = '{TEAM}'\nrequests_per_minute = 0",
            "requests_per_minute: input should be greater",
        ),
        (
            f"[[keys]]\nname = 'a'\nkey = '{TEAM}'\ntokens_per_minute = 1{'0' * 400}",
            "tokens_per_minute: input should be less",
        ),
        (f"keys = ['{TEAM}']", "table 1: is not a table or a JSON object"),
        (f"[[keys]]\nname = 'a'\nkey = '{TEAM}'\nlimit = 3", "limit: extra inputs"),
        (f"[[keys]]\nname = 'a'\nkey = '{TEAM}'\n" * 2, "table 2: the name 'a' is used twice"),
        (f"[[keys]]\nname = 'a'\nkey = '{TEAM}'\n[[keys]]\nname = 'b'\nkey = '{TEAM}'", "'b' has the same key as 'a'"),
        (f"[[keys]]\nname = 'a'\nkey = {TEAM}", "not valid TOML"),
        (f"keys = {'[' * 100_000}", "not valid TOML"),
        (f"key = '{TEAM}'", "must consist of tables"),
    ],
)
def test_wrong_files_are_refused_without_quoting_keys(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        KeyFile(write(tmp_path, text))
    assert TEAM not in str(refused.value)
    assert OPERATOR not in str(refused.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        KeyFile(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="line 2: is not a JSON object"):
        KeyFile(write(tmp_path, f"{json.dumps(LINES[0])}\n{{'name'", "keys.jsonl"))
    (tmp_path / "latin.toml").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        KeyFile(tmp_path / "latin.toml")


# -- budgets ------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def use(clock: Clock) -> KeyBudgets:
    return KeyBudgets(EngineMetrics("m", 16, 10), clock)


def seconds_refused(use: KeyBudgets, key: ApiKey) -> int:
    with pytest.raises(ApiError) as refused:
        use.begin(key)
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    return int(refused.value.headers["Retry-After"])


def test_requests_refill_evenly() -> None:
    clock, key = Clock(), ApiKey("k", requests_per_minute=6)
    keys = use(clock)
    for _ in range(6):
        keys.begin(key)
    assert seconds_refused(keys, key) == 10
    clock.now += 9
    assert seconds_refused(keys, key) == 1
    clock.now += 1
    keys.begin(key)
    clock.now += 3600  # no more than a minute's requests are saved up
    for _ in range(6):
        keys.begin(key)
    assert seconds_refused(keys, key) == 10


def test_tokens_may_be_overdrawn_and_must_be_paid_back() -> None:
    clock, key = Clock(), ApiKey("k", tokens_per_minute=600)
    keys = use(clock)
    keys.begin(key)
    keys.take_tokens(key, 900, "prompt_tokens")
    assert keys.headers(key)["x-ratelimit-remaining-tokens"] == "0"
    assert seconds_refused(keys, key) == 31  # 301 tokens at 10 a second
    clock.now += 31
    keys.begin(key)
    keys.take_tokens(key, 100, "generation_tokens")
    assert seconds_refused(keys, key) == 10


def test_a_new_limit_is_a_new_budget_and_others_stay() -> None:
    clock = Clock()
    keys = use(clock)
    old, other = ApiKey("k", requests_per_minute=1), ApiKey("other", requests_per_minute=1)
    keys.begin(old)
    keys.begin(other)
    keys.begin(ApiKey("k", requests_per_minute=2))
    assert seconds_refused(keys, other) == 60


# -- the server ---------------------------------------------------------------------------------------------------

MakeServer = Callable[..., ScriptedServer]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path, FILE)


def ask(server: ScriptedServer, key: str | None, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json={"prompt": "hello", "max_tokens": 8, **fields}, headers=headers)


def test_names_in_metrics_and_keys_nowhere(
    make_server: MakeServer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = make_server(access=Access(key_file=KeyFile(path)))
    whole, stream = ask(server, TEAM), ask(server, TEAM, stream=True)
    assert [ask(server, key).status_code for key in (None, "sk-wrong-secret", DIGEST)] == [401] * 3
    prompt = whole.json()["usage"]["prompt_tokens"]
    metrics = httpx.get(f"{server.url}/metrics").text
    found = samples(server.engine.metrics)
    for name, count in (("requests", 2), ("prompt_tokens", 2 * prompt), ("generation_tokens", 16)):
        assert found[f"llmsched:api_key_{name}_total{{key_name=team}}"] == count
    assert found["llmsched:requests_refused_total{reason=invalid_api_key}"] == 3
    written = metrics + caplog.text + whole.text + stream.text + repr(server.engine.__dict__)
    assert not any(key in written for key in (TEAM, OPERATOR, DIGEST, "sk-wrong-secret"))


def test_used_up_budgets_are_refused_before_the_body_is_read(make_server: MakeServer, path: Path) -> None:
    server = make_server(access=Access(key_file=KeyFile(path)))
    first = ask(server, TEAM)
    used = first.json()["usage"]["prompt_tokens"]
    assert first.headers["x-ratelimit-limit-requests"] == "4"
    assert first.headers["x-ratelimit-remaining-requests"] == "3"
    assert first.headers["x-ratelimit-limit-tokens"] == "50"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(50 - used, abs=2)
    assert ask(server, TEAM, max_tokens=100).status_code == 200
    refused = ask(server, TEAM, stream=True)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "'team'" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 30
    assert float(refused.headers["x-ratelimit-reset-tokens"].removesuffix("s")) > 30
    assert ask(server, OPERATOR).status_code == 200
    assert samples(server.engine.metrics)["llmsched:api_key_rate_limited_total{key_name=team}"] == 1


def test_only_keys_with_admin_open_administrative_routes(make_server: MakeServer, path: Path) -> None:
    server = make_server(access=Access(key_file=KeyFile(path)))
    assert [ask(server, key, "/reset_prefix_cache").status_code for key in (None, TEAM, OPERATOR)] == [401, 401, 200]
    without = make_server(
        access=Access(key_file=KeyFile(write(path.parent, FILE.replace("admin = true", ""), "b.toml")))
    )
    assert [ask(without, key, "/reset_prefix_cache").status_code for key in (TEAM, OPERATOR)] == [403, 403]


def test_keys_of_flags_work_beside_the_file(make_server: MakeServer, path: Path) -> None:
    server = make_server(access=Access("single", key_file=KeyFile(path)))
    assert [ask(server, key).status_code for key in ("single", TEAM, "other")] == [200, 200, 401]


def test_a_file_is_read_again(make_server: MakeServer, path: Path) -> None:
    file = KeyFile(path)
    server = make_server(access=Access(key_file=file))
    assert ask(server, "sk-new-secret").status_code == 401
    path.write_text(FILE.replace(TEAM, "sk-new-secret"))
    file.reload()
    assert [ask(server, key).status_code for key in (TEAM, "sk-new-secret")] == [401, 200]
    path.write_text("broken")
    with pytest.raises(ConfigError):
        file.reload()
    assert ask(server, "sk-new-secret").status_code == 200
