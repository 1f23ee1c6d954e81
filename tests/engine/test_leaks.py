"""Nothing is kept of finished requests but the latest ledger entries and summaries."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
from engines import generate, make_engine, prompt, sampling

from llmsched.engine import core
from llmsched.engine.core import Engine
from llmsched.engine.request import FinishReason
from llmsched.engine.sampling_params import SamplingParams
from llmsched.engine.scheduler import ledger

#: Ways out of the engine into what it shares with everything else.
OUTSIDE = (ModuleType, type, BuiltinFunctionType, CodeType, FrameType, torch.Tensor, torch.nn.Module)
KEPT = 4
NAME = "request-that-has-ended-"


def reachable(root: Any) -> list[Any]:
    """Return all objects reachable from `root`."""
    seen, found, pending = {id(root)}, [root], [root]
    while pending:
        thing = pending.pop()
        inside = thing.__closure__ or () if isinstance(thing, FunctionType) else gc.get_referents(thing)
        for part in inside:
            if id(part) not in seen and not isinstance(part, OUTSIDE):
                seen.add(id(part))
                found.append(part)
                pending.append(part)
    return found


def names_in(engine: Engine) -> set[str]:
    """Return the names of finished requests that are reachable from the engine."""
    strings = {thing for thing in reachable(engine) if isinstance(thing, str)}
    return {text.split("/")[0] for text in strings if NAME in text}


SAMPLINGS = {
    "penalties": sampling(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5, max_tokens=4),
    "seeded": sampling(temperature=1.0, seed=5, top_p=0.9, n=2, max_tokens=4),
    "biased": sampling(logit_bias={7: 3.0}, min_tokens=3, max_tokens=5, stop=("x",), logprobs=2),
    "prompt only": sampling(max_tokens=0, prompt_logprobs=1),
}


@pytest.mark.parametrize(
    ("caching", "looks_ahead"),
    [(True, False), (False, False), (True, True)],
    ids=["cache", "no cache", "cache, with a step in flight"],
)
@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_finished_requests_are_released(
    params: SamplingParams, caching: bool, looks_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_REQUESTS", KEPT)
    monkeypatch.setattr(core, "MAX_SUMMARIES", KEPT)
    engine = make_engine(num_blocks=16, enable_prefix_caching=caching, looks_ahead=looks_ahead)
    for number in range(12):
        engine.add_request(f"{NAME}{number}", prompt(40, number), params, cache_salt=str(number % 2))
    assert len(names_in(engine)) == 12
    engine.step()
    for number in (3, 11):  # in most cases one that runs and one that waits
        engine.abort(f"{NAME}{number}")
    while engine.has_work():
        engine.step()
    assert engine.stats().finished[FinishReason.ABORT] >= params.n
    # Later ones: their steps tell the executor who has ended, and their entries take the places in the ledger.
    generate(engine, *[(prompt(5), sampling(max_tokens=1))] * KEPT)
    generate(engine, (prompt(5), sampling(max_tokens=1)))
    assert names_in(engine) == set()
