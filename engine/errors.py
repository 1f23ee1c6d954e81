"""Errors whose message a user reads: one line with the problem, the value, the allowed range and a remedy."""

from __future__ import annotations

from collections.abc import Callable

#: Most characters of another library's message that are shown.
_LINE = 300
#: Words in messages of failed allocations without an exception type: on the CPU, of pinned memory, or in a library.
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")
#: Character around a setting's name in a message. Neither arguments nor paths can contain it.
_MARK = "\0"


def setting(name: str) -> str:
    """Mark a setting's name in a message, so that `spell(...)` can replace it by another spelling, such as a flag."""
    return f"{_MARK}{name}{_MARK}"


def spell(message: str, naming: Callable[[str], str] = str) -> str:
    """Return the message without the marks that `setting(...)` made. `naming` converts each marked name."""
    parts = message.split(_MARK)
    parts[1::2] = map(naming, parts[1::2])
    return "".join(parts)


class LlmschedError(Exception):
    """Base of all errors whose message is written for the user. The CLI prints the message and exits with code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def text(self, naming: Callable[[str], str] = str) -> str:
        """Return the message. `naming` converts a setting's name to the name that the reader knows, such as a flag."""
        return spell(self.message, naming)

    def __str__(self) -> str:
        return self.text()


class ConfigError(LlmschedError):
    """Error for a wrong value of a setting. `field` is the setting's name in Python and HTTP, such as max_num_seqs."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.args = (field, message)
        self.field = field

    def text(self, naming: Callable[[str], str] = str) -> str:
        return f"{naming(self.field)}: {super().text(naming)}"


def check_range(field: str, value: float, valid: bool, allowed: str) -> None:
    """Raise ConfigError for the setting `field` unless `valid`. `allowed` says in words which values are allowed."""
    if not valid:
        shown = f"{value:g}" if isinstance(value, float) else value
        raise ConfigError(field, f"{shown} is out of range; allowed is {allowed}")


class ModelError(LlmschedError):
    """Error for a model that is not found, not readable or not supported."""


class RequestError(LlmschedError):
    """Error for an invalid request. Over HTTP the error becomes a 4xx response in OpenAI's format.

    `param` is the name of the wrong field, or None if no single field is wrong. `code` is OpenAI's error code.
    """

    def __init__(self, param: str | None, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(LlmschedError):
    """Error for a request that is refused because the waiting queue is full (HTTP 429).

    `retry_after` is the number of seconds after which the client should send the request again.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineError(QueueFullError):
    """Error for a request whose deadline has passed or is predicted to pass before its first token (HTTP 429)."""


class EngineDeadError(LlmschedError):
    """Error for a request to an engine that has failed, has stopped or is shutting down (HTTP 503)."""


class InternalError(LlmschedError):
    """Error for a call that failed because of a fault in the engine (HTTP 500). The server's log has the details."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` is a failed allocation on the device or the host, by Python, torch or a CUDA library."""
    # By name, because importing torch takes seconds, and the simulated engine does without it.
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError"}:
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OUT_OF_MEMORY)


def one_line(error: BaseException) -> str:
    """Return an error's message as one line of limited length, or the name of its type if the message is empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LINE else f"{text[:_LINE]}..."
