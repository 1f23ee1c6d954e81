"""Planned weights and KV against what a process really grows by."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import real_memory

#: Large enough for weights to matter, small enough to be written in a second.
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "vocab_size": 24000}


def test_planned_weights_and_kv_are_what_the_process_grows_by(tiny_model: Any, demo_dir: Path) -> None:
    models = [str(tiny_model("llama")), str(demo_dir), str(tiny_model("qwen3", **SIZES))]
    done = subprocess.run([sys.executable, real_memory.__file__, *models], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    demo, other = json.loads(done.stdout.splitlines()[-1])
    for found in (demo, other):
        assert found["planned"] > real_memory.KV_BYTES
        assert found["grown"] == pytest.approx(found["planned"], rel=0.05)
