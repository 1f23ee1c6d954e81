from __future__ import annotations

from collections.abc import Sequence

from llmsched.cli.serve.protocol import ChatRequest
from llmsched.cli.serve.tool_fields import Tool
from llmsched.engine.errors import RequestError
from llmsched.engine.grammar.spec import GrammarSpec
from llmsched.engine.text.parsers.call_grammars import calls_or_json, forced_calls, forced_notation, strict_calls
from llmsched.engine.text.parsers.notation import Notation
from llmsched.engine.text.parsers.output_parser import Functions, OutputParser

_NO_PARAMETERS = {"type": "object", "additionalProperties": False}
_ANY_PARAMETERS = {"type": "object"}


def schemas(tools: Sequence[Tool], *, only_strict: bool = False) -> Functions:
    """Return the schemas of the tools' parameters, by name. With `only_strict`, others than strict ones take any."""
    found = {}
    for tool in tools:
        function = tool.function
        is_free = only_strict and not function.strict
        found[function.name] = _ANY_PARAMETERS if is_free else function.parameters or _NO_PARAMETERS
    return found


def chat_grammar(
    request: ChatRequest, notation: Notation, *, only_strict: bool = False
) -> tuple[str, GrammarSpec, type[OutputParser]] | None:
    """Return what the outputs must match, the field that says so, and the parser of their calls; None if nothing.

    If a call is forced, its arguments are valid under the schema of its function, with `only_strict` only if the
    function is strict. Raises RequestError for fields that cannot be combined.
    """
    output, tools = request.grammar_spec(), request.callable_tools()
    parser = notation.call_parser
    if not tools or parser is None:
        return None if output is None else (*output, OutputParser)
    ids, many = notation.special_ids, request.parallel_tool_calls is not False
    forced = forced_notation(parser)
    if request.forces_call:
        functions = schemas(tools, only_strict=only_strict)
        return "tools", forced_calls(forced, functions, ids, many=many and request.tool_choice == "required"), forced
    functions = schemas(tools, only_strict=True)
    if output is not None:
        param, spec = output
        if spec.kind != "json_schema":
            raise RequestError(param, f'{param} cannot be combined with tools; set tool_choice to "none"')
        return param, calls_or_json(forced_calls(forced, functions, ids, many=many), spec.text), forced
    if not any(tool.function.strict for tool in tools):
        return None
    strict = strict_calls(parser, functions, ids, many=many)
    return None if strict is None else ("tools", strict, parser)
