"""Detection of the notation in which a model writes reasoning and tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from llmsched.engine.errors import RequestError
from llmsched.engine.text.chat_template import PROBE_TOOL, render_text, shows_tools
from llmsched.engine.text.parsers.call_grammars import forced_notation
from llmsched.engine.text.parsers.deepseek_calls import DeepSeekV3Parser, DeepSeekV31Parser
from llmsched.engine.text.parsers.harmony import HarmonyParser
from llmsched.engine.text.parsers.json_calls import HermesParser, Llama3JsonParser, MistralParser
from llmsched.engine.text.parsers.output_parser import Functions, OutputParser
from llmsched.engine.text.parsers.parts import Kind
from llmsched.engine.text.parsers.python_calls import PythonicParser
from llmsched.engine.text.parsers.xml_calls import Qwen3CoderParser
from llmsched.engine.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"

TOOL_CALL_PARSERS: Mapping[str, type[OutputParser]] = {
    "harmony": HarmonyParser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "mistral": MistralParser,
    "qwen3_coder": Qwen3CoderParser,
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "pythonic": PythonicParser,
}
#: Texts around reasoning.
REASONING_PARSERS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
}


@dataclass(frozen=True, slots=True)
class Notation:
    """Notation in which a model writes reasoning and tool calls."""

    call_parser: type[OutputParser] | None = None  # None: the output has no tool calls
    thinking: tuple[str, str] | None = None  # texts around reasoning; None: there is no reasoning, or it is content
    special_ids: Mapping[str, int] = field(default_factory=dict)  # texts of the notation that are special tokens
    reasoning_end_id: int | None = None  # the token that ends reasoning, if it is one token

    def parser(self, functions: Functions, *, opened: bool, in_forced_notation: bool = False) -> OutputParser | None:
        """Return a parser of one output, or None if the whole output is content.

        The request declares `functions`; `opened` says that its prompt ends within reasoning. With
        `in_forced_notation`, a grammar says how calls are written.
        """
        calls = self.call_parser
        if calls is not None and (functions or calls is HarmonyParser):
            calls = forced_notation(calls) if in_forced_notation else calls
            return calls(functions, self.thinking, opened=opened)
        return None if self.thinking is None else OutputParser(functions, self.thinking, opened=opened)

    def describe(self) -> str:
        """Return a line about tool calls and reasoning for the user."""
        names = {parser: name for name, parser in TOOL_CALL_PARSERS.items()}
        calls = "not supported" if self.call_parser is None else f"in the notation {names[self.call_parser]}"
        reasoning = "" if self.thinking is None else f"; reasoning between {' and '.join(self.thinking)}"
        return f"tool calls {calls}{reasoning}"

    def opens_reasoning(self, prompt_end: str) -> bool:
        return self.thinking is not None and prompt_end.rstrip().endswith(self.thinking[0])

    def ends_in_reasoning(self, output: str) -> bool:
        return self.thinking is not None and output.rfind(self.thinking[0]) > output.rfind(self.thinking[1])


def find_notation(tokenizer: Tokenizer, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> Notation:
    """Return the notation with these parsers. "auto" lets the chat template decide; "none" means no parser."""
    calls = _detect_calls(tokenizer) if tool_call_parser == AUTO else TOOL_CALL_PARSERS.get(tool_call_parser)
    template = tokenizer.chat_template or ""
    thinking = REASONING_PARSERS.get(reasoning_parser)
    if reasoning_parser == AUTO:
        thinking = next((texts for texts in REASONING_PARSERS.values() if texts[1] in template), None)
    markers = {*(calls.markers if calls else ()), *(thinking or ())}
    ids = {marker: tokenizer.backend.token_to_id(marker) for marker in markers}
    special = {marker: each for marker, each in ids.items() if each is not None and tokenizer.is_special(each)}
    return Notation(calls, thinking, special, None if thinking is None else ids[thinking[1]])


def _detect_calls(tokenizer: Tokenizer) -> type[OutputParser] | None:
    """Return the parser that recognises calls as the chat template writes them, or None if no parser does.

    Tools that the template does not show are described to the model in the notation of Hermes.
    """
    if not shows_tools(tokenizer):
        return HermesParser if tokenizer.chat_template else None
    texts = _written_calls(tokenizer)
    return next((parser for parser in TOOL_CALL_PARSERS.values() if any(_finds_probe(parser, t) for t in texts)), None)


_ARGUMENTS = {"probe_argument": "probe value"}


def _finds_probe(parser_type: type[OutputParser], text: str) -> bool:
    function = PROBE_TOOL["function"]
    parser = parser_type({function["name"]: function["parameters"]})
    parts = [*parser.push(text), *parser.finish()]
    names = [part.text for part in parts if part.kind is Kind.CALL]
    arguments = "".join(part.text for part in parts if part.kind is Kind.ARGUMENTS)
    if any("tool_call" in part.text for part in parts if part.kind is Kind.CONTENT):
        return False  # a similar notation with other marks
    with suppress(ValueError):
        return names == [function["name"]] and json.loads(arguments) == _ARGUMENTS
    return False


def _written_calls(tokenizer: Tokenizer) -> list[str]:
    """Return what the chat template writes for a call: after the generation prompt, and after the user's message."""
    user: dict[str, Any] = {"role": "user", "content": "x"}
    name = PROBE_TOOL["function"]["name"]
    result = {"role": "tool", "content": "y", "tool_call_id": "probe0000", "name": name}
    options = {"tools": [PROBE_TOOL]}
    for arguments, later in product((_ARGUMENTS, json.dumps(_ARGUMENTS)), ([], [result])):
        calls = [{"id": "probe0000", "type": "function", "function": {"name": name, "arguments": arguments}}]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        with suppress(RequestError):
            prompts = [
                render_text(tokenizer, [user], {**options, "add_generation_prompt": add}) for add in (True, False)
            ]
            text = render_text(tokenizer, [user, turn, *later], options)
            return [text[_common_length(prompt, text) :] for prompt in prompts]
    return []


def _common_length(one: str, two: str) -> int:
    """Return the length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
