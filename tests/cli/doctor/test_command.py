"""`llmsched doctor` from the command line: saved runs, a live server, this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from command_line import CommandLine
from configs import CONFIGS
from scripted import ScriptedServer

from llmsched.cli.doctor.evidence import of_metrics
from llmsched.cli.doctor.rules import diagnose
from llmsched.cli.doctor.system_check import SystemFacts, system_findings
from llmsched.cli.figures.engine_counts import ChangingToken
from llmsched.cli.serve.access import Access
from llmsched.cli.targets.server_metrics import LabelledValue, ServerMetrics
from llmsched.engine.device import DeviceMemory, GpuDriver, Holder
from llmsched.engine.metrics import EngineMetrics
from llmsched.engine.request import FinishReason

MODEL = str(CONFIGS / "meta-llama--Meta-Llama-3.1-8B_config.json")
BENCH = ("bench", MODEL, "--simulate", "h100", "--request-rate", "10", "--input-len", "300", "--output-len", "40")


def test_saved_runs(command: CommandLine, tmp_path: Path) -> None:
    """A healthy run gives exit code 0, a sick one 1; both kinds of files are read."""
    well, sick, detailed = (str(tmp_path / name) for name in ("well.json", "sick.json", "sick.jsonl"))
    command(*BENCH, "--save", well)
    command(*BENCH, "--max-num-seqs", "2", "--save", sick, "--save-detailed", detailed)
    outcome = command("doctor", well)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [f"SIMULATED {well}: 100 requests, 16 rules", "nothing is wrong"]
    for file in (sick, detailed):
        outcome = command("doctor", file, "--json")
        assert outcome.code == 1
        answer = outcome.json
        assert (answer["healthy"], answer["measured"], answer["requests"]) == (False, False, 100)
        assert [finding["rule"] for finding in answer["findings"]] == ["idle KV memory"]
        assert answer["findings"][0]["flags"] == ["--max-num-seqs"]
        assert answer["not_checked"] == []
    assert "  change  raise --max-num-seqs, which is 2" in command("doctor", sick).out


def test_bad_usage_is_one_line(command: CommandLine, tmp_path: Path) -> None:
    file = tmp_path / "text.json"
    file.write_text("[1]")
    assert "lacks the figures of a run" in command.refused("doctor", str(file))
    assert "No such file" in command.refused("doctor", str(tmp_path / "none.json"))
    assert "only a running server can be watched" in command.refused("doctor", str(file), "--watch", "1s")
    assert "--watch needs a running server" in command.refused("doctor", "--system", "--watch", "1s")
    assert "no valid answer" in command.refused("doctor", "http://127.0.0.1:9")
    file.write_text('{"workload": {}, "ttft_ms": {}, "completed": 3}')
    assert "the report is damaged" in command.refused("doctor", str(file))


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer(access=Access("k")).start()
    yield server
    server.close()


@pytest.mark.usefixtures("client_key")
def test_a_live_server(command: CommandLine, server: ScriptedServer) -> None:
    assert "no request has ended yet" in command.refused("doctor", server.url)
    headers = {"Authorization": "Bearer k"}
    for number in range(3):
        body = {"prompt": f"a b c {number}", "max_tokens": 4}
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
    outcome = command("doctor", server.url, "--json")
    assert (outcome.code, outcome.json["findings"], outcome.json["requests"]) == (0, [], 3)
    assert "preemptions" in outcome.json["not_checked"]  # too few requests
    assert "late compilations" not in outcome.json["not_checked"]
    assert "while it was watched" in command.refused("doctor", server.url, "--watch", "10ms")


def metrics(prefix: str = "llmsched", bad: bool = False, changing: float = 0.0) -> ServerMetrics:
    """Return the metrics of a server that has served 100 requests and, if `bad`, 100 more with preemptions.

    `changing` is the share of requests whose prompts change at one token.
    """
    made = EngineMetrics("m", 16, 1000, prefix)
    for count in range(200 if bad else 100):
        made.observe("time_to_first_token_seconds", 0.08 if count < 100 else 3.0)
        made.observe("inter_token_latency_seconds", 0.009)
        made.observe("request_prompt_tokens", 300)
        made.observe("request_generation_tokens", 40)
        made.finished(FinishReason.LENGTH)
    made.add("num_preemptions", 12 if bad else 0)
    made.waited("slot", 250.0 if bad else 0.0)
    made.add("prefix_cache_queries", 1000)
    made.add("prefix_cache_hits", 250)
    made.set("max_running_requests", 8)
    made.set("num_requests_running", 8)
    made.set("kv_cache_usage_perc", 0.1)
    made.set("prefix_cache_changing_prompts", changing)
    read = ServerMetrics.of(made.render().decode(), every=True)
    assert read is not None
    return read


def test_the_figures_of_metrics() -> None:
    state = metrics().sample(0.0)
    assert state is not None
    cache = {"prompt_change": {"position": 7, "count": 40, "window": 50, "examples": None}}
    found = of_metrics(metrics(bad=True), [state, state._replace(running=0)], "u", cache, {"max_model_len": 4096})
    assert (found.finished, found.failures, found.total) == (200, {}, 200)
    assert found.ttft_mean == pytest.approx(1.54)
    assert found.itl_p50 == pytest.approx(0.0075, abs=0.003)
    assert (found.kv_share, found.kv_tokens, found.max_running, found.running) == (0.1, 16000, 8, 8)
    assert (found.hit_rate, found.preemption_rate, found.mean_wait("slot")) == (0.25, 0.06, 1.25)
    assert (found.max_model_len, found.counts.prompt_change) == (4096, ChangingToken(7, 40, 50))
    assert found.request_tokens_p99 == pytest.approx(512 + 64, rel=0.05)


def test_prompts_that_change_are_found_without_an_administrative_key() -> None:
    assert diagnose(of_metrics(metrics(), [], "u")).findings == []
    (finding,) = diagnose(of_metrics(metrics(changing=0.9), [], "u")).findings
    assert finding.rule == "prompts change"
    assert "90% of the latest prompts change at one early token" in finding.problem
    assert diagnose(of_metrics(metrics(changing=0.9), [], "u", {"prompt_change": None})).findings == []


def test_deadlines_that_passed_are_no_success() -> None:
    ended = [LabelledValue({"finished_reason": reason}, count) for reason, count in (("stop", 90), ("deadline", 10))]
    evidence = of_metrics(ServerMetrics({"request_success_total": ended}), [], "u")
    assert (evidence.finished, evidence.failures) == (90, {"deadline": 10})
    (finding,) = diagnose(evidence).findings
    assert finding.problem == "clients gave up 10% of 100 requests before they ended, 10 of them by their deadline"


def test_a_watched_server_is_judged_by_what_was_counted_meanwhile() -> None:
    found = of_metrics(metrics(bad=True).since(metrics()), [], "u")
    assert (found.finished, found.counts.preemptions) == (100, 12)
    assert found.ttft_mean == pytest.approx(3.0)


def test_a_server_of_another_kind_reports_less() -> None:
    text = "vllm:num_requests_running 3\nvllm:num_requests_waiting 2\n"
    text += 'vllm:request_success_total{finished_reason="stop"} 9\n'
    text += "".join(
        f'vllm:requests_refused_total{{reason="{reason}"}} {count}\n'
        for reason, count in (("queue_full", 2), ("invalid_request", 5), ("deadline_too_early", 0))
    )
    other = ServerMetrics.of(text, every=True)
    assert other is not None
    found = of_metrics(other, [], "u")
    assert (found.failures, found.examples) == ({"refused": 2}, {"refused": "queue_full 2"})
    assert (found.finished, found.ttft_mean, found.counts.waited, found.mean_wait("slot")) == (9, None, None, None)


GIB = 1 << 30
GOOD = SystemFacts(
    versions={"python": "3.12.1", "torch": "2.10.0", "triton": "3.6.0"},
    driver=GpuDriver("NVIDIA L4", "570.1", "12.8"),
    torch_cuda="12.8",
    torch_sees_gpu=True,
    memory=DeviceMemory("cuda", "NVIDIA L4", 24 * GIB, GIB, (Holder(7, "Xorg", GIB),)),
    open_files=(1024, 1048576),
    kernels="triton",
    kernel_error=None,
)
HELD = DeviceMemory("cuda", "NVIDIA L4", 24 * GIB, 9 * GIB, (Holder(42, "python", 9 * GIB),))


@pytest.mark.parametrize(
    ("changes", "name", "told"),
    [
        ({"torch_sees_gpu": False, "torch_cuda": None}, "torch without CUDA", "built without CUDA"),
        ({"torch_sees_gpu": False, "torch_cuda": "13.0"}, "torch sees no GPU", "driver 570.1 supports CUDA 12.8"),
        ({"versions": {**GOOD.versions, "triton": None}}, "no triton", "kernels need triton"),
        ({"kernel_error": "gcc: not found"}, "kernels fail", "gcc: not found"),
        ({"memory": HELD}, "memory held by others", "9.00 GiB of the GPU's 24.0 GiB: python (42) 9.00 GiB"),
        ({"open_files": (256, 512)}, "few open files", "may open 512 files"),
    ],
)
def test_each_fault_of_a_machine_is_found(changes: dict[str, object], name: str, told: str) -> None:
    assert system_findings(GOOD) == []
    (finding,) = system_findings(GOOD._replace(**changes))  # type: ignore[arg-type]
    assert finding.rule == name
    assert told in finding.problem
    assert finding.remedy


def test_this_machine(command: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = command("doctor", "--system", "--json")
    system = outcome.json["system"]
    assert system["versions"]["torch"]
    assert system["memory"]["total_bytes"] > system["memory"]["free_bytes"] > 0
    assert system["kernels"]["error"] is None
    assert outcome.code == bool(outcome.json["system_findings"])

    def fails(device: str) -> str:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr("llmsched.kernels.self_test.kernel_fault", fails)
    outcome = command("doctor", "--system")
    assert outcome.code == 1
    assert "kernels fail: a" in outcome.out
    assert "kernel fails on this machine: no compiler here" in outcome.out
