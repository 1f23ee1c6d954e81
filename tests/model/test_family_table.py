"""Families of models: each is served with the logits of transformers or refused, as the table for users says."""

from __future__ import annotations

import pytest
from family_table import FILE, SERVED, difference, executor, table
from tiny_models import RARE_ARCHITECTURES, build_model

from llmsched.engine.architecture.geometry import kv_geometry
from llmsched.engine.model.support import refusal


@pytest.mark.parametrize("arch", RARE_ARCHITECTURES)
def test_logits_of_rare_architectures(arch: str) -> None:
    for chunks in ((1000,), (7, 1)):
        assert difference(arch, chunks) < 1e-4


@pytest.mark.parametrize("arch", SERVED)
def test_the_config_alone_tells_that_a_model_is_served_and_its_kv(arch: str) -> None:
    model, made = build_model(arch), executor(arch)
    assert refusal({**model.config.to_dict(), "architectures": [type(model).__name__]}) is None
    planned = kv_geometry(model.config).bytes_per_token(4)
    assert made.kv_cache_bytes == made.num_blocks * made.layout.block_size * planned


def test_the_table_says_how_each_family_is_served() -> None:
    assert FILE.read_text(encoding="utf-8") == table(), "run python tests/support/family_table.py"
