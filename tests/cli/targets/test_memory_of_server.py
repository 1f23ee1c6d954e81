"""An llmsched server reports the same memory figures and counts over HTTP as an engine in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from scripted import LiveServer

from llmsched.cli.bench.report.run_charts import memory_over_time
from llmsched.cli.figures.experiment import Experiment
from llmsched.cli.figures.measure import Measurement
from llmsched.cli.figures.registry import as_json
from llmsched.cli.load.synthetic_load import SyntheticLoad
from llmsched.cli.targets.engine_target import EngineTarget, running
from llmsched.cli.targets.http_target import HttpOptions, HttpTarget
from llmsched.cli.targets.interface import Target
from llmsched.cli.targets.load_run import run_workload
from llmsched.engine.build import build_engine, engine_beside
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.goodput import Slo
from llmsched.engine.progress import silent
from llmsched.engine.provenance import Provenance
from llmsched.engine.scheduler.ledger import WAITS

#: Load that lasts several times as long as the server keeps its figures of KV memory before it updates them.
WORK = SyntheticLoad(num_prompts=30, input_len=40, output_len=60, max_concurrency=3)


@pytest.fixture(scope="module")
def engine(tiny_model: Any) -> Engine:
    config = EngineConfig(model=str(tiny_model("llama")), dtype="float32", device="cpu", num_gpu_blocks_override=48)
    return build_engine(config)


@pytest.fixture
def server(engine: Engine) -> Iterator[LiveServer]:
    server = LiveServer(engine_beside(engine), name="tiny").start()
    yield server
    server.close()


async def loaded(target: Target) -> Measurement:
    target.sample_interval = 0.02
    return await run_workload(target, WORK, Slo(), ids=range(3, 100), timeout=60.0, progress=silent)


def test_server_and_engine_report_the_same_memory(server: LiveServer, engine: Engine) -> None:
    async def over_http() -> Measurement:
        target = HttpTarget(HttpOptions(server.url))
        await target.connect()
        try:
            assert target.sample_interval < 1.0
            return await loaded(target)
        finally:
            await target.close()

    async def in_process() -> Measurement:
        async with running(engine_beside(engine)) as service:
            return await loaded(EngineTarget(service))

    runs = [asyncio.run(over_http()), asyncio.run(in_process())]
    assert [run.requests.completed for run in runs] == [30, 30]
    assert runs[0].run.memory == runs[1].run.memory == engine.plan.parts
    for counts in (run.run.counts for run in runs):
        misses = {kind: count for kind, count in (counts.prefix_misses or {}).items() if kind != "hit"}
        assert (sum(misses.values()), counts.preemptions, counts.late_compilations) == (30, 0, 0)
        assert counts.waited is not None
        assert counts.waited.keys() == WAITS.keys()
    names = [[series.name for series in memory_over_time(run.samples, run.run.memory).series] for run in runs]
    assert names[0] == names[1]
    assert {"weights", "KV used", "KV reserved, still empty", "KV cached"} <= set(names[0])
    reports = [as_json(Experiment("m", Provenance("u"), WORK, Slo()), run) for run in runs]
    assert reports[0]["memory"].keys() == reports[1]["memory"].keys()
    for report in reports:
        # Three requests of 100 tokens take 7 blocks each, of 48.
        assert 0 < report["peak_kv_share"] <= 21 / 48
        assert report["peak_kv_bytes"] == round(report["peak_kv_share"] * engine.plan.parts.kv)
        assert 0 <= report["kv_waste"] < 1
    assert reports[0]["memory"]["steps"] is None
    assert reports[1]["memory"]["steps"] >= 600, "ten rounds of three requests at a time, a step a token"
    assert reports[1]["peak_kv_share"] == 21 / 48, "no step in process is missed"


def test_reported_kv_memory_is_consistent(server: LiveServer) -> None:
    """In every sample the empty share is at most the held share, and no share exceeds 1."""

    async def main() -> Measurement:
        target = HttpTarget(HttpOptions(server.url))
        await target.connect()
        try:
            figures = await loaded(target)
            state = await target.state()
            assert (state.kv_held, state.kv_empty) == (0.0, 0.0)
            assert (state.kv_cached or 0) > 0
            return figures
        finally:
            await target.close()

    samples = asyncio.run(main()).samples
    assert samples
    for sample in samples:
        assert 0 <= sample.kv_empty <= sample.kv_held
        assert sample.kv_held + sample.kv_cached <= 1 + 1e-9
