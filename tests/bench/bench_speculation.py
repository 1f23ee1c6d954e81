"""Speculative decoding against plain decoding on the demo model, MEASURED.

python tests/bench/bench_speculation.py [--rounds 5] [--clients 1 8] [--loads edits summaries prose] [--tokens 200]

Tokens/s with `--speculative` auto and ngram as multiples of those without, on one engine, in turn: medians over the
rounds, with the smallest and the largest. Edits are the second of two renamings in a conversation about code, summaries
use phrases of a text, and prose is sampled at temperature 1, so that it hardly repeats. CPU ratios compare the CPU time
that the process used, which other programs change less. About 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import time
from dataclasses import replace
from typing import Any, NamedTuple

from llmsched.engine import Engine, EngineConfig, SamplingParams, build_engine
from llmsched.engine.config import Speculation
from llmsched.engine.text import stop
from llmsched.engine.text.chat_template import render_chat

MODES: tuple[Speculation, ...] = ("off", "auto", "ngram")
#: Code, and names to replace in two edits, one after the other.
EDITS: tuple[tuple[Any, str, str, str, str], ...] = (
    (stop.StopMatcher.push, "buffer", "text_so_far", "certain", "num_certain"),
    (stop._borders, "borders", "table", "length", "size"),
    (stop.StopMatcher._advance, "matched", "count", "met", "longest"),
    (stop.StopMatcher.flush, "held", "kept", "matched", "counts"),
)
SUBJECTS = ("a lighthouse keeper", "two brothers", "a long winter", "the last train", "a garden", "a lost letter")
ARTICLE = """The Amazon is the largest river in the world by the volume of water that it carries. It rises in the Andes
of Peru and flows east for about 6,400 kilometres through Peru, Colombia and Brazil to the Atlantic Ocean. Its basin
covers about seven million square kilometres, most of it rain forest, and is home to a tenth of all known species. In
the rainy season the river can be more than 40 kilometres wide. No bridge crosses the main river, because its banks
are soft and few roads reach them; people and goods travel by boat. Scientists estimate that the forest stores about
120 billion tonnes of carbon, and they warn that fires and cattle farming have destroyed almost a fifth of it since
1970."""
QUESTIONS = (
    "Summarize the text.",
    "What does the text say?",
    "Shorten the text.",
    "Write the main points of the text.",
)


class Run(NamedTuple):
    outputs: dict[str, list[int]]
    seconds: float
    cpu_seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs.values()))


def prompts_of(engine: Engine, load: str, count: int) -> list[list[int]]:
    """Return `count` prompts of a load."""
    return [
        render_chat(engine.tokenizer, [{"role": role, "content": text} for role, text in _conversation(load, number)])
        for number in range(count)
    ]


def _conversation(load: str, number: int) -> list[tuple[str, str]]:
    if load == "prose":
        return [("user", f"Write a long story about {SUBJECTS[number % len(SUBJECTS)]}.")]
    if load == "summaries":
        return [("user", f"{ARTICLE}\n\n{QUESTIONS[number % len(QUESTIONS)]}")]
    function, old, new, next_old, next_new = EDITS[number % len(EDITS)]
    code = inspect.getsource(function)
    return [
        ("user", f"Rename `{old}` to `{new}` in this code.\n\n```python\n{code}```"),
        ("assistant", f"```python\n{code.replace(old, new)}```"),
        ("user", f"Now rename `{next_old}` to `{next_new}`."),
    ]


def run(engine: Engine, name: str, prompts: list[list[int]], sampling: SamplingParams) -> Run:
    for number, ids in enumerate(prompts):
        engine.add_request(f"{name} {number}", ids, replace(sampling, seed=number))
    outputs: dict[str, list[int]] = {}
    start, cpu = time.perf_counter(), time.process_time()
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            outputs.setdefault(output.request_id.rpartition(" ")[2], []).extend(output.token_ids)
    return Run(outputs, time.perf_counter() - start, time.process_time() - cpu)


def set_mode(engine: Engine, mode: Speculation) -> None:
    """Change the mode, and forget what the engine has learned from earlier steps."""
    engine.prefixes.reset()
    engine.scheduler.config = replace(engine.scheduler.config, speculative=mode)
    engine.scheduler.configure()


def agreement(run: Run, other: Run) -> float:
    """Return the share of outputs that are equal. Rounding can swap two tokens with nearly equal logits."""
    return statistics.fmean(run.outputs[name] == other.outputs[name] for name in run.outputs)


def compare(engine: Engine, load: str, clients: int, rounds: int, num_tokens: int) -> None:
    prompts = prompts_of(engine, load, clients)
    settings: dict[str, Any] = {"temperature": 1.0} if load == "prose" else {"temperature": 0}
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=load == "prose", **settings)
    ratios: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES[1:]}
    same: list[float] = []
    for turn in range(rounds):
        runs: dict[str, Run] = {}
        for mode in MODES if turn % 2 else reversed(MODES):
            set_mode(engine, mode)
            before = engine.stats()
            runs[mode] = run(engine, f"{load} {turn} {mode}", prompts, sampling)
            stats = engine.stats()
            drafted, right = (
                getattr(stats, name) - getattr(before, name) for name in ("draft_tokens", "accepted_tokens")
            )
            print(
                f"  {mode:5} {runs[mode].num_tokens / runs[mode].seconds:6.1f} tokens/s, {stats.steps - before.steps} "
                f"steps, {right} of {drafted} draft tokens right; load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
        plain = runs["off"]
        for mode, found in ratios.items():
            share = runs[mode].num_tokens / plain.num_tokens
            ratio = share * plain.seconds / runs[mode].seconds, share * plain.cpu_seconds / runs[mode].cpu_seconds
            found.append(ratio)
            same.append(agreement(runs[mode], plain))
    for mode, found in ratios.items():
        wall, cpu = (
            f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in zip(*found, strict=True)
        )
        print(f"{load}, {clients} clients, {mode}: tokens/s {wall} times those without; CPU {cpu}", flush=True)
    print(f"{load}, {clients} clients: {statistics.fmean(same):.1%} of the outputs are equal", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--loads", nargs="+", default=["edits", "summaries", "prose"])
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    most = max(options.clients)
    engine = build_engine(
        EngineConfig("demo", max_model_len=2048, max_num_seqs=most, kv_cache_memory_bytes=1 << 30, speculative="auto")
    )
    for load in options.loads:
        for clients in options.clients:
            compare(engine, load, clients, options.rounds, options.tokens)


if __name__ == "__main__":
    main()
