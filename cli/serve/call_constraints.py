from __future__ import annotations

from collections.abc import Sequence

from llmsched.cli.serve.protocol import ChatRequest
from llmsched.cli.serve.tool_fields import NamedFunction, Tool
from llmsched.engine.errors import RequestError
from llmsched.engine.grammar.compiler import Grammar, GrammarCompiler
from llmsched.engine.grammar.spec import GrammarSpec
from llmsched.engine.text.parsers.call_grammars import calls_or_json, forced_calls, forced_notation, strict_calls
from llmsched.engine.text.parsers.notation import Notation
from llmsched.engine.text.parsers.output_parser import Functions

#: Field of a request that says what its outputs must match, and the description of these outputs.
Wanted = tuple[str, GrammarSpec]

_NO_PARAMETERS = {"type": "object", "additionalProperties": False}
_ANY_PARAMETERS = {"type": "object"}


def schemas(tools: Sequence[Tool], *, only_strict: bool = False) -> Functions:
    """Return the schemas of the parameters by function.

    With `only_strict`, functions that are not strict accept any parameters.
    """
    found = {}
    for tool in tools:
        function = tool.function
        is_free = only_strict and not function.strict
        found[function.name] = _ANY_PARAMETERS if is_free else function.parameters or _NO_PARAMETERS
    return found


def wanted_output(request: ChatRequest, notation: Notation, *, only_strict: bool = False) -> Wanted | None:
    """Return the format that the outputs of a chat must match, or None if every output is allowed.

    In calls that tool_choice demands, arguments must match the schema of their function; with `only_strict`, only if
    the function is strict. In other calls, only arguments of strict functions must match. Raises RequestError for
    fields that cannot be combined.
    """
    output, tools = request.grammar_spec(), request.callable_tools()
    if not tools or notation.call_parser is None:
        return output
    parser, ids = forced_notation(notation.call_parser), notation.special_ids
    many = request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedFunction)
    if request.forces_call:
        return "tools", forced_calls(parser, schemas(tools, only_strict=only_strict), ids, many=many)
    functions = schemas(tools, only_strict=True)
    if output is not None:
        param, spec = output
        if spec.kind != "json_schema":
            raise RequestError(param, f'{param} cannot be combined with tools; set tool_choice to "none"')
        return param, calls_or_json(forced_calls(parser, functions, ids, many=many), spec.text)
    if not any(tool.function.strict for tool in tools):
        return None
    strict = strict_calls(parser, functions, ids, many=many)
    if strict is None:
        raise RequestError(
            "tools",
            "tools has a function with strict: true, which this model's tokenizer allows only with tool_choice "
            '"required" or a named function; set that, or leave strict out',
        )
    return "tools", strict


def chat_grammar(request: ChatRequest, notation: Notation, compiler: GrammarCompiler) -> Grammar | None:
    """Return the grammar of a chat's outputs, or None if every output is allowed.

    Raises RequestError for fields that cannot be combined, and for a schema that cannot be enforced. If the schema of a
    function that is not strict cannot be enforced, the function takes any arguments.
    """
    try:
        wanted = wanted_output(request, notation)
        return None if wanted is None else compiler.compile(wanted[1], param=wanted[0])
    except RequestError as error:
        problem = error
    for name, schema in schemas(request.callable_tools(), only_strict=True).items():
        try:
            compiler.compile(GrammarSpec.json_schema(schema), param=f"parameters of {name}")
        except RequestError as error:
            raise RequestError("tools", f"tools: {error}") from error
    if problem.param != "tools":
        if (output := request.grammar_spec()) is not None:
            compiler.compile(output[1], param=output[0])  # its error names the place in the schema
        raise problem
    wanted = wanted_output(request, notation, only_strict=True)
    return None if wanted is None else compiler.compile(wanted[1], param=wanted[0])
