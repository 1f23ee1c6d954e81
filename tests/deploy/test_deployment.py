"""Files in deploy/: the flags that they pass exist, their probes reach real routes, and stopping gets enough time."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import typer
import yaml
from scripted import ScriptedServer

from llmsched.cli.main import load
from llmsched.cli.serve.command import ServerFlags
from llmsched.cli.serve.lifecycle import EXIT_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
LEAST_STOP_S = ServerFlags().grace_period + EXIT_S
PORT = ServerFlags().port


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile and their arguments."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in text.splitlines() if line.strip()]


def of_dockerfile(instruction: str) -> str:
    (argument,) = (argument for name, argument in instructions() if name == instruction)
    return argument


def of_dockerfile_all(instruction: str) -> list[str]:
    """Return the words of all instructions of this kind."""
    return [word for name, argument in instructions() if name == instruction for word in argument.split()]


def unit() -> ConfigParser:
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "llmsched.service")
    return parser


COMPOSE = documents("compose.yml")[0]["services"]["llmsched"]
KUBERNETES = {document["kind"]: document for document in documents("kubernetes.yml")}
POD = KUBERNETES["Deployment"]["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
PROBES = {name: CONTAINER[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
COMMANDS = {
    "Dockerfile": json.loads(of_dockerfile("ENTRYPOINT"))[1:] + json.loads(of_dockerfile("CMD")),
    "compose": ["serve", *COMPOSE["command"]],
    "kubernetes": ["serve", *CONTAINER["args"]],
    "systemd": shlex.split(unit()["Service"]["ExecStart"])[1:],
}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer(max_queue_size=1, max_num_seqs=1).start()
    yield server
    server.close()


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS.keys())
def test_flags_exist_and_take_these_values(command: list[str]) -> None:
    name, *arguments = command
    context = load(name).make_context(name, list(arguments))
    assert context.params["port"] == PORT
    assert context.params["log_format"] == "json"
    assert not context.args


def test_a_flag_that_does_not_exist_is_noticed() -> None:
    with pytest.raises(typer.TyperException, match="No such option"):
        load("serve").make_context("serve", ["demo", "--no-such-flag"])


@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES.keys())
def test_probes_reach_routes(probe: dict[str, Any], server: ScriptedServer) -> None:
    assert httpx.get(server.url + probe["httpGet"]["path"]).status_code == 200
    (port,) = CONTAINER["ports"]
    assert (port["name"], port["containerPort"]) == (probe["httpGet"]["port"], PORT)
    assert probe["timeoutSeconds"] <= probe["periodSeconds"]


def test_only_readiness_fails_while_the_queue_is_full(server: ScriptedServer) -> None:
    def answers() -> dict[str, int]:
        return {name: httpx.get(server.url + PROBES[name]["httpGet"]["path"]).status_code for name in PROBES}

    server.script.gate.clear()
    try:
        body = {"prompt": "hello", "max_tokens": 4, "stream": True}
        with (
            httpx.stream("POST", f"{server.url}/v1/completions", json=body),
            httpx.stream("POST", f"{server.url}/v1/completions", json=body) as last,
        ):
            while answers()["readiness"] == 200:
                pass
            assert answers() == {"startup": 200, "liveness": 200, "readiness": 503}
            assert httpx.get(f"{server.url}/ready").json()["status"] == "full"
            server.script.gate.set()
            last.read()
    finally:
        server.script.gate.set()
    assert answers()["readiness"] == 200


def test_stopping_gets_more_time_than_the_server_takes() -> None:
    pre_stop = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["spec"]["terminationGracePeriodSeconds"] > LEAST_STOP_S + pre_stop
    assert int(COMPOSE["stop_grace_period"].removesuffix("s")) > LEAST_STOP_S
    assert int(unit()["Service"]["TimeoutStopSec"]) > LEAST_STOP_S
    assert of_dockerfile("STOPSIGNAL") == "SIGTERM"


def test_kubernetes_parts_fit_together() -> None:
    labels = POD["metadata"]["labels"]
    assert KUBERNETES["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert KUBERNETES["Service"]["spec"]["selector"] == labels
    assert KUBERNETES["Service"]["spec"]["ports"][0]["targetPort"] == CONTAINER["ports"][0]["name"]
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes.keys()
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == KUBERNETES["PersistentVolumeClaim"]["metadata"]["name"]
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(PORT)


def test_kubernetes_waits_for_the_start() -> None:
    allowed = PROBES["startup"]["periodSeconds"] * PROBES["startup"]["failureThreshold"]
    assert KUBERNETES["Deployment"]["spec"]["progressDeadlineSeconds"] > allowed
    assert POD["spec"]["enableServiceLinks"] is False  # else LLMSCHED_PORT would be tcp://...


def test_libraries_write_only_where_they_may() -> None:
    """All directories that the image names are on the volume or in /tmp, and both are writable everywhere."""
    named = dict(setting.split("=", 1) for setting in of_dockerfile_all("ENV") if not setting.startswith("PATH="))
    assert named["HOME"] == "/tmp"
    writable = {of_dockerfile("VOLUME"), "/tmp"}
    assert {"/" + directory.split("/")[1] for directory in named.values()} == writable
    assert COMPOSE["read_only"] is CONTAINER["securityContext"]["readOnlyRootFilesystem"] is True
    volumes = (volume.split(":") for volume in COMPOSE["volumes"])
    assert {target for _, target, *mode in volumes if mode != ["ro"]} | set(COMPOSE["tmpfs"]) == writable
    assert {mount["mountPath"] for mount in CONTAINER["volumeMounts"] if not mount.get("readOnly")} == writable


def test_the_unit_writes_only_to_its_cache() -> None:
    text = (DEPLOY / "llmsched.service").read_text()
    named = [setting for line in re.findall(r"^Environment=(.*)$", text, re.M) for setting in line.split()]
    cache = f"/var/cache/{unit()['Service']['CacheDirectory']}"
    assert {setting.split("=", 1)[0] for setting in named} == {
        setting.split("=", 1)[0] for setting in of_dockerfile_all("ENV") if not setting.startswith("PATH=")
    }
    assert all(setting.split("=", 1)[1].startswith(cache) for setting in named)


def test_nothing_runs_as_root() -> None:
    user = of_dockerfile("USER")
    assert user != "0"
    assert POD["spec"]["securityContext"]["runAsNonRoot"] is True
    assert str(POD["spec"]["securityContext"]["runAsUser"]) == user
    assert unit()["Service"]["User"] not in ("", "root")


def test_the_image_is_made_of_files_that_exist() -> None:
    names = [name for name, _ in instructions()]
    assert names[:2] == ["ARG", "FROM"]
    assert "cuda" in instructions()[0][1]
    sources = {source for name, text in instructions() if name == "COPY" for source in text.split()[:-1]}
    assert all((ROOT / source).exists() for source in sources)
    shown = {line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    assert shown == sources
    assert of_dockerfile("EXPOSE") == str(PORT)
    assert (DEPLOY / COMPOSE["build"]["context"] / COMPOSE["build"]["dockerfile"]).exists()
    assert COMPOSE["ports"][0].endswith(f":{PORT}")


def test_the_health_check_of_the_image(server: ScriptedServer) -> None:
    command = json.loads(of_dockerfile("HEALTHCHECK").partition("CMD ")[2])
    assert f":{PORT}/" in command[-1]
    port = server.url.rpartition(":")[2]
    for path, expected in (("/health", 0), ("/no-such-route", 1)):
        script = command[-1].replace(f":{PORT}/health", f":{port}{path}")
        assert subprocess.run([*command[:-1], script], capture_output=True).returncode == expected


@pytest.mark.parametrize("document", KUBERNETES.values(), ids=KUBERNETES.keys())
def test_kubernetes_knows_every_field(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_compose_knows_every_field() -> None:
    lint = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*lint, str(DEPLOY / "compose.yml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on PATH")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "llmsched.service").read_text()
    program = shlex.split(unit()["Service"]["ExecStart"])[0]
    copy = tmp_path / "llmsched.service"
    copy.write_text(text.replace(program, "/bin/true"))  # the check wants the program to exist
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    ours = [line for line in done.stderr.splitlines() if "llmsched.service" in line]
    assert (done.returncode, ours) == (0, []), done.stderr
