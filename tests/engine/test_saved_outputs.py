"""Saved outputs of the engine: the file, and the comparison after the saved tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llmsched.engine.config import EngineConfig
from llmsched.engine.errors import LlmschedError
from llmsched.engine.parity import saved_outputs
from llmsched.engine.parity.logit_comparison import Reference, kl_divergence
from llmsched.engine.parity.saved_outputs import SavedOutputs, compare_outputs, generate_outputs, read_outputs
from llmsched.engine.parity.verification import LoadedModel, load_for_parity

pytestmark = pytest.mark.usefixtures("one_thread")


def loaded(tiny_model: Any, **settings: Any) -> LoadedModel:
    model = str(tiny_model("llama", **settings))
    return load_for_parity(EngineConfig(model=model, dtype="float32", device="cpu"), with_reference=False)


@pytest.fixture(scope="module")
def first(tiny_model: Any) -> LoadedModel:
    return loaded(tiny_model)


@pytest.fixture(scope="module")
def saved(first: LoadedModel) -> SavedOutputs:
    return generate_outputs(first, {"model": "tiny"}, num_prompts=3, num_tokens=8)


def test_a_file_holds_what_was_saved(saved: SavedOutputs, tmp_path: Path) -> None:
    saved.write(tmp_path / "a.json")
    read = read_outputs(tmp_path / "a.json")
    assert (read.origin, read.vocab_size) == (saved.origin, saved.vocab_size)
    for one, other in zip(read.outputs, saved.outputs, strict=True):
        assert (one.name, one.prompt, one.tokens) == (other.name, other.prompt, other.tokens)
        assert len(one.tokens) == 8
        assert torch.equal(one.top_ids, other.top_ids)
        torch.testing.assert_close(one.top_logprobs, other.top_logprobs, atol=1e-7, rtol=0)
        assert one.top_ids[:, 0].tolist() == list(one.tokens)  # greedy


def test_the_same_model_is_as_before(first: LoadedModel, saved: SavedOutputs, tmp_path: Path) -> None:
    saved.write(tmp_path / "a.json")
    found = compare_outputs(first, read_outputs(tmp_path / "a.json"))
    assert (found.num_positions, found.same_token, found.divergences) == (24, 1.0, ())
    assert abs(found.mean_kl) <= abs(found.largest_kl) < 1e-6


@pytest.mark.parametrize("top", [saved_outputs.TOP, 4])
def test_another_model_is_compared_after_the_saved_tokens(
    tiny_model: Any, first: LoadedModel, top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_outputs, "TOP", top)
    saved = generate_outputs(first, {}, num_prompts=3, num_tokens=8)
    other = loaded(tiny_model, seed=1)
    found = compare_outputs(other, saved)
    plain, wanted, same, parted = Reference(other.model), [], [], []
    for one in saved.outputs:
        logits = plain.logits([*one.prompt, *one.tokens], len(one.prompt))
        grouped = logits.double().log_softmax(dim=-1).gather(1, one.top_ids)
        rows = [
            torch.cat([known, (1 - known.exp().sum(1, keepdim=True)).clamp(min=1e-12).log()], dim=1)
            for known in (one.top_logprobs, grouped)
        ]
        wanted.append(kl_divergence(*rows))
        equal = logits.argmax(1) == torch.tensor(one.tokens)
        same.append(equal)
        parted.append((one.name, int((~equal).nonzero()[0])))
    kl = torch.cat(wanted)
    assert found.num_positions == len(kl) == 24
    assert found.mean_kl == pytest.approx(float(kl.mean()), rel=1e-4)
    assert found.largest_kl == pytest.approx(float(kl.max()), rel=1e-4)
    assert found.same_token == pytest.approx(float(torch.cat(same).double().mean()))
    assert sorted((one.prompt, one.position) for one in found.divergences) == sorted(parted)
    assert found.kl_by_prompt[saved.outputs[0].name] == pytest.approx(float(wanted[0].mean()), rel=1e-4)


def test_a_model_with_another_vocabulary_is_refused(first: LoadedModel, saved: SavedOutputs) -> None:
    with pytest.raises(LlmschedError, match="7 tokens in its vocabulary"):
        compare_outputs(first, SavedOutputs({}, 7, saved.outputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "lacks the format marker"),
        ({"version": 2}, "has version 2 of the format, and this llmsched reads 1"),
        ({"outputs": []}, "it has no outputs"),
        ({"outputs": [{"name": "p"}]}, "top_ids"),
        ({"outputs": None}, "was not written by verify --save"),
    ],
)
def test_other_files_are_refused(saved: SavedOutputs, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "a.json"
    saved.write(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(LlmschedError, match=message):
        read_outputs(file)
