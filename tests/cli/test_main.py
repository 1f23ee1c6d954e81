"""The console entry with output that cannot be written. Uses real processes, because only they have real streams."""

from __future__ import annotations

import subprocess
import sys
from typing import IO, Any

import pytest

CALL = [sys.executable, "-c", "from llmsched.cli.main import main; main()"]


def run(*arguments: str, stdout: int | IO[Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CALL, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)


@pytest.mark.parametrize("arguments", [("workload", "chat", "--json"), ("workload", "chat")])
def test_a_full_disk_is_one_line_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        outcome = run(*arguments, stdout=full)
    assert (outcome.returncode, outcome.stderr) == (2, "error: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("arguments", [("workload", "chat", "--json"), ("workload", "chat")])
def test_a_closed_pipe_prints_no_traceback(arguments: tuple[str, ...]) -> None:
    process = subprocess.Popen([*CALL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), said) == (1, "")


def test_closed_streams_print_no_traceback() -> None:
    command = f"{sys.executable} -c 'from llmsched.cli.main import main; main()' workload chat --json >&-"
    outcome = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", "")
