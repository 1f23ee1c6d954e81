"""Output that neither fails nor blocks, so that a terminal or log that is closed or slow cannot stop the server."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn, TextIO

#: Texts that may wait for a reader; more are dropped.
MAX_PENDING = 1000
#: Most seconds that the process waits at its end for the last texts to be written.
_LAST_S = 0.2


class DetachedStream:
    """Text stream that a thread copies to `stream`. It drops texts if the reader is gone or slow, or a disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pending: queue.Queue[str] = queue.Queue(MAX_PENDING)
        threading.Thread(target=self._pass_on, name="llmsched-output", daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(queue.Full):
            self._pending.put_nowait(text)
        return len(text)

    def flush(self) -> None: ...

    def finish(self, timeout_s: float) -> None:
        with self._pending.all_tasks_done:
            self._pending.all_tasks_done.wait_for(lambda: not self._pending.unfinished_tasks, timeout_s)

    def _pass_on(self) -> None:
        encoding = self._stream.encoding or "utf-8"
        while True:
            text = self._pending.get().encode(encoding, "backslashreplace").decode(encoding)
            with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
                self._stream.write(text)
                self._stream.flush()
            self._pending.task_done()


@contextlib.contextmanager
def detached_output() -> Iterator[None]:
    """Replace stdout and stderr by DetachedStreams while the block runs."""
    attached = sys.stdout, sys.stderr
    streams = [DetachedStream(stream) for stream in attached]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = attached
        for stream in streams:
            stream.finish(_LAST_S)


def leave(code: int) -> NoReturn:
    """End the process with this exit code, after a short wait for pending output.

    The interpreter's teardown is skipped, because it takes seconds with gigabytes of tensors and waits for threads that
    hang.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, DetachedStream):
            stream.finish(_LAST_S)
    os._exit(code)
