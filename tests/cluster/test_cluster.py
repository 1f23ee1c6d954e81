"""Three replicas of a tiny model on a real Ray: clients, commands, a replica that is killed, an update, the drain."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI
from tiny_models import save_tiny_model

from llmsched.profiles.tuned import TunedProfile, save_profile

#: Fields of a request whose answer has max_tokens tokens.
WHOLE = {"ignore_eos": True}
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
START_S = 300.0


REPLICAS = 3
SETTINGS = [
    *("--replicas", str(REPLICAS), "--device", "cpu", "--dtype", "float32", "--max-model-len", "512"),
    *("--served-model-name", "tiny", "--kv-cache-memory-bytes", "64MiB", "--grace-period", "20s"),
]


#: Ray asks for no token, even if the user has one.
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "disabled"}


def command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("llmsched")), *arguments]


class Cluster:
    """`llmsched serve --replicas 3` as a process."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.process = subprocess.Popen(
            command("serve", model.name, "--port", "0", *SETTINGS),
            cwd=model.parent,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.url = self.dashboard = ""
        threading.Thread(target=self._read, daemon=True).start()
        assert self._ready.wait(START_S), "".join(self.lines)
        assert self.url, "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"ready: (http://\S+)/v1", line):
                self.url = found[1]
            if found := re.search(r"dashboard: (http://\S+)", line):
                self.dashboard = found[1]
                self._ready.set()
        self._ready.set()

    def replica_names(self) -> set[str]:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return set(re.findall(r'num_requests_running\{[^}]*replica="(\w+)"', text))

    def json(self, *arguments: str) -> Any:
        """Return the JSON that a command of llmsched prints about the cluster."""
        done = subprocess.run(command(*arguments, "--json"), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode in (0, 1), done.stderr  # doctor: 1 if something is wrong
        return json.loads(done.stdout)

    def replica_processes(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "ServeReplica:llmsched:replica" in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_tiny_model(tmp_path_factory.mktemp("model"), "llama")
    started = Cluster(model)
    yield started
    if started.process.poll() is None:
        started.process.kill()


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120)


def chat(client: OpenAI, text: str = "Hello", **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="tiny", messages=messages, seed=1, **{"max_tokens": 8, **fields})


def test_answers_are_those_of_one_engine(client: OpenAI) -> None:
    whole = chat(client).choices[0].message.content
    chunks = [chunk.choices[0].delta.content or "" for chunk in chat(client, stream=True)]
    assert "".join(chunks) == whole
    assert chat(client).choices[0].message.content == whole


def test_errors_of_replicas_reach_the_client(cluster: Cluster) -> None:
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json={"messages": MESSAGES, "unknown": 1}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "unknown"
    assert httpx.get(f"{cluster.url}/v1/models", timeout=60).json()["data"][0]["id"] == "tiny"
    assert httpx.get(f"{cluster.url}/nowhere", timeout=60).status_code == 404


def test_all_replicas_serve_and_each_is_shown(cluster: Cluster) -> None:
    def replica(index: int) -> str:
        body = {"prompt": [index] * 40, "max_tokens": 4}
        return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120).headers["x-llmsched-replica"]

    with ThreadPoolExecutor(8) as pool:
        served = Counter(pool.map(replica, range(24)))
    assert len(served) == REPLICAS
    assert cluster.replica_names() == set(served)
    assert all(any(name in line for line in cluster.lines) for name in served)
    figures = cluster.json("top", cluster.url)
    assert (figures["status"], set(figures["replicas"])) == ("ok", set(served))
    assert figures["requests"]["max_running"] == sum(
        each["requests"]["max_running"] for each in figures["replicas"].values()
    )
    assert {each["replica"] for each in figures["slowest_requests"]} <= set(served)
    judged = cluster.json("doctor", cluster.url)
    assert judged["requests"] == sum(each["requests"] for each in judged["replicas"])


def test_a_prompt_goes_where_it_is_cached_and_explain_says_so(cluster: Cluster, client: OpenAI) -> None:
    prompt = list(range(100, 130)) * 10
    first = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    time.sleep(2.5)  # until the replicas have published their caches
    second = client.completions.create(model="tiny", prompt=[*prompt, 7], max_tokens=1)
    shown = [cluster.json("explain", each.id, "--url", cluster.url) for each in (first, second)]
    assert shown[0]["replica"] == shown[1]["replica"]
    entry = shown[1]["choices"][0]["entries"][0]
    assert (entry["what"], entry["details"]["reason"]) == ("routed", "cached prefix")
    cached = {each["replica"]: each["cached_tokens"] for each in entry["details"]["candidates"]}
    assert len(cached) == REPLICAS
    assert [name for name, tokens in cached.items() if tokens] == [shown[1]["replica"]]
    assert httpx.get(f"{cluster.url}/v1/requests/unknown/explain", timeout=60).status_code == 404


def test_bench_counts_the_requests_of_each_replica(cluster: Cluster) -> None:
    load = (
        "--num-prompts",
        "12",
        "--max-concurrency",
        "4",
        "--input-len",
        "16",
        "--output-len",
        "4",
        "--endpoint",
        "chat",
    )
    report = cluster.json("bench", cluster.url, *load)
    assert report["completed"] == 12
    assert sum(report["engine_counts"]["replicas"].values()) == 12


def test_a_deadline_that_no_replica_can_meet_is_refused(cluster: Cluster) -> None:
    answer = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": "hello", "timeout": 1e-6}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "deadline_too_early")
    assert int(answer.headers["retry-after"]) >= 1


def test_a_client_that_leaves_ends_its_request(cluster: Cluster, client: OpenAI) -> None:
    stream = chat(client, stream=True, max_tokens=400, extra_body=WHOLE)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = httpx.get(f"{cluster.url}/metrics", timeout=60).text
        if not any(float(value) for value in re.findall(r"num_requests_running\{[^}]*\} (\S+)", text)):
            return
        time.sleep(0.2)
    pytest.fail("the request is still running")


@contextmanager
def load(client: OpenAI, streams: int) -> Iterator[Counter[str]]:
    """Send requests, half of them streams, while the block runs. Yield counts of how they end."""
    outcomes: Counter[str] = Counter()

    def one(index: int) -> None:
        for number in count():
            if over.is_set():
                return
            try:
                answer = chat(client, f"{index} {number}", max_tokens=40, stream=index % 2 == 0, extra_body=WHOLE)
                if index % 2 == 0:
                    assert [chunk.choices[0].finish_reason for chunk in answer][-1] == "length"
                outcomes["answered"] += 1
            except Exception as error:
                outcomes[getattr(error, "code", None) or f"{type(error).__name__}: {error}"] += 1

    over = threading.Event()
    with ThreadPoolExecutor(streams) as pool:
        for index in range(streams):
            pool.submit(one, index)
        try:
            yield outcomes
        finally:
            over.set()


def test_a_killed_replica_loses_only_streams_that_had_begun(cluster: Cluster, client: OpenAI) -> None:
    victim, *_ = cluster.replica_processes()
    before = cluster.replica_names()
    with load(client, 8) as outcomes:
        time.sleep(1)
        victim.kill()
        deadline = time.monotonic() + START_S
        while len(now := cluster.replica_names()) < REPLICAS or now == before:
            assert time.monotonic() < deadline, "the replica is not replaced"
            time.sleep(0.5)
    lost = outcomes.pop("replica_lost", 0)
    assert lost <= 4  # nothing of a whole answer is sent before its end
    assert outcomes.keys() == {"answered"}


def test_an_update_to_another_profile_fails_no_request(cluster: Cluster, client: OpenAI, tmp_path: Path) -> None:
    profile, config = tmp_path / "quick.toml", tmp_path / "serve.yaml"
    save_profile(TunedProfile(engine={"max_num_seqs": 7}), str(profile))
    settings = [*SETTINGS, "--port", cluster.url.rpartition(":")[2], "--profile", str(profile)]
    emit = command("serve", str(cluster.model), *settings, "--emit", "serve-config")
    config.write_text(subprocess.check_output(emit, text=True))
    before = cluster.replica_names()
    with load(client, 4) as outcomes:
        deploy = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()", "deploy", "-a", cluster.dashboard]
        subprocess.run([*deploy, str(config)], check=True, timeout=120, env=ENVIRONMENT)
        deadline = time.monotonic() + START_S
        while len(now := cluster.replica_names()) < REPLICAS or now & before:
            assert time.monotonic() < deadline, "".join(cluster.lines)
            time.sleep(0.5)
    assert outcomes.keys() == {"answered"}
    limits = {each["requests"]["max_running"] for each in cluster.json("top", cluster.url)["replicas"].values()}
    assert limits == {7}


def test_sigterm_lets_running_requests_finish(cluster: Cluster, client: OpenAI) -> None:
    stream = chat(client, stream=True, max_tokens=200, extra_body=WHOLE)
    chunks = iter(stream)
    next(chunks)
    os.kill(cluster.process.pid, signal.SIGTERM)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length"
    children = psutil.Process(cluster.process.pid).children(recursive=True)
    assert cluster.process.wait(90) == 0, "".join(cluster.lines)
    psutil.wait_procs(children, timeout=20)
    assert not [child for child in children if child.is_running()], "processes of Ray are left"
