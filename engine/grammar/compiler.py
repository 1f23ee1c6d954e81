"""Compilation of grammars with llguidance, and the masks of the tokens that they allow."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as ListLike
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from llmsched.engine.errors import QueueFullError, RequestError, one_line
from llmsched.engine.grammar.schema_check import check_schema, check_values, has_free_spacing
from llmsched.engine.grammar.spec import JSON_OPTIONS, GrammarSpec, inline_json, inline_schemas, literals
from llmsched.engine.text.tokenizer import BYTE_TOKEN, check_unicode
from llmsched.engine.threads import in_a_thread

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

    from llmsched.engine.text.tokenizer import Tokenizer

#: Most bytes of a grammar's text by kind. A byte of a schema costs little; a byte of a grammar may cost much.
MAX_BYTES = {"json_schema": 1 << 17, "choice": 1 << 17, "tags": 1 << 17, "regex": 1 << 14, "grammar": 1 << 14}
#: Seconds after which a compilation is given up.
MAX_COMPILE_S = 10.0
#: Most compilations at the same time. One that is given up goes on until it ends, and takes memory.
MAX_COMPILATIONS = 4
_NAMES = {
    "json_schema": "JSON schema",
    "choice": "list of choices",
    "tags": "grammar of tool calls",
    "regex": "regular expression",
    "grammar": "grammar",
}
#: Most compiled grammars that are kept.
MAX_GRAMMARS = 64
#: Most bytes of all compiled grammars together: those that are kept, and those of open requests.
MAX_GRAMMAR_BYTES = 512 << 20
#: Estimate of a grammar's size, which the library does not tell. The grammars of tests/bench/bench_grammars.py held 57
#: to 170 MB for each second of CPU time of their compilation.
_BYTES_PER_SECOND, _LEAST_BYTES = 150e6, 1 << 18
#: llguidance compiles recursively. A chain of 2,000 references overflows the usual 8 MiB, which would end the process.
_STACK_BYTES = 256 << 20
#: By default, where only one text can follow, llguidance allows only the tokens into which it divides that text.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
#: Number of masks from which threads compute them. To wake a thread takes about as long as a mask.
_PARALLEL_MASKS = 8
#: With these limits, a mask takes about 20 ms at most, and a grammar about 100 MB. A request that needs more fails.
_LIMITS = LLParserLimits(
    step_lexer_fuel=50_000, step_max_items=5_000, max_items_in_row=10_000, max_lexer_states=50_000, verbose_errors=False
)


class Vocabulary:
    """Tokens of a model in llguidance's form."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        # A model without an end-of-sequence token gets one whose id is beyond its logits.
        eos = sorted(eos_token_ids) or [vocab_size]
        self.tokens = _texts(tokenizer, vocab_size) + [b""] * (eos == [vocab_size])
        self.special_token_ids = sorted({*eos, *filter(tokenizer.is_special, range(vocab_size))})
        for token_id in self.special_token_ids:
            self.tokens[token_id] = self.tokens[token_id] or f"<|{token_id}|>".encode()
        self.eos_token_id, self.bos_token_id = eos[0], tokenizer.bos_token_id
        self._encode = partial(tokenizer.encode, add_special_tokens=False)
        self.tokenizer = LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=eos)
        #: False if masks cannot be right, because the text of a token depends on the tokens beside it.
        self.is_exact = tokenizer.joins_bytes
        self.threads = LLExecutor() if (os.cpu_count() or 1) > 2 else None
        allowed = np.ones(self.num_words * 32, dtype=bool)
        allowed[eos] = False
        self.not_eos = np.packbits(allowed, bitorder="little").view(np.int32)

    @property
    def num_words(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-len(self.tokens) // 32)

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _texts(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes of each token. If several plain tokens have equal bytes, all but one get b""."""
    texts = tokenizer.vocabulary(vocab_size)
    owners: dict[bytes, int] = {}
    for token_id, text in enumerate(texts):
        if not text or tokenizer.is_special(token_id):
            continue
        other = owners.setdefault(text, token_id)
        if other != token_id:
            # A model writes an ASCII character with its own token, not with the token of its byte.
            is_byte = BYTE_TOKEN.fullmatch(tokenizer.backend.id_to_token(other) or "") is not None
            owners[text], loser = (token_id, other) if is_byte else (other, token_id)
            texts[loser] = b""
    return texts


def _message(state: LLMatcher) -> str:
    """Return llguidance's error as one line, without the line of options that it may quote."""
    lines = state.get_error().removesuffix("<non-verbose/>").splitlines()
    return one_line(ValueError("\n".join(line for line in lines if _OPTIONS.strip() not in line)))


class Grammar:
    """Compiled grammar. It never changes. `num_bytes` is an estimate of its size."""

    def __init__(self, vocabulary: Vocabulary, start: LLMatcher, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._vocabulary = vocabulary
        self._start = start

    def matcher(self, *, ignore_eos: bool = False, after: int | None = None) -> Matcher:
        """Return a matcher for a new output. With `ignore_eos`, the output does not end while it can go on.

        With `after`, the grammar begins after the first token with that id. Before, the output may not end.
        """
        return Matcher(self._vocabulary, self._start.deep_copy(), ignore_eos, after)


class Matcher:
    """State of a grammar after the tokens of one output so far."""

    def __init__(self, vocabulary: Vocabulary, state: LLMatcher, ignore_eos: bool, after: int | None = None) -> None:
        self.vocabulary = vocabulary
        self.state = state
        self.ignore_eos = ignore_eos
        self.after = after  # None: the grammar has begun

    @property
    def finished(self) -> bool:
        """True if no token may follow, or only an end-of-sequence token."""
        return self.after is None and self.state.is_stopped()

    @property
    def error(self) -> str | None:
        """Reason why the grammar cannot go on, if a token was not allowed or a mask took too much work."""
        return _message(self.state) if self.state.is_error() else None

    def accept(self, token_id: int) -> str | None:
        """Add a token to the output. Return an error message if the grammar does not allow it, else None."""
        if self.after is not None:
            if token_id == self.after:
                self.after = None
            return None
        return None if self.state.consume_token(token_id) else self.error


def token_masks(
    matchers: ListLike[Matcher], must_go_on: Mapping[int, Collection[int]] = MappingProxyType({})
) -> npt.NDArray[np.uint8]:
    """Return a mask for the next token of each output: bits [M, B], the bit of token 0 first.

    A set bit allows its token. `must_go_on` has the outputs that should not end yet, by their index in `matchers`, with
    the tokens that would end them. Such a token is allowed only if the grammar allows no others. A matcher that meets
    an error allows no token. All matchers must have the same vocabulary.
    """
    vocabulary = matchers[0].vocabulary
    masks = np.zeros((len(matchers), vocabulary.num_words), dtype=np.int32)
    if vocabulary.threads is not None and len(matchers) >= _PARALLEL_MASKS:
        states = [(matcher.state, row) for row, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(vocabulary.threads, states, masks)
    else:
        for row, matcher in enumerate(matchers):
            fill_next_token_bitmask(matcher.state, masks, row)
    for row, matcher in enumerate(matchers):
        if matcher.after is not None:
            masks[row] = vocabulary.not_eos
        elif matcher.state.is_error():
            masks[row] = 0
        elif (matcher.ignore_eos or row in must_go_on) and (others := masks[row] & vocabulary.not_eos).any():
            masks[row] = others
    found = masks.view(np.uint8)
    for row, token_ids in must_go_on.items():
        _avoid(found[row], token_ids)
    return found


def _avoid(mask: npt.NDArray[np.uint8], token_ids: Collection[int]) -> None:
    """Forbid these tokens, unless the mask allows no others."""
    ids = np.fromiter(token_ids, dtype=np.int64)
    ids = ids[(ids >= 0) & (ids < 8 * len(mask))]
    others = mask.copy()
    np.bitwise_and.at(others, ids >> 3, ~np.left_shift(1, ids & 7).astype(np.uint8))
    if others.any():
        mask[:] = others


class GrammarCompiler:
    """Compiler of grammars for one model. It keeps the latest grammars. Any thread may use it.

    `on_compiled` is called with the seconds that a compilation took.
    """

    def __init__(self, vocabulary: Vocabulary, on_compiled: Callable[[float], None]) -> None:
        self._vocabulary = vocabulary
        self._on_compiled = on_compiled
        self._kept: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._all: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self._num_running = 0
        self._lock = threading.Lock()

    def has(self, spec: GrammarSpec) -> bool:
        """Return True if `compile(spec)` returns at once."""
        return spec in self._kept

    def compile(self, spec: GrammarSpec, param: str) -> Grammar:
        """Return the compiled grammar.

        Raises RequestError for the field `param` if it cannot be compiled, and QueueFullError while MAX_COMPILATIONS
        are running or open requests hold MAX_GRAMMAR_BYTES.
        """
        with self._lock:
            if (grammar := self._kept.get(spec)) is not None:
                self._kept.move_to_end(spec)
                return grammar
        if not self._vocabulary.is_exact:
            message = (
                "this model's tokenizer has tokens whose text depends on other tokens, so outputs cannot be constrained"
            )
            raise RequestError(param, f"{param} is not supported: {message}")
        check_unicode(spec.text, param)
        if (size := len(spec.text.encode())) > MAX_BYTES[spec.kind]:
            raise RequestError(
                param, f"{param} has a {_NAMES[spec.kind]} of {size} bytes; at most {MAX_BYTES[spec.kind]} are allowed"
            )
        self._make_room()
        if (running := self._num_running) >= MAX_COMPILATIONS:
            message = f"{running} grammars are being compiled already; send the request again later"
            raise QueueFullError(message, MAX_COMPILE_S)
        begun = time.monotonic()
        try:
            grammar = in_a_thread(
                lambda: self._compile(spec, param),
                "llmsched-grammar",
                stack_bytes=_STACK_BYTES,
                timeout_s=MAX_COMPILE_S,
            )
        except TimeoutError as error:
            message = f"{param}: the {_NAMES[spec.kind]} was not compiled within {MAX_COMPILE_S:g} s; simplify it"
            raise RequestError(param, message) from error
        self._on_compiled(time.monotonic() - begun)
        with self._lock:
            self._kept[spec] = grammar
            self._all.add(grammar)
            while len(self._kept) > MAX_GRAMMARS:
                self._kept.popitem(last=False)
        return grammar

    def _make_room(self) -> None:
        """Drop kept grammars until there is room for another one.

        Raises QueueFullError if the grammars of open requests leave no room.
        """
        with self._lock:
            while (held := sum(grammar.num_bytes for grammar in self._all)) >= MAX_GRAMMAR_BYTES and self._kept:
                self._kept.popitem(last=False)
        if held >= MAX_GRAMMAR_BYTES:
            message = (
                f"the grammars of the requests that are open hold about {held >> 20} MiB; at most "
                f"{MAX_GRAMMAR_BYTES >> 20} MiB are allowed; send the request again later"
            )
            raise QueueFullError(message, MAX_COMPILE_S)

    def _compile(self, spec: GrammarSpec, param: str) -> Grammar:
        with self._lock:
            self._num_running += 1
        try:
            return self._compiled(spec, param)
        finally:
            with self._lock:
                self._num_running -= 1

    def _compiled(self, spec: GrammarSpec, param: str) -> Grammar:
        begun = time.thread_time()
        problem = None
        if spec.kind == "json_schema":
            problem = check_schema(json.loads(spec.text), _schema_problem)
        elif spec.kind in ("tags", "grammar"):
            problem = next(filter(None, map(check_values, inline_schemas(spec.text))), None)
        if problem is not None:
            raise RequestError(param, f"{param}: the schema cannot be enforced: {problem}")
        try:
            state = LLMatcher(self._vocabulary.tokenizer, _lark(spec) + _OPTIONS, log_level=0, limits=_LIMITS)
        except ValueError as error:
            raise RequestError(param, f"{param}: the {_NAMES[spec.kind]} is not valid: {one_line(error)}") from error
        # The first mask takes the most work. It is computed here, so that the engine's thread finds its parts.
        first = state.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            problem = _message(first).replace("NoExtensionBias", "no output can match it")
            raise RequestError(param, f"{param}: the {_NAMES[spec.kind]} is not valid: {problem}")
        num_bytes = max(_LEAST_BYTES, int((time.thread_time() - begun) * _BYTES_PER_SECOND))
        return Grammar(self._vocabulary, state, num_bytes)


def _schema_problem(schema: Any) -> str | None:
    # Its messages about a schema in Lark would quote the schema.
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=cast("JsonCompileOptions", JSON_OPTIONS))
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_LIMITS)
    if not failed:
        return None
    keywords = re.fullmatch(r"Unimplemented keys: \[(.*)\]", messages[0])
    return f"not supported: {keywords[1]}" if keywords else one_line(ValueError(messages[0]))


def _lark(spec: GrammarSpec) -> str:
    """Return the grammar in Lark's syntax. Raises ValueError for a GBNF grammar that cannot be converted."""
    match spec.kind:
        case "json_schema":
            return f"start: {inline_json(json.loads(spec.text))}"
        case "regex":
            if (len(spec.text) - len(spec.text.rstrip("\\"))) % 2:  # the conversion would drop the last one
                raise ValueError("it ends with a backslash that escapes nothing")
            if has_free_spacing(spec.text):
                raise ValueError("it has the flag x (free spacing), which is not supported")
            return f"start: /{regex_to_lark(spec.text, 'dws')}/"
        case "choice":
            # One terminal, because a rule may have only 2,000 alternatives.
            return "start: CHOICE\nCHOICE: " + " | ".join(literals([each]) or '""' for each in json.loads(spec.text))
        case "grammar":
            if is_lark_syntax(spec.text):
                return spec.text
            if escape := re.search(r"\\[uU]0[0-9a-fA-F]+", spec.text):  # the conversion would drop the zeros
                raise ValueError(f"it has the escape {escape[0]}; in GBNF, write the character itself")
            try:
                return gbnf_to_lark(spec.text)
            except Exception as error:  # of several types
                raise ValueError(f"it is neither in Lark's syntax nor in GBNF: {one_line(error)}") from error
        case "tags":
            return spec.text
