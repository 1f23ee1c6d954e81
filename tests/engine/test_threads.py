from __future__ import annotations

import _thread
import signal
import threading

import pytest

from llmsched.engine.threads import in_a_thread


def test_the_result_or_the_error_reaches_the_caller() -> None:
    assert in_a_thread(threading.current_thread, "name").name == "name"
    with pytest.raises(ZeroDivisionError):
        in_a_thread(lambda: 1 // 0, "name")


def test_a_deep_stack_is_for_one_thread() -> None:
    before = threading.stack_size()
    in_a_thread(lambda: None, "deep", stack_bytes=64 << 20)
    assert threading.stack_size() == before


def test_a_late_result_is_lost() -> None:
    gate = threading.Event()
    with pytest.raises(TimeoutError):
        in_a_thread(gate.wait, "late", timeout_s=0.001)
    gate.set()


def test_an_interrupt_ends_the_thread() -> None:
    """Otherwise the thread would compute while the interpreter ends."""
    threads: list[threading.Thread] = []

    def compute() -> None:
        threads.append(threading.current_thread())
        _thread.interrupt_main()
        while True:
            pass

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            in_a_thread(compute, "name")
    finally:
        signal.signal(signal.SIGINT, before)
    assert not threads[0].is_alive()
