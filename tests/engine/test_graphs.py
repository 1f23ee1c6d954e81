"""The real executor with graphs of decodes: outputs are those of an engine without."""

from __future__ import annotations

import pytest
from alike import ENGINES, PROMPTS, assert_same, launches_of, requests
from engines import generate_all, make_engine, sampling
from tiny_models import ARCHITECTURES, VOCAB_SIZE

from llmsched.engine.executor import torch_executor


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("name", ENGINES)
def test_outputs_are_the_same(name: str, looks_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, settings = ENGINES[name]
    if name == "steps in parts":
        monkeypatch.setattr(torch_executor, "LOGITS_BYTES", 4 * VOCAB_SIZE * 3)
    expected = generate_all(make_engine(arch, **settings), *requests())
    engine = make_engine(arch, looks_ahead=looks_ahead, graphs=True, **settings)
    launched = launches_of(engine)
    assert_same(generate_all(engine, *requests()), expected)
    assert len(set(engine.executor.recorder.replays)) > 1
    assert (sum(launched) > 0) is looks_ahead
    stats = engine.stats()
    assert (stats.num_preemptions > 0) is (settings.get("num_blocks", 0) > 0)
    assert (stats.num_swapped_in > 0) is (name == "swap")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_runs_as_graphs(arch: str) -> None:
    params = [sampling(max_tokens=12), sampling(max_tokens=12, temperature=0.8, seed=3), sampling(max_tokens=5)]
    wanted = [*zip(PROMPTS, params, strict=False)]
    expected = generate_all(make_engine(arch), *wanted)
    engine = make_engine(arch, looks_ahead=True, graphs=True)
    assert_same(generate_all(engine, *wanted), expected)
    assert set(engine.executor.recorder.replays) >= {2, 4}
