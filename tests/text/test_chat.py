"""Chats become exactly the tokens that the model's template writes, or a refusal that says why."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import BOS, build_tokenizer

from llmsched.engine.errors import RequestError
from llmsched.engine.text.chat import render_chat
from llmsched.engine.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "hello"}
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_with(template: str | None, *, bos: bool = True) -> Tokenizer:
    return Tokenizer(build_tokenizer(bos=bos, chat_template=template))


def rendered(tokenizer: Tokenizer, *messages: dict[str, Any], **options: Any) -> str:
    return tokenizer.decode(render_chat(tokenizer, messages, **options), skip_special_tokens=False)


def test_the_template_writes_bos_and_nothing_adds_another() -> None:
    """Fault G01."""
    tokenizer = tokenizer_with(WITH_BOS)
    ids = render_chat(tokenizer, [USER])
    assert ids[:2] == [0, 1]
    assert ids.count(0) == 1
    assert tokenizer.encode("hello")[0] == 0
    assert tokenizer.encode(f"{BOS}hello") == [0, 0, *tokenizer.encode("hello", add_special_tokens=False)]


def test_no_bos_where_the_template_writes_none() -> None:
    assert 0 not in render_chat(tokenizer_with("{{ messages[0]['content'] }}"), [USER])


def test_the_assistants_turn_is_opened() -> None:
    text = rendered(tokenizer_with(WITH_BOS), USER)
    assert text == f"{BOS}<|im_start|>user\nhello<|im_end|><|im_start|>assistant\n"


def test_options_reach_the_template() -> None:
    tokenizer = tokenizer_with("{{ messages[0]['content'] }}{% if thinking %} think{% endif %}{{ tools | length }}")
    assert rendered(tokenizer, USER, thinking=True, tools=[]) == "hello think0"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "truncation", "return_dict"])
def test_a_request_cannot_bring_its_own_template_or_cut_the_prompt(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} cannot be set by a request") as caught:
        render_chat(tokenizer_with(WITH_BOS), [USER], **{name: True})
    assert caught.value.param == "chat_template_kwargs"


def test_no_messages_is_a_refusal() -> None:
    with pytest.raises(RequestError, match="refuses these messages"):
        render_chat(tokenizer_with("{{ messages[0]['content'] }}"), [])


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    tokenizer = tokenizer_with(WITH_BOS)
    assert render_chat(tokenizer, [{"role": "user", "content": parts}]) == render_chat(tokenizer, [USER])


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, {"type": "text"}, "text", None])
def test_other_parts_are_refused(part: Any) -> None:
    with pytest.raises(RequestError, match=r"messages\[0\]\.content has a part of type"):
        render_chat(tokenizer_with(WITH_BOS), [{"role": "user", "content": [part]}])


def test_without_a_template_there_is_a_hint() -> None:
    """Fault C12."""
    with pytest.raises(RequestError, match=r"no chat template.*/v1/completions") as caught:
        render_chat(tokenizer_with(None), [USER])
    assert caught.value.param == "messages"


FAILING = {
    "raise_exception": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "syntax": ("{% if %}", "refuses these messages"),
    "missing key": ("{{ messages[0]['name'] + 'x' }}", "refuses these messages"),
    "no messages": ("{{ messages[7]['content'].strip() }}", "refuses these messages"),
    "division": ("{{ 1 / 0 }}", "division by zero"),
    "type": ("{{ 'a' + 1 }}", "refuses these messages"),
    "sandbox": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refuses these messages"),
    "mutation": ("{{ messages.append(1) }}", "refuses these messages"),
}


@pytest.mark.parametrize("case", FAILING)
def test_template_errors_become_refusals(case: str) -> None:
    template, message = FAILING[case]
    with pytest.raises(RequestError, match=message) as caught:
        render_chat(tokenizer_with(template), [USER])
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)


def test_named_templates_offer_their_default() -> None:
    fast = build_tokenizer()
    fast.chat_template = {"default": "plain: {{ messages[0]['content'] }}", "tool_use": "tools"}
    assert rendered(Tokenizer(fast), USER) == "plain: hello"


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(RequestError, match="messages has a lone surrogate") as caught:
        render_chat(tokenizer_with(WITH_BOS), [{"role": "user", "content": "\ud83d"}])
    assert caught.value.param == "messages"


def test_messages_are_left_as_they_were() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    render_chat(tokenizer_with(WITH_BOS), [message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "hello"}]}
