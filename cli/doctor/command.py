from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from llmsched.cli import render
from llmsched.cli.bench.report.saved_report import read_report
from llmsched.cli.doctor.evidence import Evidence, live_evidence, saved_evidence
from llmsched.cli.doctor.rules import MIN_REQUESTS, RULES, Diagnosis, Finding, diagnose
from llmsched.cli.doctor.system_check import SystemFacts, system_facts, system_findings
from llmsched.cli.options.flags import duration_option
from llmsched.cli.quantities import server_url
from llmsched.cli.server_client import DEFAULT_URL, KeyOption, server_client
from llmsched.engine.errors import LlmschedError


def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="URL or FILE",
            show_default=DEFAULT_URL,
            help="http://HOST:PORT of a running server, or a run that `bench --save` or --save-detailed has written.",
        ),
    ] = None,
    watch: Annotated[
        float | None,
        duration_option(
            "Watch the server for this time and judge only what happens in it.", show_default="judge since its start"
        ),
    ] = None,
    system: Annotated[
        bool,
        typer.Option(
            "--system",
            help="Check this machine: driver, GPU, libraries, memory and the processes that hold it, open files, and "
            "whether kernels compile.",
        ),
    ] = False,
    api_key: KeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is wrong with a server, a saved run or this machine, and what to change.

    Each finding has the number behind it and the flags of `serve` to set. The server may be llmsched or another that
    has vLLM's metrics; rules whose figures it does not report are listed as not checked. The exit code is 1 if
    something is wrong, and 0 if nothing is.

    \b
    Examples:
      llmsched doctor
      llmsched doctor http://gpu-box:8000 --watch 1min
      llmsched bench demo --save run.json; llmsched doctor run.json
      llmsched doctor --system --json
    """
    document: dict[str, Any] = {}
    found: list[Finding] = []
    if target is not None or not system:
        evidence, replicas = _evidence(target or DEFAULT_URL, watch, api_key)
        diagnosis, of_replicas = diagnose(evidence), _of_replicas(replicas)
        found += [*diagnosis.findings, *(finding for one in of_replicas.values() for finding in one.findings)]
        document |= _as_json(evidence, diagnosis) | _replicas_json(replicas, of_replicas)
        if not as_json:
            _show(evidence, diagnosis, of_replicas)
    elif watch is not None:
        raise LlmschedError("--watch needs a running server; name its URL, or leave out --watch")
    if system:
        found += (problems := system_findings(facts := system_facts()))
        document |= {"system": system_json(facts), "system_findings": [finding._asdict() for finding in problems]}
        if not as_json:
            _show_system(facts, problems)
    if as_json:
        render.emit_json({"healthy": not found, **document})
    if found:
        raise typer.Exit(1)


def _evidence(target: str, watch: float | None, api_key: str | None) -> tuple[Evidence, list[Evidence]]:
    """Read the figures of a server and its replicas, or of a saved run. Raises LlmschedError if there are none."""
    url = server_url(target)
    replicas: list[Evidence] = []
    if url is not None:
        with server_client(url, api_key) as client:
            evidence, replicas = live_evidence(client, watch)
    elif watch is not None:
        raise LlmschedError(f"--watch: {target} is a saved run; only a running server can be watched")
    else:
        evidence = saved_evidence(read_report("", Path(target)), target)
    if not evidence.total:
        when = "while it was watched" if watch else "yet"
        raise LlmschedError(
            f"{evidence.source}: no request has ended {when}, so there is nothing to judge; send a load"
        )
    return evidence, replicas


def _of_replicas(replicas: Sequence[Evidence]) -> dict[str, Diagnosis]:
    return {evidence.source: diagnose(evidence) for evidence in replicas if evidence.total}


def _as_json(evidence: Evidence, diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "source": evidence.source,
        "measured": evidence.measured,
        "requests": evidence.total,
        "findings": [finding._asdict() for finding in diagnosis.findings],
        "not_checked": diagnosis.unchecked,
    }


def _replicas_json(replicas: Sequence[Evidence], diagnoses: Mapping[str, Diagnosis]) -> dict[str, Any]:
    if not replicas:
        return {}
    return {"replicas": [_as_json(each, diagnoses.get(each.source, Diagnosis([], []))) for each in replicas]}


def _show_replicas(whole: Diagnosis, diagnoses: Mapping[str, Diagnosis]) -> None:
    """Print what is wrong with single replicas, except for what is wrong with all of them together."""
    known = {finding.rule for finding in whole.findings}
    for source, diagnosis in diagnoses.items():
        if more := [finding for finding in diagnosis.findings if finding.rule not in known]:
            render.say(f"{source} alone:")
            _show_findings(more)


def _show(evidence: Evidence, diagnosis: Diagnosis, of_replicas: Mapping[str, Diagnosis]) -> None:
    origin = "MEASURED" if evidence.measured else "SIMULATED"
    render.say(f"{origin} {evidence.source}: {evidence.total} requests, {len(RULES)} rules")
    _show_findings(diagnosis.findings)
    _show_replicas(diagnosis, of_replicas)
    if not diagnosis.findings and not any(one.findings for one in of_replicas.values()):
        render.say("nothing is wrong")
    if diagnosis.unchecked:
        few = f"; shares need {MIN_REQUESTS} requests" if evidence.total < MIN_REQUESTS else ""
        render.note(f"not checked, for lack of figures: {', '.join(diagnosis.unchecked)}{few}")


def _show_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        render.say(f"{finding.rule}: {finding.problem}")
        render.say(f"  change  {finding.remedy}")


def system_json(facts: SystemFacts) -> dict[str, Any]:
    memory, driver = facts.memory, facts.driver
    return {
        "versions": facts.versions,
        "driver": None if driver is None else {"version": driver.version, "cuda": driver.cuda, "gpu": driver.name},
        "torch_cuda": facts.torch_cuda,
        "torch_sees_gpu": facts.torch_sees_gpu,
        "memory": {
            "device": memory.name,
            "total_bytes": memory.total,
            "free_bytes": memory.free,
            "holders": [{"pid": one.pid, "name": one.name, "bytes": one.used} for one in memory.holders],
        },
        "open_files": facts.open_files and {"soft": facts.open_files[0], "hard": facts.open_files[1]},
        "kernels": {"backend": facts.kernels, "error": facts.kernel_error},
    }


def _show_system(facts: SystemFacts, problems: Sequence[Finding]) -> None:
    memory, driver = facts.memory, facts.driver
    known = ", ".join(f"{name} {found or 'missing'}" for name, found in facts.versions.items())
    render.say(f"versions    {known}")
    if driver is None:
        render.say("driver      no NVIDIA driver or no visible GPU")
    else:
        render.say(f"driver      {driver.version}, supports CUDA {driver.cuda}; GPU {driver.name}")
    built = "without CUDA" if facts.torch_cuda is None else f"for CUDA {facts.torch_cuda}"
    render.say(f"torch       built {built}; sees {'a' if facts.torch_sees_gpu else 'no'} GPU")
    free, total = render.human_bytes(memory.free), render.human_bytes(memory.total)
    render.say(f"memory      {free} of {total} free on {memory.name}")
    for one in memory.holders:
        render.say(f"            {render.human_bytes(one.used)} held by {one.name} ({one.pid})")
    if facts.open_files is not None:
        soft, hard = ("no limit" if limit < 0 else str(limit) for limit in facts.open_files)
        render.say(f"open files  {soft}, hard limit {hard}")
    render.say(
        f"kernels     {facts.kernels}: {'compile and compute correctly' if facts.kernel_error is None else 'FAIL'}"
    )
    _show_findings(problems)
