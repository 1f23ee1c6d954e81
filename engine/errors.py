"""Errors that are meant to be read by a person: one line that says what was wrong, the value, the range, what to do."""

#: Characters of another library's message that are shown.
_LINE = 300


class LlmschedError(Exception):
    """Base of every error whose message is ready to be shown: CLI prints it in one line and exits with 2."""


class ConfigError(LlmschedError):
    """A setting is wrong. `field` is the knob's name, as in EngineConfig and (with dashes) on the command line."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ModelError(LlmschedError):
    """A model cannot be found, read or supported."""


class RequestError(LlmschedError):
    """A request is wrong; over HTTP it becomes a 4xx in OpenAI's shape.

    `param` is the field of the request, `code` OpenAI's machine-readable code where there is one.
    """

    def __init__(self, param: str | None, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(LlmschedError):
    """Admission control: the waiting queue is full (HTTP 429). `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(LlmschedError):
    """The engine has stopped or is draining; nothing more will be computed (HTTP 503)."""


def one_line(error: BaseException) -> str:
    """An error's message on one line of bounded length, or its type if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LINE else f"{text[:_LINE]}..."
