"""The engine's output equals that of plain transformers however it is scheduled, and the comparison finds faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import EOS, PARITY_CHECKS, generate, make_engine, prompt, sampling, tokenizer
from fake_graphs import FakeRecorder
from tiny_models import ARCHITECTURES, MAX_POSITION, RECURRENT, VOCAB_SIZE, build_model

from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError
from llmsched.engine.executor import sampler, torch_executor
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.kv import manager
from llmsched.engine.kv.prefix_cache import PrefixCache
from llmsched.engine.kv.prefix_tree import NO_HIT
from llmsched.engine.kv.swap import SwapSpace
from llmsched.engine.model.loader import ModelInfo
from llmsched.engine.parity import verification as run
from llmsched.engine.parity.cases import make_prompts
from llmsched.engine.parity.logit_comparison import (
    Continuation,
    Divergence,
    ParityReport,
    Reference,
    Tolerance,
    _divergence,
)
from llmsched.engine.parity.verification import LoadedModel, check_parity
from llmsched.engine.scheduler.scheduler import Scheduler
from llmsched.kernels.cpu import ops


def subject(arch: str, dtype: torch.dtype = torch.float32, block_size: int = 16) -> LoadedModel:
    info = ModelInfo(arch, arch, VOCAB_SIZE, MAX_POSITION, frozenset({EOS}))
    return LoadedModel(build_model(arch, seed=3).to(dtype), info, tokenizer(), "cpu", dtype, block_size)


def compare(arch: str, dtype: torch.dtype = torch.float32) -> ParityReport:
    return check_parity(subject(arch, dtype), num_prompts=3, num_tokens=8)


# -- the promise ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *RECURRENT, "gemma3n"])  # gemma3n: layers that share KV
def test_tokens_and_logits_are_those_of_transformers(arch: str) -> None:
    report = check_parity(subject(arch), num_prompts=4, num_tokens=18)
    layout = subject(arch).layout
    names = [name for name in PARITY_CHECKS if layout.num_groups or "preemption" not in name]
    assert [check.name for check in report.checks] == names
    for check in report.checks:
        assert check.tokens_equal, check
        assert check.max_abs_logit_diff is not None
        assert check.max_abs_logit_diff < 1e-4, check
        assert check.ok, check
    positions = {check.name: len(check.differences) for check in report.checks}
    assert positions["alone"] == positions["chunks of 7"] == 4 * 18
    assert positions["mixed batch"] == 10 * 18
    assert positions["prefix hits"] == 8 * 18
    details = {check.name: check.detail for check in report.checks}
    hits = "32, 0, 0, 0, 0, 32, 32" if layout.recurrent else "47, 15, 16, 16, 31, 32, 32"
    assert details["prefix hits"] == f"{hits} cached tokens"
    if layout.num_groups:
        assert int(details["preemption"].split()[0]) >= (1 if layout.window_groups else 2)
        assert int(details["preemption, swap"].split()[-3]) >= (1 if layout.window_groups else 2)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt_oss"])
def test_bfloat16_outputs_are_equal_up_to_rounding(arch: str) -> None:
    report = compare(arch, torch.bfloat16)
    assert report.ok
    assert all(parting.explained for check in report.checks for parting in check.divergences)


def test_graphs_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, capture = FakeRecorder(), TorchExecutor.capture
    monkeypatch.setattr(TorchExecutor, "capture", lambda *arguments: capture(*arguments, record=recorder))
    assert check_parity(subject("llama"), num_prompts=2, num_tokens=6).ok
    assert len(set(recorder.replays)) > 2


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_other_block_sizes(block_size: int) -> None:
    report = check_parity(subject("qwen3", block_size=block_size), num_prompts=2, num_tokens=6)
    assert report.ok
    assert all(check.tokens_equal for check in report.checks)


# -- what it compares with -------------------------------------------------------------------------------------


def test_the_reference_is_generate() -> None:
    """Compare with generate for any generation_config: end-of-sequence, penalties, sampling."""
    plain = build_model("llama", seed=3)
    token_ids = list(range(20, 50))
    expected = plain.generate(
        torch.tensor([token_ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=3
    )
    plain.generation_config.repetition_penalty = 3.0
    plain.generation_config.eos_token_id = int(expected[0, -10])
    plain.generation_config.do_sample = True
    found = Reference(plain).continuation(token_ids, 12)
    assert list(found.token_ids) == expected[0, 30:].tolist()
    assert found.logits.shape == (12, VOCAB_SIZE)
    assert found.logits.argmax(dim=1).tolist() == list(found.token_ids)
    assert found.spread < 1e-4
    assert plain.generation_config.repetition_penalty == 3.0


def test_prompts_depend_on_the_seed_alone() -> None:
    made = [make_prompts(tokenizer(), VOCAB_SIZE, count=5, block_size=16, seed=seed) for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2]
    prompts = made[0]
    base = prompts.general[0].token_ids
    assert len(base) == 48
    assert prompts.shared == (15, 16, 17, 31, 32, 33)
    for edge, shared in zip(prompts.edges, prompts.shared, strict=True):
        assert edge.token_ids[:shared] == base[:shared]
        assert edge.token_ids[shared] != base[shared]
    assert [len(edge.token_ids) for edge in prompts.edges[:4]] == [32] * 4
    assert len({made.name for made in prompts.all}) == len(prompts.all)
    assert all(0 <= token < VOCAB_SIZE for made in prompts.all for token in made.token_ids)


def test_a_check_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"context of 512; allowed is 4\d\d or less"):
        check_parity(subject("llama"), num_prompts=3, num_tokens=500)
    monkeypatch.setattr(run, "MAX_LOGIT_BYTES", 1 << 10)
    with pytest.raises(ConfigError, match="use fewer"):
        check_parity(subject("llama"), num_prompts=3, num_tokens=8)


# -- faults ---------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def attention(**changes: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Return a function that patches attention: each keyword in `changes` gets the value that its function returns."""
    right, prepare_right = ops.paged_attention, ops.prepare_attention

    def wrong(*tensors: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return right(*tensors, **keywords | {name: change(keywords[name]) for name, change in changes.items()})

    def prepare(layers: Any, *others: Any) -> Any:
        change = changes.get("window", lambda window: window)
        return prepare_right([layer._replace(window=change(layer.window)) for layer in layers], *others)

    def inject(patch: Patch) -> None:
        patch.setattr(ops, "paged_attention", wrong)
        patch.setattr(ops, "prepare_attention", prepare)

    return inject


def last_slot_not_written(patch: Patch) -> None:
    def without_last(right: Any) -> Any:
        def wrong(*tensors: torch.Tensor, **options: Any) -> Any:
            *others, slots = tensors
            return right(*others, torch.where(slots % 16 == 15, -1, slots), **options)

        return wrong

    for name in ("write_kv", "rotate_and_write"):
        patch.setattr(ops, name, without_last(getattr(ops, name)))


def positions_restart_in_each_chunk(patch: Patch) -> None:
    right = torch_executor.pack

    def wrong(*arguments: Any) -> Any:
        batch = right(*arguments)
        if len(batch.input_ids) > len(batch.sampling_rows):
            batch.positions[:] -= batch.positions[0]
        return batch

    patch.setattr(torch_executor, "pack", wrong)


def hits_reach_a_token_too_far(patch: Patch) -> None:
    """Inject a fault: the first token after a prefix hit counts as computed."""
    right = manager.KVManager.admit

    def wrong(self: Any, request: Any, hit: Any) -> None:
        right(self, request, hit)
        if hit.nodes and request.num_tokens > request.num_computed_tokens + 1:
            request.num_computed_tokens += 1

    patch.setattr(manager.KVManager, "admit", wrong)


def preemption_forgets_the_output(patch: Patch) -> None:
    right = Scheduler._preempt

    def wrong(self: Scheduler, request: Any, reason: str) -> None:
        right(self, request, reason)
        del request.token_ids[request.num_prompt_tokens :]

    patch.setattr(Scheduler, "_preempt", wrong)


def swapped_blocks_come_back_out_of_order(patch: Patch) -> None:
    right = SwapSpace.take

    def wrong(self: SwapSpace) -> Any:
        outs, ins = right(self)
        slots, blocks = [slot for slot, _ in ins], [block for _, block in ins]
        return outs, list(zip(slots, reversed(blocks), strict=True))

    patch.setattr(SwapSpace, "take", wrong)


def the_second_best_token_is_chosen(patch: Patch) -> None:
    right = sampler.result_of
    patch.setattr(sampler, "result_of", lambda token, *rest: right((token + 1) % VOCAB_SIZE, *rest))


#: Name -> (architecture, fault, checks that must find it; the others must not).
FAULTS: dict[str, tuple[str, Callable[[Patch], None], tuple[str, ...]]] = {
    "window one too wide": ("mistral", attention(window=lambda window: window + 1), PARITY_CHECKS),
    "window one too narrow": ("gemma3", attention(window=lambda window: window and window - 1), PARITY_CHECKS),
    "scale off by 1%": ("llama", attention(scale=lambda scale: scale * 1.01), PARITY_CHECKS),
    "soft-capping ignored": ("gemma2", attention(softcap=lambda softcap: None), PARITY_CHECKS),
    "sinks ignored": ("gpt_oss", attention(sinks=lambda sinks: None), PARITY_CHECKS),
    "a slot not written": ("llama", last_slot_not_written, PARITY_CHECKS),
    "positions restart": (
        "qwen2",
        positions_restart_in_each_chunk,
        ("chunks of 1", "chunks of 7", "chunks of 16", "chunks of 17", "mixed batch", "prefix hits"),
    ),
    "a hit too far": ("phi3", hits_reach_a_token_too_far, ("prefix hits",)),
    "preemption forgets": ("llama", preemption_forgets_the_output, PARITY_CHECKS[-3:]),
    "swapped KV comes back out of order": ("llama", swapped_blocks_come_back_out_of_order, PARITY_CHECKS[-1:]),
    "wrong token": ("llama", the_second_best_token_is_chosen, PARITY_CHECKS),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, fault, finders = FAULTS[name]
    fault(monkeypatch)
    report = compare(arch)
    assert not report.ok
    assert {check.name for check in report.checks if not check.ok} >= set(finders)


@pytest.mark.parametrize("name", ["window one too wide", "soft-capping ignored", "sinks ignored", "a slot not written"])
def test_a_fault_is_found_in_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, fault, finders = FAULTS[name]
    fault(monkeypatch)
    assert {check.name for check in compare(arch, torch.bfloat16).checks if not check.ok} >= set(finders)


def test_a_wrong_token_is_not_a_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    the_second_best_token_is_chosen(monkeypatch)
    alone = compare("llama").checks[0]
    assert not alone.tokens_equal
    assert [parting.position for parting in alone.divergences] == [0, 0, 0]
    assert not any(parting.explained for parting in alone.divergences)
    assert alone.max_abs_logit_diff is not None
    assert alone.max_abs_logit_diff < 1e-4, "logits are compared after the engine's own tokens"


def test_a_check_fails_if_its_subject_did_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "find", lambda self, request: NO_HIT)
    monkeypatch.setattr(
        Scheduler, "_secure_memory", lambda self, _: [self.kv.blocks.grow(r) for r in self.running] and False
    )
    right = run.engine_for
    monkeypatch.setattr(run, "engine_for", lambda subject, check: right(subject, replace(check, num_blocks=100)))
    problems = {check.name: check.problems for check in compare("llama").checks if not check.ok}
    assert problems == {
        "prefix hits": ["cached tokens should be 47, 15, 16, 16, 31, 32, 32"],
        "preemption": ["no request was preempted"],
        "preemption, prefix cache": ["no request was preempted"],
        "preemption, swap": ["no request was preempted", "no request was swapped in"],
    }


def test_an_engine_that_raises_fails_its_check_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Scheduler._preempt

    def wrong(self: Scheduler, request: Any, reason: str) -> None:
        right(self, request, reason)
        raise RuntimeError("no such\nblock")

    monkeypatch.setattr(Scheduler, "_preempt", wrong)
    report = compare("llama")
    assert [check.name for check in report.checks if not check.ok] == list(PARITY_CHECKS[-3:])
    assert report.checks[-1].problems == ["the engine failed: RuntimeError: no such block"]
    assert report.checks[-1].max_abs_logit_diff is None


def test_logits_that_are_not_numbers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(engine: Engine, executor: Any, *more: Any) -> Any:
        answers = right(engine, executor, *more)
        answers[0].logits[2] = torch.full((VOCAB_SIZE,), float("nan"))
        return answers

    right = run.run_wave
    monkeypatch.setattr(run, "run_wave", wrong)
    alone = compare("llama").checks[0]
    assert not alone.ok
    assert alone.problems == [f"{name}: some logits are not numbers" for name in ("text 0", "ids 1", "text 2")]


# -- tolerance ------------------------------------------------------------------------------------------------


def test_tolerance() -> None:
    single = Tolerance(torch.float32)
    assert single.limit(5.0) == 1e-4
    assert single.limit(40.0) == pytest.approx(2e-4)
    differences = torch.tensor([0.0, 0.1, 3.0])
    for dtype, routed, judged in (
        (torch.float32, True, 3.0),
        (torch.bfloat16, False, 3.0),
        (torch.bfloat16, True, 0.1),
    ):
        assert Tolerance(dtype, routed).judged(differences) == pytest.approx(judged)
    assert Tolerance(torch.bfloat16).limit(10.0) == pytest.approx(6 * 2**-7 * 10)
    assert Tolerance.of(build_model("gpt_oss"), torch.bfloat16).routed
    assert not Tolerance.of(build_model("llama"), torch.bfloat16).routed


def test_a_divergence_is_explained_only_by_a_logit_difference_as_large() -> None:
    expected = Continuation((1,), torch.tensor([[0.0, 5.0, 4.9, 1.0]]), 0.0)
    near = _divergence("p", 0, expected, 2, torch.tensor([0.0, 4.94, 4.96, 1.0]))
    assert near == Divergence("p", 0, 1, 2, pytest.approx(0.1, abs=1e-6), True)
    far = _divergence("p", 0, expected, 2, torch.tensor([0.0, 5.01, 4.9, 1.0]))
    assert not far.explained


def test_the_engine_is_watched_without_being_changed() -> None:
    """Check that on_logits receives exactly the logits that the greedy tokens come from."""
    engine = make_engine()
    executor: Any = engine.executor
    seen: list[int] = []
    executor.on_logits = lambda sequences, logits: seen.extend(logits.argmax(dim=1).tolist())
    assert generate(engine, (prompt(9), sampling()))[0].tokens == seen
