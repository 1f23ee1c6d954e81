"""Saved outputs of the engine, to compare them with the outputs of another version, setting or device.

The file is JSON: {"format": FORMAT, "version": VERSION, "origin": {...}, "vocab_size": V, "outputs": [...]}. An output
is {"name", "prompt", "tokens", "top_ids", "top_logprobs"}: the token ids of a prompt and of its greedy continuation
and, for each token of the continuation, the ids and natural log-probabilities of the TOP most probable tokens, best
first. `origin` says what computed them: model, device, settings, versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llmsched.engine.core import Engine
from llmsched.engine.errors import LlmschedError
from llmsched.engine.executor.torch_executor import TorchExecutor
from llmsched.engine.parity.cases import ParityCase, ParityPrompt, make_prompts
from llmsched.engine.parity.logit_comparison import EngineOutput, kl_divergence
from llmsched.engine.parity.verification import LoadedModel, check_size, engine_for, run_wave
from llmsched.engine.progress import Progress, silent

FORMAT, VERSION = "llmsched verify outputs", 1
#: Number of tokens whose log-probabilities are saved for each position. The other tokens count as one.
TOP = 64
#: Decimals of a saved log-probability.
_DECIMALS = 7
#: Least probability of the tokens that are not saved, so that its logarithm is finite.
_LEAST = 1e-12
#: Least log-probability that is saved, because JSON has no infinity.
_LEAST_LOGPROB = -1e4


@dataclass(frozen=True, slots=True)
class SavedOutput:
    name: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top_ids: torch.Tensor  # int64 [tokens, TOP]
    top_logprobs: torch.Tensor  # float64 [tokens, TOP]


@dataclass(frozen=True, slots=True)
class SavedOutputs:
    origin: Mapping[str, Any]
    vocab_size: int
    outputs: tuple[SavedOutput, ...]

    def write(self, path: Path) -> None:
        """Write the file. Raises OSError."""
        outputs = [
            {
                "name": one.name,
                "prompt": one.prompt,
                "tokens": one.tokens,
                "top_ids": one.top_ids.tolist(),
                "top_logprobs": [[round(value, _DECIMALS) for value in row] for row in one.top_logprobs.tolist()],
            }
            for one in self.outputs
        ]
        head = {"format": FORMAT, "version": VERSION, "origin": self.origin, "vocab_size": self.vocab_size}
        path.write_text(json.dumps({**head, "outputs": outputs}, allow_nan=False) + "\n", encoding="utf-8")


class FirstDivergence(NamedTuple):
    """First token of an output that differs from the saved one."""

    prompt: str
    position: int  # in the output, from 0
    expected: int
    got: int


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """Comparison of the engine with saved outputs, in nats and with the saved tokens as context of every position."""

    num_positions: int
    mean_kl: float  # mean of KL(saved || found) over all positions
    largest_kl: float
    same_token: float  # share of positions with the same most probable token
    divergences: tuple[FirstDivergence, ...]  # one for each output that differs
    kl_by_prompt: Mapping[str, float]  # means


def read_outputs(path: Path) -> SavedOutputs:
    """Read a file that `SavedOutputs.write` has written. Raises LlmschedError if it cannot be read."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError("it lacks the format marker")
        if body["version"] != VERSION:
            raise LlmschedError(
                f"{path} has version {body['version']} of the format, and this llmsched reads {VERSION}; save it again"
            )
        outputs = tuple(_read_output(one) for one in body["outputs"])
        if not outputs:
            raise ValueError("it has no outputs")
        return SavedOutputs(dict(body["origin"]), int(body["vocab_size"]), outputs)
    except OSError as problem:
        raise LlmschedError(f"{path}: {problem.strerror}") from problem
    except (ValueError, TypeError, KeyError, RecursionError) as problem:
        raise LlmschedError(f"{path} was not written by verify --save, or is damaged: {problem}") from problem


def _read_output(body: Mapping[str, Any]) -> SavedOutput:
    ids, logprobs = torch.tensor(body["top_ids"]), torch.tensor(body["top_logprobs"], dtype=torch.float64)
    prompt, tokens = (tuple(map(int, body[name])) for name in ("prompt", "tokens"))
    if not prompt or not tokens or ids.dim() != 2 or ids.shape != logprobs.shape or len(ids) != len(tokens):
        raise ValueError(f"output {body['name']!r} has {len(tokens)} tokens and rows of shape {tuple(ids.shape)}")
    return SavedOutput(str(body["name"]), prompt, tokens, ids, logprobs)


def generate_outputs(
    loaded: LoadedModel, origin: Mapping[str, Any], *, num_prompts: int, num_tokens: int, seed: int = 0
) -> SavedOutputs:
    """Continue `num_prompts` prompts of varied length in one batch, each by `num_tokens` greedy tokens.

    Raises ConfigError if a prompt and its output exceed the model's context.
    """
    vocab_size = loaded.info.vocab_size
    prompts = make_prompts(loaded.tokenizer, vocab_size, count=num_prompts, block_size=loaded.block_size, seed=seed)
    check_size(loaded, prompts, num_tokens)
    saved = []
    with _running(loaded, prompts.general, num_tokens) as running:
        outputs = _continue(running, dict.fromkeys(prompts.general, num_tokens))
    for output in outputs:
        logprobs = torch.stack(output.logits).double().log_softmax(dim=-1).clamp(min=_LEAST_LOGPROB)
        top = logprobs.topk(min(TOP, vocab_size), dim=-1)
        ids = output.prompt.token_ids
        saved.append(SavedOutput(output.prompt.name, ids, tuple(output.token_ids), top.indices, top.values))
    return SavedOutputs(origin, vocab_size, tuple(saved))


