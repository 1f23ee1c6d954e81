"""The console entry with output that cannot be written. Uses real processes, because only they have real streams."""

from __future__ import annotations

import os
import signal
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
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), said) == (1, "")


def test_closed_streams_print_no_traceback() -> None:
    command = f"{sys.executable} -c 'from llmsched.cli.main import main; main()' workload chat --json >&-"
    outcome = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", "")


def test_output_in_ascii_prints_no_traceback() -> None:
    outcome = subprocess.run(
        [*CALL, "kv-budget", "demo", "--gpu", "l4"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (outcome.returncode, outcome.stderr) == (0, "")


def test_a_signal_ends_process_1_of_a_container_while_the_model_loads() -> None:
    """Patch getpid, because a process namespace needs privileges. Without a handler the exit code would be -15."""
    code = (
        "import os, sys, time; os.getpid = lambda: 1; sys.argv = ['llmsched', 'serve', 'demo', '--port', '0']\n"
        "from llmsched.engine import build\n"
        "build.build_engine = lambda *_: (os.write(1, b'loading\\n'), time.sleep(60))\n"
        "from llmsched.cli.main import main; main()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "loading\n" in process.stdout
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM


def test_an_interrupt_during_the_warm_up_prints_no_traceback() -> None:
    code = (
        "import os, signal, sys, torch; sys.argv = ['llmsched', 'serve', 'demo', '--port', '0']\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "from llmsched.engine import build\n"
        "from llmsched.engine.threads import in_a_thread\n"
        "def warm_up():\n"
        "    os.write(1, b'warming up\\n')\n"
        "    while True: torch.ones(300, 300) @ torch.ones(300, 300)\n"
        "build.build_engine = lambda *_: in_a_thread(warm_up, 'warm-up')\n"
        "from llmsched.cli.main import main; main()"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        assert process.stderr is not None
        assert "warming up\n" in process.stdout
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(60) == 128 + signal.SIGINT
        finally:
            process.kill()
        assert process.stderr.read() == ""


def test_the_environment_is_prepared_before_torch_is_imported() -> None:
    code = (
        "import os, sys; import llmsched.cli.main as cli; sys.argv = ['llmsched', '--version'];"
        "prepare = cli.prepare_environment;"
        "cli.prepare_environment = lambda: (prepare(), print('torch' in sys.modules, 'GOMP_SPINCOUNT' in os.environ));"
        "cli.main()"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("False True\nllmsched ")
