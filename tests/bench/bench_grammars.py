"""Time and memory of grammars that cost much (MEASURED).

Run `python tests/bench/bench_grammars.py [NAME ...]`. For each grammar, a new process compiles it for the demo and
samples 60 tokens at random. Takes about 20 seconds on a quiet core.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from costly_grammars import GRAMMARS

from llmsched.engine.errors import RequestError
from llmsched.engine.grammar.compiler import GrammarCompiler, Vocabulary, token_masks
from llmsched.engine.grammar.spec import JSON_OBJECT
from llmsched.engine.model.loader import load_tokenizer
from llmsched.engine.model.source import locate


def measure(name: str) -> None:
    """Compile one of GRAMMARS and print what it takes."""
    tokenizer = load_tokenizer(locate("demo"))
    compiler = GrammarCompiler(Vocabulary(tokenizer, 49_152, frozenset({2})), lambda seconds: None)
    token_masks([compiler.compile(JSON_OBJECT, name).matcher()])  # what all grammars share
    process, begun = psutil.Process(), time.process_time()
    before = process.memory_info().rss
    try:
        grammar = compiler.compile(GRAMMARS[name], name)
    except RequestError as error:
        print(f"{name:<18} {time.process_time() - begun:8.2f} {str(error)[:80]}", flush=True)
        return
    seconds, compiled = time.process_time() - begun, process.memory_info().rss
    matcher, chance = grammar.matcher(), random.Random(0)
    for _ in range(60):
        bits = np.unpackbits(token_masks([matcher])[0], bitorder="little")
        if matcher.finished or matcher.accept(int(chance.choice(np.flatnonzero(bits)))) is not None:
            break
    sizes = [size / 1e6 for size in (compiled - before, process.memory_info().rss - before, grammar.num_bytes)]
    print(f"{name:<18} {seconds:8.2f} {sizes[0]:9.1f} {sizes[1]:9.1f} {sizes[2]:9.1f}", flush=True)


def main() -> None:
    print(f"{'grammar':<18} {'CPU s':>8} {'MB':>9} {'MB later':>9} {'estimate':>9}", flush=True)
    for name in sys.argv[1:] or GRAMMARS:
        child = multiprocessing.get_context("spawn").Process(target=measure, args=(name,))
        child.start()
        child.join()


if __name__ == "__main__":
    main()
