from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_stack_lock = threading.Lock()


def in_a_thread(action: Callable[[], T], name: str, *, stack_bytes: int = 0, timeout_s: float | None = None) -> T:
    """Run `action` in a new thread and return its result, or raise its exception.

    `stack_bytes` is the size of the thread's stack; 0 is the default. Raises TimeoutError after `timeout_s` seconds.
    The thread then goes on, and its result is lost. An interrupt (Ctrl-C) ends the thread.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        with _stack_lock:
            before = threading.stack_size(stack_bytes)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        result = outcome.result(timeout_s)
    except KeyboardInterrupt:
        # If the interpreter ended while the thread computes, the process could abort.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        if thread.is_alive():
            thread.join()
        raise
    thread.join()
    return result
