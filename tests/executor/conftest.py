"""Fixture that runs every test of the executor on one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def on_one_thread(one_thread: None) -> None: ...
