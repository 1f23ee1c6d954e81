"""Adapters: outputs are those of models with merged weights, whatever shares the batch, and prefix caches are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from alike import PROMPTS
from engines import (
    EOS,
    MAX_POSITION,
    PARITY_CHECKS,
    SMALL_POOL,
    SWAP,
    Choice,
    Collector,
    assert_idle,
    make_engine,
    prompt,
    sampling,
    tokenizer,
)
from engines import model as shared_model
from lora_files import ATTENTION, MLP, merged, save_adapter
from stepping import Stepper, make_sequence
from tiny_models import VOCAB_SIZE, build_model, save_tiny_model

from llmsched.engine.architecture.adapter_files import read_adapters
from llmsched.engine.config import EngineConfig
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError, ModelError, RequestError
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv.misses import MissKind
from llmsched.engine.model.adapters import Adapters
from llmsched.engine.model.loader import ModelInfo
from llmsched.engine.parity.verification import LoadedModel, check_parity, load_for_parity
from llmsched.kernels.cpu import ops

#: Names of adapters of the shared model -> adapted modules and options of `save_adapter`.
ADAPTERS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "all": ((*ATTENTION, *MLP), {"rank": 4}),
    "few": (("q_proj", "v_proj", "down_proj"), {"rank": 9, "alpha": 12, "seed": 1, "use_rslora": True}),
    "one": (("up_proj",), {"rank": 1, "seed": 2, "size": 0.4}),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(root / name, shared_model(), targets, **options)
        for name, (targets, options) in ADAPTERS.items()
    }


@pytest.fixture(scope="module")
def lora(directories: dict[str, Path]) -> tuple[str, ...]:
    return tuple(f"{name}={directory}" for name, directory in directories.items())


@pytest.mark.parametrize("impl", ["fused", "transformers"])
def test_outputs_are_those_of_merged_weights_however_they_are_scheduled(impl: Any, directories: Any) -> None:
    lora = (f"few={directories['few']}",)
    plain = build_model("llama", seed=3)
    info = ModelInfo("llama", "llama", VOCAB_SIZE, MAX_POSITION, frozenset({EOS}))
    loaded = LoadedModel(
        *(plain, info, tokenizer(), "cpu", torch.float32),
        model_impl=impl,
        dequantised=merged(plain, directories["few"]),
        lora=lora,
        adapters=Adapters.fit(plain, read_adapters(lora)),
    )
    report = check_parity(loaded, num_prompts=2, num_tokens=6)
    assert report.model_impl == impl
    assert tuple(check.name for check in report.checks) == PARITY_CHECKS
    for check in report.checks:
        assert check.ok, check
        assert check.tokens_equal, check
        assert check.max_abs_logit_diff is not None
        assert check.max_abs_logit_diff < 1e-4, check


#: Architecture -> adapted modules.
MODELS: dict[str, tuple[str, ...]] = {
    "phi3": ("qkv_proj", "gate_up_proj", "down_proj"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "falcon": ("query_key_value", "dense_4h_to_h"),
    "gemma2": ("k_proj", "gate_proj"),
    "qwen2_moe": ("o_proj", "gate_proj", "shared_expert_gate"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "up_proj"),
}


@pytest.mark.parametrize("arch", MODELS)
def test_logits_of_other_architectures(arch: str, tmp_path: Path) -> None:
    model = build_model(arch, seed=3)
    directory = save_adapter(tmp_path, model, MODELS[arch])
    wanted = [merged(model, directory), build_model(arch, seed=3)]
    adapters = Adapters.fit(model, read_adapters((f"a={directory}",)))
    options: dict[str, Any] = {"num_blocks": 32, "block_size": 16, "kv_dtype": torch.float32, "adapters": adapters}
    executor = TorchExecutor(model, **options, device="cpu")
    assert executor.model_impl == ("transformers" if arch == "gpt2" else "fused")
    ids = prompt(60)
    sequences = [make_sequence("adapted", ids), make_sequence("plain", ids)]
    sequences[0].adapter = 0
    with torch.no_grad():
        expected = [each(input_ids=torch.tensor([ids])).logits[0] for each in wanted]
    assert float((expected[0] - expected[1]).abs().max()) > 0.3
    for found, logits in zip(Stepper(executor, sequences, 64).logits((33, 7, 1)), expected, strict=True):
        assert float((found - logits).abs().max()) < 1e-4


def test_quantised_weights_and_the_merge_of_verify(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    model = build_model("llama")
    directory = save_adapter(tmp_path / "adapter", model, (*ATTENTION, *MLP))
    lora = (f"a={directory}",)
    settings: dict[str, Any] = {"model": str(folder), "device": "cpu", "dtype": "float32", "lora": lora}
    with pytest.raises(ConfigError, match="one adapter is compared at a time, not 2"):
        load_for_parity(EngineConfig(**{**settings, "lora": (*lora, f"b={directory}")}))
    loaded = load_for_parity(EngineConfig(**settings, quantization="int8"))
    assert loaded.dequantised is not None
    report = check_parity(loaded, num_prompts=1, num_tokens=4)
    assert report.ok
    assert max(check.max_abs_logit_diff or 0 for check in report.checks) < 1e-4
    plain = load_for_parity(EngineConfig(**settings)).dequantised
    for (name, found), expected in zip(plain.named_parameters(), merged(model, directory).parameters(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


def serve(engine: Engine, wanted: list[tuple[str | None, list[int]]], **fields: Any) -> list[Choice]:
    """Serve requests of adapters (None: no adapter) together, and return their outputs."""
    collector = Collector(engine)
    for index, (adapter, ids) in enumerate(wanted):
        engine.add_request(str(index), ids, sampling(**fields), adapter=adapter)
    collector.run()
    assert_idle(engine)
    return [collector.all(str(index))[0] for index in range(len(wanted))]


#: Settings of engines in which requests of all adapters meet.
ENGINES: dict[str, dict[str, Any]] = {
    "look-ahead and graphs": {"looks_ahead": True, "graphs": True},
    "graphs, chunks": {"graphs": True, "max_num_batched_tokens": 24},
    "drafts": {"speculative": "ngram"},
    "preemption": SMALL_POOL | {"looks_ahead": True},
    "swap": SMALL_POOL | SWAP | {"num_blocks": 11},
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_batch_mixes_adapters(name: str, lora: tuple[str, ...], directories: dict[str, Path]) -> None:
    names = [*ADAPTERS, None, "few", None, "all", "one"]
    wanted = list(zip(names, PROMPTS, strict=True))
    engine = make_engine(lora=lora, **ENGINES[name])
    assert engine.adapters == tuple(ADAPTERS)
    found = serve(engine, wanted)
    plain = build_model("llama", seed=3)  # the shared model's attention may be an engine's
    for adapter, (_, ids), choice in zip(names, wanted, found, strict=True):
        right = plain if adapter is None else merged(plain, directories[adapter])
        expected = right.generate(
            torch.tensor([ids]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=3
        )
        assert choice.tokens == expected[0, len(ids) :].tolist()
    stats = engine.stats()
    assert (stats.num_preemptions > 0) is (name in ("preemption", "swap"))
    assert (stats.num_swapped_in > 0) is (name == "swap")


def test_steps_without_adapters_compute_none(lora: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    add_lora = ops.add_lora
    monkeypatch.setattr(ops, "add_lora", lambda *arguments: (calls.append(1), add_lora(*arguments)))
    engine = make_engine(lora=lora, graphs=True)
    calls.clear()
    serve(engine, [(None, prompt(20)), (None, prompt(40))])
    assert not calls
    serve(engine, [("one", prompt(20)), (None, prompt(40))])
    assert calls
    calls.clear()
    serve(engine, [(None, prompt(20)), (None, prompt(40))])
    assert not calls


def test_prefix_caches_are_apart(lora: tuple[str, ...]) -> None:
    engine, ids = make_engine(lora=lora), prompt(50)
    cached = [serve(engine, [(adapter, ids)])[0].num_cached_tokens for adapter in (None, "all", "few", "all", None)]
    assert cached == [0, 0, 0, 48, 48]
    assert engine.scheduler.kv.prefix_cache.misses.counts[MissKind.OTHER_SALT] == 2
    engine.prefixes.reset()
    pin = engine.prefixes.pin(ids, adapter="one")
    while engine.has_work():
        engine.step()
    assert [state.num_written_tokens for state in engine.prefixes.pins()] == [48]
    engine.prefixes.unpin(pin.pin_id)
    cached = [serve(engine, [(adapter, ids)])[0].num_cached_tokens for adapter in ("all", "one")]
    assert cached == [0, 48]
    with pytest.raises(RequestError, match="no adapter 'two'; there are all, few, one"):
        engine.add_request("x", ids, sampling(), adapter="two")
    with pytest.raises(RequestError, match="no adapter 'two'"):
        engine.prefixes.pin(ids, adapter="two")


@pytest.mark.parametrize(
    ("arch", "change", "module", "reason"),
    [
        (
            "llama",
            {"num_hidden_layers": 2},
            "q_proj",
            r"changes model\.layers\.2\..*q_proj, which the model does not have",
        ),
        ("llama", {"hidden_size": 128}, "o_proj", r"64 inputs and 64 outputs of .*o_proj, which has 128 and 128"),
        ("deepseek_v3", {}, "kv_b_proj", "changes .*kv_b_proj, which expands latent vectors; this is not supported"),
        ("qwen2", {}, "lm_head", "changes lm_head, the output layer, which is not supported; it was trained for tiny"),
    ],
)
def test_adapters_of_other_models_are_refused(
    arch: str, change: dict[str, Any], module: str, reason: str, tmp_path: Path
) -> None:
    files = read_adapters((f"sql={save_adapter(tmp_path, build_model(arch), (module,))}",))
    with pytest.raises(ModelError, match=f"adapter sql: .*{reason}"):
        Adapters.fit(build_model(arch, **change), files)


def test_an_adapter_of_a_norm_is_refused(tmp_path: Path) -> None:
    name = "base_model.model.model.norm.lora_{}.weight"
    tensors = {name.format("A"): torch.ones(4, 64), name.format("B"): torch.ones(64, 4)}
    directory = save_adapter(tmp_path, build_model("llama"), (), tensors=tensors, target_modules=["norm"])
    with pytest.raises(ModelError, match=r"model\.norm \(LlamaRMSNorm\), but only linear layers can be adapted"):
        Adapters.fit(build_model("llama"), read_adapters((f"a={directory}",)))
