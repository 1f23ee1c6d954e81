"""Checker of PromQL expressions: their syntax, the types of their parts, and the metrics and labels that they name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>\d+(?:\.\d+)?(?![\w.]))
    |(?P<duration>\d+[smhdwy]|\$__rate_interval)
    |(?P<name>[A-Za-z_][\w:]*)
    |(?P<text>"(?:[^"\\]|\\.)*")
    |(?P<mark>==|!=|>=|<=|=~|!~|[-+*/%^(){}\[\],=<>]))""",
    re.X,
)
#: Binary operators by precedence, the loosest first.
_LEVELS = (
    frozenset({"or"}),
    frozenset({"and", "unless"}),
    frozenset({"==", "!=", ">", "<", ">=", "<="}),
    frozenset({"+", "-"}),
    frozenset({"*", "/", "%"}),
)
_AGGREGATIONS = frozenset({"sum", "avg", "min", "max", "count", "topk"})
_OF_RANGES = frozenset({"rate", "irate", "increase", "max_over_time", "avg_over_time", "min_over_time"})
_OF_VECTORS = frozenset({"abs", "ceil", "clamp_min", "clamp_max", "histogram_quantile", "sort", "absent"})


class Selector(NamedTuple):
    metric: str
    labels: Mapping[str, str]  # text, or regular expression, that each label is compared with


@dataclass
class Expression:
    """What an expression names. `labels` are all labels in its matchers, `by` and `on`. Raises ValueError if wrong."""

    text: str
    selectors: list[Selector] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._tokens: list[tuple[str, str]] = []
        position = 0
        while self.text[position:].strip():
            match = _TOKEN.match(self.text, position)
            if match is None:
                raise ValueError(f"{self.text[position : position + 20]!r} is not PromQL")
            self._tokens.append((str(match.lastgroup), match.group(str(match.lastgroup))))
            position = match.end()
        kind = self._binary(0)
        if self._tokens or kind == "range":
            raise ValueError(f"{self.text!r} has a {kind}, and then {self._tokens[:3]}")

    def _next(self) -> str:
        return self._tokens[0][1] if self._tokens else ""

    def _take(self, *expected: str) -> str:
        if not self._tokens or (expected and self._next() not in expected):
            raise ValueError(f"{self.text!r}: {self._next()!r} instead of {' or '.join(expected) or 'an operand'}")
        return self._tokens.pop(0)[1]

    def _binary(self, level: int) -> str:
        """Read operands of this level. Return the type of the result: scalar, vector or range."""
        if level == len(_LEVELS):
            return self._operand()
        kind = self._binary(level + 1)
        while self._next() in _LEVELS[level]:
            operator = self._take()
            self._matching()
            kinds = {kind, self._binary(level + 1)}
            if "range" in kinds or (operator in ("and", "or", "unless") and "scalar" in kinds):
                raise ValueError(f"{self.text!r}: {operator} cannot join {kinds}")
            kind = "vector" if "vector" in kinds else "scalar"
        return kind

    def _matching(self) -> None:
        """Read the labels by which an operator matches its operands, if they are given."""
        if self._next() in ("on", "ignoring"):
            self._take()
            self._label_list()

    def _operand(self) -> str:
        if not self._tokens:
            raise ValueError(f"{self.text!r} ends too early")
        what, token = self._tokens.pop(0)
        if what == "number":
            return "scalar"
        if token == "(":
            kind = self._binary(0)
            self._take(")")
            return kind
        if what != "name":
            raise ValueError(f"{self.text!r}: {token!r} cannot begin an operand")
        if token in _AGGREGATIONS:
            return self._aggregation()
        if self._next() == "(":
            return self._call(token)
        return self._selector(token)

    def _aggregation(self) -> str:
        grouped = self._grouping()
        if self._arguments()[-1] != "vector":
            raise ValueError(f"{self.text!r}: only vectors are aggregated")
        if not grouped:
            self._grouping()
        return "vector"

    def _grouping(self) -> bool:
        if self._next() not in ("by", "without"):
            return False
        self._take()
        self._label_list()
        return True

    def _label_list(self) -> None:
        self._take("(")
        while self._next() != ")":
            self.labels.add(self._take())
            if self._next() != ")":
                self._take(",")
        self._take(")")

    def _arguments(self) -> list[str]:
        self._take("(")
        kinds = [self._binary(0)]
        while self._next() == ",":
            self._take()
            kinds.append(self._binary(0))
        self._take(")")
        return kinds

    def _call(self, function: str) -> str:
        before = len(self.selectors)
        kinds = self._arguments()
        if function not in _OF_RANGES | _OF_VECTORS:
            raise ValueError(f"{self.text!r}: {function} is not a function")
        if ("range" in kinds) != (function in _OF_RANGES):
            raise ValueError(f"{self.text!r}: {function} got {kinds}")
        if function == "histogram_quantile":
            named = self.selectors[before:]
            if kinds != ["scalar", "vector"] or not all(name.metric.endswith("_bucket") for name in named):
                raise ValueError(f"{self.text!r}: histogram_quantile takes a number and buckets")
            if "le" not in self.labels:
                raise ValueError(f"{self.text!r}: the buckets must be grouped by le")
        return "vector"

    def _selector(self, metric: str) -> str:
        labels = {}
        if self._next() == "{":
            self._take()
            while self._next() != "}":
                label = self._take()
                self._take("=", "!=", "=~", "!~")
                if self._tokens[0][0] != "text":
                    raise ValueError(f"{self.text!r}: a label is compared with {self._next()!r}, not with a text")
                labels[label] = self._take().strip('"')
                re.compile(labels[label])
                if self._next() != "}":
                    self._take(",")
            self._take("}")
        self.labels |= labels.keys()
        self.selectors.append(Selector(metric, labels))
        if self._next() != "[":
            return "vector"
        self._take()
        if self._tokens[0][0] != "duration":
            raise ValueError(f"{self.text!r}: {self._next()!r} is not a duration")
        self._take()
        self._take("]")
        return "range"