def compare_outputs(loaded: LoadedModel, saved: SavedOutputs, progress: Progress = silent) -> OutputComparison:
    """Compute the log-probabilities of all saved tokens with the engine, and compare.

    Raises LlmschedError if the model has another vocabulary or too short a context.
    """
    _check_model(loaded, saved)
    by_name = {one.name: one for one in saved.outputs}
    begun = dict.fromkeys(by_name, 0)  # position from which an output is still to be compared
    divergences: dict[str, FirstDivergence] = {}
    kl: dict[str, list[torch.Tensor]] = {name: [] for name in by_name}
    total, differing = sum(len(one.tokens) for one in saved.outputs), 0
    with _running(loaded, [_prompt(one, len(one.tokens) - 1) for one in saved.outputs], 1) as running:
        while begun:
            wave = {_prompt(by_name[name], start): len(by_name[name].tokens) - start for name, start in begun.items()}
            for output in _continue(running, wave):
                one, start = by_name[output.prompt.name], begun.pop(output.prompt.name)
                count, got = _common(one.tokens[start:], output.token_ids)
                kl[one.name].append(_divergence(one, start, torch.stack(output.logits[:count])))
                if got is None:
                    continue
                differing, place = differing + 1, start + count - 1
                divergences.setdefault(one.name, FirstDivergence(one.name, place, one.tokens[place], got))
                if place + 1 < len(one.tokens):
                    begun[one.name] = place + 1
            progress("comparing", sum(len(rows) for each in kl.values() for rows in each), total)
    joined = {name: torch.cat(rows) for name, rows in kl.items()}
    every = torch.cat(list(joined.values()))
    return OutputComparison(
        num_positions=total,
        mean_kl=float(every.mean()),
        largest_kl=float(every.max()),
        same_token=1 - differing / total,
        divergences=tuple(divergences.values()),
        kl_by_prompt={name: float(rows.mean()) for name, rows in joined.items()},
    )


def _prompt(saved: SavedOutput, num_tokens: int) -> ParityPrompt:
    """Return the prompt with the first `num_tokens` tokens of the saved output."""
    return ParityPrompt(saved.name, saved.prompt + saved.tokens[:num_tokens])


def _common(expected: ListLike[int], found: ListLike[int]) -> tuple[int, int | None]:
    """Return the number of positions with the same context, and the token at the last one if it differs, else None."""
    for place, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one != other:
            return place + 1, other
    return len(expected), None


def _check_model(loaded: LoadedModel, saved: SavedOutputs) -> None:
    if saved.vocab_size != loaded.info.vocab_size:
        raise LlmschedError(
            f"the saved outputs are of a model with {saved.vocab_size} tokens in its vocabulary, and "
            f"{loaded.info.name} has {loaded.info.vocab_size}; allowed is a model with the same vocabulary"
        )
    longest = max(len(one.prompt) + len(one.tokens) for one in saved.outputs)
    if longest > loaded.info.max_position:
        raise LlmschedError(
            f"the longest saved output ends at token {longest}, and the context of {loaded.info.name} has "
            f"{loaded.info.max_position}; save outputs with a smaller --num-tokens"
        )


def _divergence(saved: SavedOutput, start: int, logits: torch.Tensor) -> torch.Tensor:
    """Return KL(saved || found) [n] in nats at the positions from `start` on, for logits [n, V].

    All tokens that are not saved count as one token, so the result is at most the KL divergence of all tokens.
    """
    rows = slice(start, start + len(logits))
    found = logits.double().log_softmax(dim=-1).gather(1, saved.top_ids[rows])
    return kl_divergence(*(_with_rest(each) for each in (saved.top_logprobs[rows], found)))


def _with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """Append to [n, k] the log-probability of all other tokens together."""
    rest = (1 - logprobs.exp().sum(dim=-1, keepdim=True)).clamp(min=_LEAST).log()
    return torch.cat([logprobs, rest], dim=-1)


@contextmanager
def _running(
    loaded: LoadedModel, prompts: ListLike[ParityPrompt], num_tokens: int
) -> Iterator[tuple[Engine, TorchExecutor]]:
    """Yield an engine that can continue all these prompts at the same time, each by `num_tokens` tokens."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    width = sum(loaded.layout.width(len(prompt.token_ids) + num_tokens) for prompt in prompts)
    blocks = loaded.layout.num_groups * (width + 1)
    engine, executor = engine_for(loaded, ParityCase("saved outputs", (tuple(prompts),), longest, blocks, num_tokens))
    try:
        yield engine, executor
    finally:
        executor.close()


def _continue(running: tuple[Engine, TorchExecutor], lengths: Mapping[ParityPrompt, int]) -> list[EngineOutput]:
    """Return the greedy continuations of all prompts in one batch. Raises LlmschedError if one fails."""
    outputs = run_wave(*running, lengths)
    for output in outputs:
        if output.error is not None or not output.token_ids or len(output.token_ids) != len(output.logits):
            raise LlmschedError(f"{output.prompt.name}: the engine failed: {output.error or 'tokens without logits'}")
        if torch.stack(output.logits).isnan().any():
            raise LlmschedError(f"{output.prompt.name}: some of the engine's logits are not numbers")
    return outputs
