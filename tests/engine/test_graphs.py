"""The real executor with graphs of decodes: outputs are those of an engine without."""

from __future__ import annotations

from typing import Any

import pytest
from alike import ENGINES, PROMPTS, assert_same, launches_of, requests
from engines import generate_all, make_engine, sampling
from fake_graphs import capture_fake_graphs
from stepping import Stepper, make_sequence
from tiny_models import ARCHITECTURES, RECURRENT, VOCAB_SIZE, build_model

from llmsched.engine.executor import torch_executor
from llmsched.engine.executor.torch_executor import TorchExecutor


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


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *RECURRENT])
def test_every_architecture_runs_as_graphs(arch: str) -> None:
    params = [sampling(max_tokens=12), sampling(max_tokens=12, temperature=0.8, seed=3), sampling(max_tokens=5)]
    wanted = [*zip(PROMPTS, params, strict=False)]
    expected = generate_all(make_engine(arch), *wanted)
    engine = make_engine(arch, looks_ahead=True, graphs=True)
    assert_same(generate_all(engine, *wanted), expected)
    assert set(engine.executor.recorder.replays) >= {2, 4}


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
ROTARY: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "longrope": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128, **FACTORS},
    "llama3": {
        **{"rope_type": "llama3", "rope_theta": 10000.0, "original_max_position_embeddings": 128},
        **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
}


@pytest.mark.parametrize("impl", ["fused", "transformers"])
@pytest.mark.parametrize("kind", ROTARY)
def test_rotary_embeddings_that_look_at_positions_run_as_graphs(kind: str, impl: Any) -> None:
    changes = {"rope_parameters": ROTARY[kind], "original_max_position_embeddings": 128}
    outputs = []
    for graphs in (False, True):
        model = build_model("llama", seed=5, **changes)
        executor = TorchExecutor(
            model, num_blocks=64, block_size=4, device="cpu", kv_dtype=model.dtype, max_model_len=128, model_impl=impl
        )
        if graphs:
            capture_fake_graphs(executor, 2, 128)
        stepper = Stepper(executor, [make_sequence("a", range(9, 109)), make_sequence("b", range(40, 60))], 128)
        outputs.append(stepper.generate(10))
    assert outputs[0] == outputs[1]
