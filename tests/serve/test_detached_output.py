"""Detached output: whole when it can be written, dropped when it cannot, and never a wait."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress

import pytest

from llmsched.cli import render
from llmsched.cli.serve.detached_output import MAX_PENDING, DetachedStream, detached_output


def test_output_arrives_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    attached = sys.stdout
    with detached_output():
        for number in range(100):
            print(number)
        render.note("told")
        logging.StreamHandler().emit(logging.makeLogRecord({"msg": "logged"}))
    printed = capsys.readouterr()
    assert printed.out.split() == [str(number) for number in range(100)]
    assert printed.err == "note: told\nlogged\n"
    assert sys.stdout is attached


def test_characters_that_the_encoding_lacks_are_escaped() -> None:
    raw = io.BytesIO()
    stream = DetachedStream(io.TextIOWrapper(raw, "ascii"))
    stream.write("caf\u00e9\n")
    stream.finish(10)
    assert raw.getvalue() == b"caf\\xe9\n"


def test_a_stream_that_fails_drops_its_text_and_recovers() -> None:
    class Full(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError("no space left on device")
            return super().write(text)

    disk = Full()
    stream = DetachedStream(disk)
    stream.write("lost")
    stream.finish(10)
    disk.full = False
    stream.write("kept")
    stream.finish(10)
    assert disk.getvalue() == "kept"


def test_a_reader_that_does_not_read_delays_nothing() -> None:
    reading, writing = os.pipe()
    pipe = os.fdopen(writing, "w")
    stream = DetachedStream(pipe)
    for _ in range(2 * MAX_PENDING):
        stream.write("x" * 1000)  # a megabyte: more than the pipe holds
    stream.finish(0.01)
    os.close(reading)
    stream.finish(10)
    with suppress(BrokenPipeError):
        pipe.close()
