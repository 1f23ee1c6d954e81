"""What Ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: The exit code of what the user has ended.
INTERRUPTED = 130


@contextmanager
def interrupted_at_once() -> Iterator[None]:
    """Let Ctrl-C end what runs in the block at once; an event loop would wait until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
