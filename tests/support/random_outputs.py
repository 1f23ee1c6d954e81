"""Outputs of the small model for random schemas, checked with the jsonschema package."""

from __future__ import annotations

import json
from collections.abc import Sequence

import jsonschema
from engines import generate_all, make_engine, prompt, sampling, tokenizer
from random_schemas import SchemaMaker
from tiny_models import VOCAB_SIZE

from llmsched.engine.grammar.spec import GrammarSpec
from llmsched.engine.request import FinishReason

#: Most tokens of an output.
MAX_TOKENS = 160


def check_outputs(seeds: Sequence[int], batch: int = 120) -> tuple[int, int]:
    """Generate one output for the schema of each seed, `batch` at a time.

    Returns how many outputs ended by themselves and how many were cut. Raises AssertionError if an output that ended is
    not valid, or if any output failed.
    """
    blanks = {i: -100.0 for i in range(VOCAB_SIZE) if (text := tokenizer().token_bytes(i)) and not text.strip()}
    bias = blanks | {tokenizer().encode(mark, add_special_tokens=False)[0]: 3.0 for mark in '"}],'}
    engine = make_engine(num_blocks=600)
    ended = cut = 0
    for low in range(0, len(seeds), batch):
        part = seeds[low : low + batch]
        schemas = [SchemaMaker(seed).schema() for seed in part]
        wanted = []
        for seed, schema in zip(part, schemas, strict=True):
            grammar = engine.grammars.compile(GrammarSpec.json_schema(schema), "test")
            fields = {"temperature": (0.7, 1.0, 1.5)[seed % 3], "seed": seed, "ignore_eos": False}
            params = sampling(**fields, grammar=grammar, logit_bias=bias, max_tokens=MAX_TOKENS)
            wanted.append((prompt(20, seed), params))
        for seed, schema, (choice,) in zip(part, schemas, generate_all(engine, *wanted), strict=True):
            assert choice.error is None, f"seed {seed}: {choice.error}"
            if choice.finish_reason is FinishReason.STOP:
                ended += 1
                value = json.loads(choice.text)
                jsonschema.Draft202012Validator(schema).validate(value)
            else:
                cut += 1
    return ended, cut
