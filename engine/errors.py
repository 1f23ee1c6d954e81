"""Errors whose message a user reads: one line with what was wrong, which value, the allowed range and what to do."""

from __future__ import annotations

from collections.abc import Callable

#: Longest part of another library's message that is shown, in characters.
_LINE = 300
#: Character around a setting's name in a message. Neither arguments nor paths can contain it.
_MARK = "\0"


def setting(name: str) -> str:
    """Return the name of a setting, marked for `spell`, to be put into a message."""
    return f"{_MARK}{name}{_MARK}"


def spell(message: str, naming: Callable[[str], str] = str) -> str:
    """Return a message in which `naming` has replaced each name marked by `setting`."""
    parts = message.split(_MARK)
    parts[1::2] = map(naming, parts[1::2])
    return "".join(parts)


class LlmschedError(Exception):
    """Base class of errors whose message users can read. The CLI prints it on one line and exits with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def text(self, naming: Callable[[str], str] = str) -> str:
        """Return the message; `naming` turns a setting's name into what the reader calls it, such as its flag."""
        return spell(self.message, naming)

    def __str__(self) -> str:
        return self.text()


class ConfigError(LlmschedError):
    """Wrong value of a setting. `field` is the setting's name in Python and over HTTP, such as max_num_seqs."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.args = (field, message)
        self.field = field

    def text(self, naming: Callable[[str], str] = str) -> str:
        """Return the field's name and the message, with all names replaced by `naming`."""
        return f"{naming(self.field)}: {super().text(naming)}"


def check_range(field: str, value: float, valid: bool, allowed: str) -> None:
    """Raise ConfigError unless `valid`; `allowed` describes the allowed values."""
    if not valid:
        shown = f"{value:g}" if isinstance(value, float) else value
        raise ConfigError(field, f"{shown} is out of range; allowed is {allowed}")


class ModelError(LlmschedError):
    """Model that is not found, not readable or not supported."""


class RequestError(LlmschedError):
    """Invalid request. Over HTTP it becomes a 4xx response in OpenAI's format.

    `param` is the field of the request, `code` OpenAI's machine-readable code if there is one.
    """

    def __init__(self, param: str | None, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(LlmschedError):
    """Full waiting queue (HTTP 429). `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(LlmschedError):
    """Engine that has failed, has stopped or is draining, and takes no requests (HTTP 503)."""


def one_line(error: BaseException) -> str:
    """Return an error's message on one line of limited length, or the name of its type if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LINE else f"{text[:_LINE]}..."
