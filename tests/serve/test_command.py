"""Tests of the `llmsched serve` command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_line import CommandLine

from llmsched.cli.profiles.apply import profile_settings
from llmsched.cli.serve import banner
from llmsched.cli.serve.lifecycle import listen
from llmsched.engine.errors import ConfigError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


@contextmanager
def serving(
    *arguments: str, stderr: int | None = None, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """Start the command in a process; once it is ready, yield the process, its URL and its output so far."""
    child = subprocess.Popen(
        [sys.executable, "-c", "from llmsched.cli.main import main; main()", "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**os.environ, **environment},
        text=True,
    )
    try:
        printed: list[str] = []
        for line in child.stdout:
            printed.append(line)
            if line.startswith("ready: "):
                yield child, line.split()[1].removesuffix("/v1"), printed
                return
        pytest.fail(f"ended with {child.wait()} before it was ready: {printed}")
    finally:
        child.kill()
        child.wait()


def test_from_start_to_end(tiny_model: Any, tmp_path: Path) -> None:
    folder = str(tiny_model("llama"))
    profile = tmp_path / "found.toml"
    profile.write_text("[engine]\nmax_num_batched_tokens = 48\nmax_num_seqs = 3\n")
    options = ("--dtype", "float32", "--num-gpu-blocks-override", "40", "--served-model-name", "tiny")
    options += ("--profile", str(profile), "--max-num-seqs", "5", "--metrics-prefix", "vllm")
    for name in ("one", "two"):
        (tmp_path / name).write_text(name * 20)
        options += ("--pin-prefix", str(tmp_path / name))
    options += ("--max-model-len", "512", "--swap-space", "1MiB", "--preemption-mode", "swap")
    with serving(
        folder, *options, LLMSCHED_API_KEY="k\n", LLMSCHED_ADMIN_API_KEY="a", LLMSCHED_PROFILES=str(tmp_path)
    ) as (child, url, printed):
        told = "".join(printed)
        for part in (
            "float32 on cpu, fused layers",
            "40 blocks of 16 tokens, 640 tokens",
            "served as tiny",
            "512 tokens, prompt",
        ):
            assert part in told
        assert "swap, 1.00 MiB of host memory for 85 blocks" in told
        assert "at most 48 tokens (max_num_batched_tokens)" in told  # the profile's
        assert "at most 5 requests (max_num_seqs)" in told  # the flag goes before the profile
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
        headers = {"Authorization": "Bearer k"}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert httpx.get(f"{url}/v1/prefixes").status_code == 401
        assert httpx.get(f"{url}/v1/prefixes", headers=headers).status_code == 401
        headers = {"Authorization": "Bearer a"}
        assert len(httpx.get(f"{url}/v1/prefixes", headers=headers).json()["data"]) == 2
        assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"}' in httpx.get(f"{url}/metrics").text
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0


def test_a_log_of_json_lines(tiny_model: Any, tmp_path: Path) -> None:
    """Every line on stderr is JSON: notes of the start, requests, the answer to SIGHUP, and the end."""
    keys, log = tmp_path / "keys.jsonl", tmp_path / "log"
    keys.write_text('{"name": "team", "key": "sk-team-secret"}')
    options = ("--dtype", "float32", "--max-model-len", "512", "--num-gpu-blocks-override", "40")
    options += ("--log-format", "json", "--api-keys", str(keys), "--host", "0.0.0.0", "--pin-prefix", str(keys))
    with log.open("w") as stderr, serving(str(tiny_model("llama")), *options, stderr=stderr) as (child, url, _):
        headers = {"Authorization": "Bearer sk-team-secret", "X-Request-Id": "mine"}
        body = {"prompt": [5, 6, 7], "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30).json()
        keys.write_text("broken")
        child.send_signal(signal.SIGHUP)
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30).status_code == 200
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(line.keys() >= {"time", "level"} for line in lines)
    told = [line.get("message", "") for line in lines]
    for part in ("are pinned as", "the API keys stay as they are: --api-keys", "draining"):
        assert any(part in message for message in told), part
    first, second = (line for line in lines if line.get("event") == "request")
    assert (first["request_id"], first["id"], first["key"]) == ("mine", answer["id"], "team")
    assert (first["prompt_tokens"], first["output_tokens"], first["finish_reason"]) == (3, 5, "length")
    assert 0 < first["ttft_ms"] <= first["e2e_ms"]
    assert second["itl_p99_ms"] > 0
    assert "secret" not in log.read_text()


@pytest.mark.parametrize("broken", ["closed by its reader", "full"])
def test_output_that_cannot_be_written_hinders_nothing(tiny_model: Any, broken: str) -> None:
    """A stream that is open at SIGTERM ends whole, and the exit code is 0."""
    reading, writing = os.pipe()
    if broken == "full":
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(65536))
        os.set_blocking(writing, True)
    else:
        os.close(reading)
    options = ("--dtype", "float32", "--max-model-len", "512", "--num-gpu-blocks-override", "40")
    with serving(str(tiny_model("llama")), *options, stderr=writing) as (child, url, _):
        child.stdout.close()
        body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as answer:
            events = (line for line in answer.iter_lines() if line)
            next(events)
            child.send_signal(signal.SIGTERM)
            assert [*events][-1] == "data: [DONE]"
        assert child.wait(20) == 0
    os.close(writing)
    if broken == "full":
        os.close(reading)


def test_a_port_in_use_ends_with_one_line_before_anything_is_loaded(command: CommandLine) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        error = command.refused("serve", "/no/such/model", "--port", str(other.getsockname()[1]))
    assert "address already in use; choose another --port" in error


def test_a_full_stdout_ends_with_one_line_before_anything_is_loaded(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", "from llmsched.cli.main import main; main()", "serve", str(tmp_path), "--port", "0"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "No space left on device" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--api-key", ""), "--api-key: is empty"),
        (("--api-key", "a\nb"), "--api-key: has a character that cannot be sent in a header"),
        (("--admin-api-key", " "), "--admin-api-key: is empty"),
        (("--max-connections", "1000000000"), "--max-connections: 1000000000 connections need"),
        (("--header-timeout", "0s"), "--header-timeout: 0 is out of range"),
        (("--max-body-size", "8"), "needs a unit"),
        (("--cors-origins", "https://a.example/"), "--cors-origins: 'https://a.example/' is not an origin"),
        (("--metrics-prefix", "a-b"), "'a-b' is not a metric prefix"),
        (("--profile", "no-such-profile"), "no-such-profile"),
        (("--grace-period", "30"), "'30' needs a unit"),
        (("--port", "70000"), "65535"),
        (("--preemption-mode", "swap"), "swap needs host memory; set --swap-space"),
        (("--pin-prefix", "/no/such/file"), "--pin-prefix: /no/such/file: no such file"),
        (("--pin-prefix", "x", "--no-enable-prefix-caching"), "nothing can be pinned with --enable-prefix-caching off"),
        (("--max-num-seqs", "0"), "max-num-seqs"),
        (("/no/such/model", "--port", "0"), "/no/such/model"),
    ],
)
def test_wrong_options_end_with_one_line(
    command: CommandLine, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("LLMSCHED_MODEL", "/no/such/model")
    assert message in command.refused("serve", *arguments)


def test_help_states_durations_as_flags_take_them(command: CommandLine) -> None:
    out = command("serve", "--help").out
    assert all(f"[default: {default}]" in out for default in ("30s", "300s", "75s"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("max_num_seqs = '12'", "max_num_seqs to '12'"),
        ("max_num_seqs = true", "max_num_seqs to True"),
        ("colour = 1", "'colour', which is not an engine setting"),
        ("model = 'other'", "'model', which is not an engine setting"),
    ],
)
def test_a_profile_with_a_wrong_setting(tmp_path: Path, settings: str, message: str) -> None:
    path = tmp_path / "p.toml"
    path.write_text(f"[engine]\n{settings}\n")
    with pytest.raises(ConfigError, match="profile") as caught:
        profile_settings(str(path))
    assert message in str(caught.value)


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")])
def test_url(make_server: Any, capsys: pytest.CaptureFixture[str], host: str, shown: str) -> None:
    with listen(host, 0)[0] as listener:
        banner.show_start(make_server().engine, "scripted", listener, has_key=True)
        url = f"{shown}{listener.getsockname()[1]}"
        out = capsys.readouterr().out
    assert f"ready: {url}/v1 (page: {url}, health: {url}/health, metrics: {url}/metrics)\n" in out
    assert f"llmsched chat {url} --api-key KEY\n" in out
    assert (
        f"curl {url}/v1/chat/completions -H 'Authorization: Bearer KEY' -H 'Content-Type: application/json' -d '{{"
        in out
    )


def test_defaults_of_the_model_that_are_not_supported_are_told(
    make_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = make_server().engine
    engine.model = replace(engine.model, ignored_defaults=["num_beams", "max_length"])
    with listen("127.0.0.1", 0)[0] as listener:
        banner.show_start(engine, "scripted", listener, has_key=True)
    assert "does not support: num_beams, max_length" in capsys.readouterr().err


def test_the_profile_is_told(make_server: Any) -> None:
    engine = make_server().engine
    assert dict(banner.start_rows(engine, "scripted", "night.toml"))["profile"] == "night.toml"
    assert "profile" not in dict(banner.start_rows(engine, "scripted"))


def test_defaults_of_the_model_are_told(make_server: Any) -> None:
    server = make_server(sampling_defaults={"temperature": 0.6, "top_k": 64})
    rows = dict(banner.start_rows(server.engine, "scripted"))
    assert rows["sampling"] == "temperature 0.6, top_k 64 unless the request says otherwise"


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"max_num_seqs": 5}, "at most 5 requests (max_num_seqs); up to 9 more may wait (max_queue_size)"),
        (
            {"max_num_seqs": 500, "max_num_batched_tokens": 4},
            "at most 4 requests (max_num_batched_tokens); up to 9 more may wait (max_queue_size)",
        ),
        (
            {"scheduling_policy": "serial"},
            "at most 1 requests (scheduling_policy serial); up to 9 more may wait (max_queue_size)",
        ),
    ],
)
def test_what_limits_how_many_run_is_told(make_server: Any, knobs: dict[str, Any], told: str) -> None:
    server = make_server(max_queue_size=9, **knobs)
    assert dict(banner.start_rows(server.engine, "scripted"))["running"] == told
