"""Weights arrive whole, once, and under either spelling of a configuration; anything else is refused by name."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, build_model
from transformers import AutoModelForCausalLM

from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import ModelError
from llmsched.engine.model.loader import load_config, load_info, load_model, load_tokenizer, open_model
from llmsched.engine.model.source import locate

IDS = torch.arange(5, 45)[None]
INDEX = "model.safetensors.index.json"


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    source = locate(str(path))
    options = {"device": "cpu", "attn_implementation": "eager", **options}
    return load_model(source, load_config(source), dtype=dtype, **options)


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


def info_of(path: Path) -> Any:
    source = locate(str(path))
    return load_info(source, load_config(source), load_tokenizer(source))


@pytest.fixture
def copy(tiny_model: Any, tmp_path: Path) -> Any:
    """Return a function that copies a model to a new directory, which a test can damage."""

    def make(arch: str, **overrides: Any) -> Path:
        return Path(shutil.copytree(tiny_model(arch, **overrides), tmp_path / "model"))

    return make


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys in a JSON file; the value None removes a key."""
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    values = {key: value for key, value in {**values, **changes}.items() if value is not None}
    path.write_text(json.dumps(values), encoding="utf-8")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
def test_logits_equal_from_pretrained(arch: str, max_shard_size: str, tiny_model: Any) -> None:
    path = tiny_model(arch, max_shard_size=max_shard_size)
    assert (path / INDEX).exists() == (max_shard_size == "100KB")
    attention = "sdpa" if arch.startswith("falcon") else "eager"
    reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, dtype=torch.float32)
    model = load(path)
    assert torch.equal(logits_of(model), logits_of(reference))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_dtype_is_the_one_asked_for(tiny_model: Any) -> None:
    model = load(tiny_model("llama"), torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_tied_embeddings_are_one_parameter(tiny_model: Any) -> None:
    tied = load(tiny_model("llama"))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    untied = load(tiny_model("llama", tie_word_embeddings=False))
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_pickled_weights_are_read_as_tensors_only(copy: Any) -> None:
    path = copy("llama")
    expected = logits_of(load(path))
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert torch.equal(logits_of(load(path)), expected)

    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (print, ("code ran",))

    torch.save({"weight": Evil()}, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        load(path)


def test_progress_counts_every_tensor(tiny_model: Any) -> None:
    seen: list[tuple[str, int, int]] = []
    load(tiny_model("qwen2"), progress=lambda *state: seen.append(state))
    totals = {total for _, _, total in seen}
    assert len(totals) == 1
    assert sorted(done for _, done, _ in seen) == list(range(1, totals.pop() + 1))


# Every kind of incomplete checkpoint is refused by name.


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("model-*.safetensors"))


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.fixture
def sharded(copy: Any) -> Path:
    return Path(copy("llama", max_shard_size="100KB"))


def test_missing_shards(sharded: Path) -> None:
    expected = logits_of(load(sharded))
    index = (sharded / INDEX).read_text()
    (sharded / INDEX).unlink()
    assert torch.equal(logits_of(load(sharded)), expected), "the index can be spared"
    gone = shards(sharded)[1]
    gone.unlink()
    refused(sharded, f"shards missing: {gone.name}")
    (sharded / INDEX).write_text(index)
    refused(sharded, f"shards missing: {gone.name}")


def test_truncated_shard(sharded: Path) -> None:
    cut = shards(sharded)[1]
    cut.write_bytes(cut.read_bytes()[:-64])
    refused(sharded, f"{cut.name}: cannot be read, it may be cut short")


@pytest.mark.parametrize(
    ("tensor", "place", "message"),
    [
        ("model.ghost.weight", "", r"lacks tensors that the index lists for it: model\.ghost\.weight"),
        ("model.norm.weight", "../secret", r"must be in the same directory as the index, not at \.\./secret"),
    ],
)
def test_an_index_with_a_wrong_place(tensor: str, place: str, message: str, sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text(encoding="utf-8"))["weight_map"]
    edit_json(sharded / INDEX, weight_map={**weight_map, tensor: place or shards(sharded)[0].name})
    refused(sharded, message)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_index_is_no_index(content: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(content, encoding="utf-8")
    refused(sharded, "weight_map")


def test_two_shards_hold_the_same_tensor(sharded: Path) -> None:
    first, second = shards(sharded)[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second, metadata={"format": "pt"})
    refused(sharded, f"tensors that another shard has too: {name}")


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({UP: None}, {}, r"its weights lack tensors: model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"model.embed_tokens.weight": None}, {}, "embed_tokens"),
        ({"model.ghost.weight": torch.ones(2)}, {}, r"tensors that the model lacks: model\.ghost\.weight"),
        ({UP: torch.ones(96, 64, dtype=torch.float8_e4m3fn)}, {}, f"these tensors are quantised: .*{UP}"),
        ({}, {"num_hidden_layers": 2}, r"tensors that the model lacks: model\.layers\.2\."),
        ({}, {"intermediate_size": 80}, r"whose shapes differ from config\.json: .*\(96, 64\) instead of \(80, 64\)"),
        ({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, {}, None),  # stray buffers of old files
    ],
)
def test_weights_and_configuration_must_agree(tensors: Any, config: Any, message: str | None, copy: Any) -> None:
    path = copy("llama")
    expected, state = logits_of(load(path)), load_file(path / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", **config)
    if message is None:
        assert torch.equal(logits_of(load(path)), expected)
    else:
        refused(path, message)


def test_configuration_only(copy: Any) -> None:
    path = copy("llama")
    (path / "model.safetensors").unlink()
    refused(path, r"has no weights \(model.safetensors")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors",
        "generation_config.json",
    ],
)
def test_a_git_lfs_pointer_is_named(name: str, copy: Any) -> None:
    path = copy("llama")
    (path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    with pytest.raises(ModelError, match=rf"{name}: is a Git LFS pointer.*git lfs pull"):
        open_model(EngineConfig(model=str(path), device="cpu")).load()


def test_a_sentencepiece_tokenizer_needs_no_tokenizer_json(copy: Any) -> None:
    path, proto = copy("llama"), io.BytesIO()
    sentences = ["the quick brown fox jumps over the lazy dog", "one two three four five six seven"] * 50
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=proto,
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    for old in path.glob("tokenizer*"):
        old.unlink()
    (path / "tokenizer.model").write_bytes(proto.getvalue())
    edit_json(path / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", add_bos_token=False)
    tokenizer = load_tokenizer(locate(str(path)))
    reference = sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue())
    for text in ("the fox jumps", "two dogs: \u00e9\U0001f600", "spaces   inside"):
        assert tokenizer.encode(text) == reference.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_another_head_in_the_file_of_a_tied_model_is_refused(copy: Any) -> None:
    path = copy("llama", tie_word_embeddings=True)
    file = path / "model.safetensors"
    state = load_file(file)
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, file)
    load(path)  # an equal head is tied
    other = state["model.embed_tokens.weight"].clone()
    other[3:5] += 1
    save_file({**state, "lm_head.weight": other}, file)
    with pytest.raises(
        ModelError, match=rf"differs .* in {2 * other.shape[1]} of {other.numel():,} values; set tie_word"
    ):
        load(path)


def test_a_vocabulary_below_the_tokenizers_ids_is_refused(copy: Any) -> None:
    path = copy("llama")
    edit_json(path / "config.json", vocab_size=50)
    with pytest.raises(ModelError, match=r"vocab_size 50, but the tokenizer has token ids up to \d+; the tokenizer"):
        open_model(EngineConfig(model=str(path)))


def test_added_tokens_above_the_vocabulary_are_logged(copy: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = copy("llama")
    file = path / "tokenizer.json"
    size = load_tokenizer(locate(str(path))).vocab_size
    edit_json(path / "config.json", vocab_size=size)
    added = json.loads(file.read_text())["added_tokens"]
    kinds = ("single_word", "lstrip", "rstrip", "normalized", "special")
    edit_json(file, added_tokens=[*added, {"id": size, "content": "<mask>", **dict.fromkeys(kinds, False)}])
    open_model(EngineConfig(model=str(path)))
    assert f"vocab_size {size:,}, but the tokenizer has token ids up to {size:,}" in caplog.text


def test_a_tokenizer_without_tokens_is_refused(copy: Any) -> None:
    path = copy("llama")
    file = path / "tokenizer.json"
    edit_json(file, model={**json.loads(file.read_text())["model"], "vocab": {}, "merges": []})
    with pytest.raises(ModelError, match="its tokenizer has no tokens"):
        open_model(EngineConfig(model=str(path)))


# Both spellings of rope data.

YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}
SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "theta": ({"rope_theta": 500000.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "yarn": (
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    ),
    "linear": (
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_rope_in_either_spelling(case: str, copy: Any) -> None:
    path = copy("qwen2")
    plain = logits_of(load(path))
    old, new = SPELLINGS[case]
    found = []
    for spelling in (old, new):
        removed = dict.fromkeys(("rope_parameters", "rope_theta", "rope_scaling"))
        edit_json(path / "config.json", **{**removed, **spelling})
        found.append(logits_of(load(path)))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], plain, atol=1e-3)


def test_rope_theta_defaults_to_ten_thousand(copy: Any) -> None:
    path = copy("llama")
    expected = logits_of(load(path))
    edit_json(path / "config.json", rope_parameters=None)
    assert torch.equal(logits_of(load(path)), expected)


def test_rope_per_layer_type_in_either_spelling(copy: Any) -> None:
    path = copy("gemma3")
    nested = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    found = []
    for spelling in (old, {"rope_parameters": nested}):
        removed = dict.fromkeys(("rope_parameters", "rope_theta", "rope_scaling", "rope_local_base_freq"))
        edit_json(path / "config.json", **{**removed, **spelling})
        found.append(logits_of(load(path)))
    assert torch.equal(found[0], found[1])


# Which layers of Qwen2 slide.

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = {
    "from max_window_layers on": (
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        [FULL, SLIDING, SLIDING],
    ),
    "switched off": ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}, [FULL, FULL, FULL]),
    "layer_types win": (
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 3,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
        [SLIDING, FULL, SLIDING],
    ),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_sliding_layers_of_qwen2(case: str, copy: Any) -> None:
    settings, expected = WINDOWS[case]
    path = copy("qwen2")
    edit_json(path / "config.json", **{"layer_types": None, **settings})
    config = load_config(locate(str(path)))
    assert config.layer_types == expected
    without = build_model("qwen2")
    without.set_attn_implementation("eager")
    slides = not torch.allclose(logits_of(load(path)), logits_of(without), atol=1e-3)
    assert slides == (SLIDING in expected)


# generation_config.json.


def test_stop_ids_are_a_union(copy: Any) -> None:
    path = copy("llama", eos_token_id=5)
    edit_json(path / "generation_config.json", eos_token_id=[0, 7])
    assert info_of(path).eos_token_ids == {0, 7, 5, 2}


@pytest.mark.parametrize("missing", ["generation_config.json", "eos in config"])
def test_stop_ids_when_a_place_is_silent(missing: str, copy: Any) -> None:
    path = copy("llama")
    if missing == "generation_config.json":
        (path / missing).unlink()
    else:
        edit_json(path / "config.json", eos_token_id=None)
        edit_json(path / "generation_config.json", eos_token_id=None)
    assert info_of(path).eos_token_ids == {2}


def test_sampling_defaults_are_those_that_the_file_sets(copy: Any) -> None:
    path = copy("llama")
    assert info_of(path).sampling_defaults == {}
    edit_json(path / "generation_config.json", do_sample=True, temperature=1.0, top_k=64, top_p=0.95)
    assert info_of(path).sampling_defaults == {"temperature": 1.0, "top_k": 64, "top_p": 0.95}
    edit_json(path / "generation_config.json", do_sample=None, min_p=0.1, repetition_penalty=1.1, max_new_tokens=9)
    assert info_of(path).sampling_defaults == {
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "max_tokens": 9,
    }
    edit_json(path / "generation_config.json", min_new_tokens=99, top_k=-1, stop_strings="x", max_new_tokens=None)
    defaults = info_of(path).sampling_defaults
    assert (defaults["min_tokens"], defaults["top_k"], defaults["stop"]) == (99, -1, ("x",))


def test_other_fields_that_would_change_the_output_are_told(copy: Any) -> None:
    path = copy("llama")
    harmless = {"num_beams": 1, "typical_p": 1.0, "guidance_scale": None, "max_length": 512, "use_cache": True}
    edit_json(path / "generation_config.json", **harmless, length_penalty=2.0, suppress_tokens=[])
    assert info_of(path).ignored_defaults == []
    edit_json(path / "generation_config.json", num_beams=4, no_repeat_ngram_size=3, max_length=20, made_up="x")
    assert set(info_of(path).ignored_defaults) == {"num_beams", "no_repeat_ngram_size", "max_length", "made_up"}


def test_a_file_that_does_not_sample_leaves_its_penalty(copy: Any) -> None:
    path = copy("llama")
    edit_json(
        path / "generation_config.json", do_sample=False, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05
    )
    assert info_of(path).sampling_defaults == {"repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("setting", "message"), [({"temperature": 9}, "temperature is 9"), ({"top_k": "x"}, "generation_config")]
)
def test_impossible_sampling_defaults_are_refused(setting: dict[str, Any], message: str, copy: Any) -> None:
    path = copy("llama")
    edit_json(path / "generation_config.json", **setting)
    with pytest.raises(ModelError, match=message):
        info_of(path)


def test_info(tiny_model: Any) -> None:
    path = tiny_model("gpt2")
    info = info_of(path)
    assert info.name == path.name
    assert (info.architecture, info.vocab_size, info.max_position) == ("GPT2LMHeadModel", 320, 512)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_context_ends_where_batch_mates_would_change(rope_type: str, copy: Any) -> None:
    path = copy("llama")
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    if rope_type == "longrope":
        factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        rope |= {"original_max_position_embeddings": 128, **factors}
    edit_json(path / "config.json", rope_parameters=rope)
    assert info_of(path).max_position == (128 if rope_type == "longrope" else 512)
