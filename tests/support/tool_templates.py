"""Chat templates in which tools are shown and called in the notations of several model families."""

from __future__ import annotations

_START = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
)
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

#: Template text for the calls of a message `m`, by parser.
_CALLS = {
    "hermes": (
        '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
    ),
    "qwen3_coder": (
        "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
        "{% endfor %}</function>\n</tool_call>{% endfor %}"
    ),
    "llama3_json": (
        "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('only single calls') }}{% endif %}"
        '{% set c = m.tool_calls[0].function %}{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
        "{% endif %}"
    ),
    "mistral": (
        "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('9 letters') }}{% endif %}"
        "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
    ),
    "pythonic": (
        "{% if m.tool_calls %}[{% for c in m.tool_calls %}{{ c.function.name }}({% for key, value in "
        "c.function.arguments | items %}{{ key }}={{ value | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
        "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}"
    ),
    "harmony": (
        "{% for c in m.tool_calls or [] %} to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
        "{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
    ),
    # These two expect arguments as text.
    "deepseek_v3": (
        "{% for c in m.tool_calls or [] %}{{ '<¦tool▁calls▁begin¦>' if loop.first else '\n' }}<¦tool▁call▁begin¦>"
        "{{ c.type }}<¦tool▁sep¦>{{ c.function.name }}\n```json\n{{ '' + c.function.arguments }}\n```<¦tool▁call▁end¦>"
        "{{ '<¦tool▁calls▁end¦>' if loop.last }}{% endfor %}"
    ),
    "deepseek_v31": (
        "{% for c in m.tool_calls or [] %}{{ '<¦tool▁calls▁begin¦>' if loop.first }}<¦tool▁call▁begin¦>"
        "{{ c.function.name }}<¦tool▁sep¦>{{ '' + c.function.arguments }}<¦tool▁call▁end¦>"
        "{{ '<¦tool▁calls▁end¦>' if loop.last }}{% endfor %}"
    ),
}
_CALLS = {name: text.replace("¦", "\uff5c") for name, text in _CALLS.items()}  # full-width bars

TOOL_TEMPLATES = {parser: _START + calls + _END for parser, calls in _CALLS.items()}
#: The prompt opens the model's reasoning.
THINKING_TEMPLATE = TOOL_TEMPLATES["hermes"].replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n"
    "{% endif %}{% endif %}",
)
