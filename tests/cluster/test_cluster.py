"""Two replicas of a tiny model on a real Ray: clients, a replica that is killed, and the drain."""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI
from tiny_models import save_tiny_model

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
START_S = 300.0


class Cluster:
    """`llmsched serve --replicas 2` as a process."""

    def __init__(self, model: Path) -> None:
        command = [
            str(Path(sys.executable).with_name("llmsched")),
            "serve",
            str(model),
            "--replicas",
            "2",
            "--port",
            "0",
        ]
        settings = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "512", "--served-model-name", "tiny"]
        more = ["--kv-cache-memory-bytes", "64MiB", "--grace-period", "20s"]
        self.process = subprocess.Popen(
            [*command, *settings, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        threading.Thread(target=self._read, daemon=True).start()
        assert self._ready.wait(START_S), "".join(self.lines)
        assert self.url, "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"ready: (http://\S+)/v1", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def replica_processes(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "ServeReplica:llmsched:replica" in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = save_tiny_model(tmp_path_factory.mktemp("model"), "llama")
    started = Cluster(model)
    yield started
    if started.process.poll() is None:
        started.process.send_signal(signal.SIGKILL)


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


def test_both_replicas_serve_and_report_metrics(cluster: Cluster) -> None:
    def replica(index: int) -> str:
        body = {"prompt": [index] * 40, "max_tokens": 4}
        return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120).headers["x-llmsched-replica"]

    with ThreadPoolExecutor(8) as pool:
        served = Counter(pool.map(replica, range(24)))
    assert len(served) == 2
    text = httpx.get(f"{cluster.url}/metrics", timeout=60).text
    assert set(re.findall(r'num_requests_running\{[^}]*replica="(\w+)"', text)) == set(served)


def test_a_client_that_leaves_ends_its_request(cluster: Cluster, client: OpenAI) -> None:
    stream = chat(client, stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = httpx.get(f"{cluster.url}/metrics", timeout=60).text
        if not any(float(value) for value in re.findall(r"num_requests_running\{[^}]*\} (\S+)", text)):
            return
        time.sleep(0.2)
    pytest.fail("the request is still running")


def test_requests_without_a_token_survive_a_killed_replica(cluster: Cluster, client: OpenAI) -> None:
    victim, *_ = cluster.replica_processes()
    outcomes: Counter[str] = Counter()

    def one(index: int) -> None:
        try:
            chat(client, f"Hello {index}", max_tokens=60, extra_body={"ignore_eos": True})
            outcomes["answered"] += 1
        except Exception as error:
            outcomes[f"{type(error).__name__}: {error}"] += 1

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(one, index) for index in range(32)]
        time.sleep(0.5)
        victim.kill()
        for future in futures:
            future.result(timeout=120)
    assert outcomes == {"answered": 32}  # nothing of a whole answer is sent before its end


def test_sigterm_lets_running_requests_finish(cluster: Cluster, client: OpenAI) -> None:
    stream = chat(client, stream=True, max_tokens=200, extra_body={"ignore_eos": True})
    chunks = iter(stream)
    next(chunks)
    os.kill(cluster.process.pid, signal.SIGTERM)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length"
    assert cluster.process.wait(90) == 0, "".join(cluster.lines)
