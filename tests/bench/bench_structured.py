"""Structured output: what a schema costs, and whether outputs are valid, MEASURED.

python tests/bench/bench_structured.py [--rounds 5] [--schemas 10000]

Cost: 32 streams of 64 tokens on the demo model, with a JSON schema and without one in turn, as `--rounds` pairs. The
compilation is not counted. Validity: outputs of the small random model of the tests for random schemas; each that ends
by itself is checked with the jsonschema package. 10,000 take about 20 minutes on a core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from llmsched.engine import Engine, EngineConfig, SamplingParams, build_engine
from llmsched.engine.grammar.compiler import Grammar
from llmsched.engine.grammar.spec import GrammarSpec

STREAMS, TOKENS = 32, 64
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "email": {"type": "string", "format": "email"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["customer", "partner", "other"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {"anyOf": [{"$ref": "#/$defs/address"}, {"type": "null"}]},
    },
    "required": ["name", "email", "age", "kind", "tags", "address"],
    "additionalProperties": False,
}
ADDRESS = {
    "type": "object",
    "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
}
#: No stream ends before its last token.
SCHEMA = {"type": "array", "items": PERSON, "minItems": 100, "$defs": {"address": ADDRESS}}


def tokens_per_second(engine: Engine, grammar: Grammar | None, name: str) -> float:
    prompt = engine.tokenizer.encode("Write about the people whom you know, as a list in JSON.")
    for stream in range(STREAMS):
        params = SamplingParams(temperature=0.8, seed=stream, max_tokens=TOKENS, ignore_eos=True, grammar=grammar)
        engine.add_request(f"{name} {stream}", prompt, params)
    start, count = time.perf_counter(), 0
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            count += len(output.token_ids)
    assert count == STREAMS * TOKENS
    return count / (time.perf_counter() - start)


def measure_cost(rounds: int) -> None:
    engine = build_engine(EngineConfig("demo", max_model_len=512, max_num_seqs=STREAMS))
    start = time.perf_counter()
    compiler = engine.grammars
    first = time.perf_counter()
    grammar = compiler.compile(GrammarSpec.json_schema(SCHEMA), "schema")
    print(f"vocabulary {first - start:.2f} s, schema {1000 * (time.perf_counter() - first):.1f} ms")
    tokens_per_second(engine, None, "warm-up")
    free, constrained = [], []
    for turn in range(rounds):
        free.append(tokens_per_second(engine, None, f"free {turn}"))
        constrained.append(tokens_per_second(engine, grammar, f"schema {turn}"))
        print(f"tokens/s: {free[-1]:.1f} without, {constrained[-1]:.1f} with the schema; load {os.getloadavg()[0]:.1f}")
    costs = [1 - with_schema / without for without, with_schema in zip(free, constrained, strict=True)]
    print(f"median cost {statistics.median(costs):.1%}, from {min(costs):.1%} to {max(costs):.1%}")


def check_validity(count: int) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
    from random_outputs import check_outputs

    ended = cut = 0
    for low in range(0, count, 200):
        more = check_outputs(range(low, min(low + 200, count)))
        ended, cut = ended + more[0], cut + more[1]
        print(f"{ended + cut} schemas: {ended} outputs ended and are valid, {cut} were cut", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schemas", type=int, default=10_000)
    options = parser.parse_args()
    if options.rounds:
        measure_cost(options.rounds)
    check_validity(options.schemas)


if __name__ == "__main__":
    main()
