"""The notation of tool calls and reasoning comes from the chat template."""

from __future__ import annotations

from typing import get_args

import pytest
from tiny_models import CHAT_TEMPLATE, build_tokenizer
from tokenizers import AddedToken
from tool_templates import THINKING_TEMPLATE, TOOL_TEMPLATES

from llmsched.cli.serve.command import ReasoningParser, ToolCallParser
from llmsched.engine.text.chat_template import render_chat
from llmsched.engine.text.parsers.notation import REASONING_PARSERS, TOOL_CALL_PARSERS, find_notation
from llmsched.engine.text.parsers.output_parser import OutputParser
from llmsched.engine.text.tokenizer import Tokenizer


def tokenizer_with(template: str | None, *special: str) -> Tokenizer:
    fast = build_tokenizer(chat_template=template)
    fast.backend_tokenizer.add_special_tokens([AddedToken(text) for text in special])
    return Tokenizer(fast)


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_the_parser_is_the_one_that_reads_what_the_template_writes(name: str) -> None:
    assert find_notation(tokenizer_with(TOOL_TEMPLATES[name])).call_parser is TOOL_CALL_PARSERS[name]
    assert find_notation(tokenizer_with(TOOL_TEMPLATES[name]), tool_call_parser="none").call_parser is None


def test_an_open_reasoning_does_not_hide_the_notation() -> None:
    notation = find_notation(tokenizer_with(THINKING_TEMPLATE))
    assert notation.call_parser is TOOL_CALL_PARSERS["hermes"]
    assert notation.thinking == ("<think>", "</think>")


def test_templates_without_tools_get_the_notation_that_describes_them() -> None:
    assert find_notation(tokenizer_with(CHAT_TEMPLATE)).call_parser is TOOL_CALL_PARSERS["hermes"]
    assert find_notation(tokenizer_with(None)).call_parser is None


def test_an_unknown_notation_has_no_parser() -> None:
    similar = TOOL_TEMPLATES["qwen3_coder"].replace("tool_call>", "own:tool_call>")
    assert find_notation(tokenizer_with(similar)).call_parser is None
    unknown = TOOL_TEMPLATES["hermes"].replace('{"name": "', "CALL ")
    assert find_notation(tokenizer_with(unknown)).call_parser is None
    chosen = find_notation(tokenizer_with(unknown), tool_call_parser="mistral")
    assert chosen.call_parser is TOOL_CALL_PARSERS["mistral"]


@pytest.mark.parametrize(
    ("template", "name", "texts"),
    [
        ("{{ messages[0].content.split('</think>')[-1] }}", "auto", ("<think>", "</think>")),
        ("{{ messages[0].content }}[THINK]a[/THINK]", "auto", ("[THINK]", "[/THINK]")),
        (CHAT_TEMPLATE, "auto", None),
        (CHAT_TEMPLATE, "think", ("<think>", "</think>")),
        (THINKING_TEMPLATE, "none", None),
    ],
)
def test_reasoning(template: str, name: str, texts: tuple[str, str] | None) -> None:
    assert find_notation(tokenizer_with(template), reasoning_parser=name).thinking == texts


def test_prompts_may_open_the_reasoning() -> None:
    tokenizer = tokenizer_with(THINKING_TEMPLATE)
    notation = find_notation(tokenizer)
    user = {"role": "user", "content": "Hi <think>"}

    def end(**options: bool) -> str:
        return tokenizer.decode(render_chat(tokenizer, [user], **options)[-16:], skip_special_tokens=False)

    assert notation.opens_reasoning(end())
    assert not notation.opens_reasoning(end(enable_thinking=False))
    tokenizer = tokenizer_with(TOOL_TEMPLATES["hermes"])
    assert "<think>" in end()
    assert not notation.opens_reasoning(end())


def test_special_tokens_of_the_notation_are_shown() -> None:
    tokenizer = tokenizer_with(TOOL_TEMPLATES["mistral"], "[TOOL_CALLS]", "[ARGS]", "[OTHER]")
    special = {text: tokenizer.backend.token_to_id(text) for text in ("[TOOL_CALLS]", "[ARGS]")}
    assert find_notation(tokenizer).special_ids == special


def test_outputs_without_tools_and_reasoning_need_no_parser() -> None:
    functions = {"f": {}}
    plain = find_notation(tokenizer_with(CHAT_TEMPLATE))
    assert plain.parser({}, opened=False) is None
    assert type(plain.parser(functions, opened=False)) is TOOL_CALL_PARSERS["hermes"]
    assert type(find_notation(tokenizer_with(THINKING_TEMPLATE)).parser({}, opened=False)) is OutputParser
    harmony = find_notation(tokenizer_with(TOOL_TEMPLATES["harmony"]))
    assert type(harmony.parser({}, opened=False)) is TOOL_CALL_PARSERS["harmony"]


def test_flags_offer_every_parser() -> None:
    assert set(get_args(ToolCallParser)) == {"auto", *TOOL_CALL_PARSERS, "none"}
    assert set(get_args(ReasoningParser)) == {"auto", *REASONING_PARSERS, "none"}


def test_the_banner_names_the_notation() -> None:
    assert find_notation(tokenizer_with(CHAT_TEMPLATE)).describe() == "tool calls in the notation hermes"
    described = find_notation(tokenizer_with(THINKING_TEMPLATE), "none").describe()
    assert described == "tool calls not supported; reasoning between <think> and </think>"
