from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import psutil
import typer

from llmsched.cli.options.flags import duration_option, typed
from llmsched.cli.quantities import size
from llmsched.cli.serve.protocol import MAX_CHOICES
from llmsched.engine.errors import ConfigError, check_range

_DEFAULT_CONNECTIONS = 4096
#: File descriptors kept for everything but connections: listener, log, model files, connections that are closing.
_SPARE_FILES = 80


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of the HTTP server on connections and requests, as flags of `llmsched serve`.

    Times are in seconds, sizes in bytes.
    """

    max_connections: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="4096, or fewer if the limit of open files is lower",
            help="Maximum number of open connections. When one more arrives, the server closes the oldest connection "
            "that has sent no request, or else the one that has been idle for longest.",
        ),
    ] = None
    header_timeout: Annotated[
        float,
        duration_option("Time that a client has to send the headers of a request."),
    ] = 10.0
    body_timeout: Annotated[
        float,
        duration_option("Time that a client has to send the body of a request."),
    ] = 60.0
    send_timeout: Annotated[
        float,
        duration_option("Time within which a client must read some more of its answer."),
    ] = 60.0
    keep_alive_timeout: Annotated[
        float,
        duration_option(
            "Time that a connection stays open without a request. Keep it above that of a proxy in front.",
        ),
    ] = 75.0
    sse_keep_alive: Annotated[
        float,
        duration_option(
            "Time without an event after which a stream sends a comment line, so that proxies keep it open; 0s sends "
            "none.",
        ),
    ] = 15.0
    max_body_size: Annotated[
        int,
        typer.Option(parser=typed(size), metavar="SIZE", show_default="8MiB", help="Maximum size of a request's body."),
    ] = 8 << 20
    max_choices: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="Maximum number of choices (prompts x n) of a request.")
    ] = MAX_CHOICES

    def __post_init__(self) -> None:
        for name in ("header_timeout", "body_timeout", "send_timeout", "keep_alive_timeout"):
            check_range(name, getattr(self, name), getattr(self, name) > 0, "a duration above 0")

    def connections(self) -> int:
        """Return the maximum number of connections. If needed, increase the limit of open files.

        Raises ConfigError if `max_connections` needs more open files than the system allows.
        """
        wanted = self.max_connections or _DEFAULT_CONNECTIONS
        if sys.platform == "win32":
            return wanted
        import resource

        needed: int = wanted + psutil.Process().num_fds() + _SPARE_FILES
        limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY or limit >= needed:
            return wanted
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        fit = max(8, wanted - needed + limit)
        if self.max_connections is not None and fit < wanted:
            raise ConfigError(
                "max_connections",
                f"{wanted} connections need {needed} open files, but the limit is {limit}; allowed is 1 to {fit}; or "
                "raise the limit with `ulimit -n`",
            )
        return min(fit, wanted)
