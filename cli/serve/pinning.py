"""`serve --pin-prefix FILE`: prefixes that are computed at the start and stay in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmsched.cli import render
from llmsched.cli.serve.prepare import Preparer
from llmsched.cli.serve.protocol import PrefixRequest, parse
from llmsched.engine.core import Engine
from llmsched.engine.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True)
class PrefixFile:
    """A prefix as it was found in `path`."""

    path: Path
    request: PrefixRequest


def read_prefixes(paths: Sequence[Path]) -> list[PrefixFile]:
    """Read the files: text that prompts begin with or, in a .json file, the body of a POST to /v1/prefixes.

    Raises ConfigError; to be called before a model is loaded for minutes.
    """
    found = []
    for path in paths:
        try:
            if path.is_char_device():
                raise ConfigError("pin_prefix", f"{path}: is a device, not a file")
            content = path.read_bytes()
            request = (
                parse(PrefixRequest, content) if path.suffix == ".json" else PrefixRequest(prompt=content.decode())
            )
        except OSError as error:
            raise ConfigError("pin_prefix", f"{path}: {(error.strerror or str(error)).lower()}") from error
        except UnicodeDecodeError as error:
            raise ConfigError("pin_prefix", f"{path} is not UTF-8 text: {error.reason} at {error.start}") from error
        except RequestError as error:
            raise ConfigError("pin_prefix", f"{path}: {error.message}") from error
        found.append(PrefixFile(path, request))
    return found


def pin_prefixes(engine: Engine, files: Sequence[PrefixFile]) -> None:
    """Pin them; the engine computes them first. Raises ConfigError for one that cannot be pinned."""
    preparer = Preparer(engine)
    for file in files:
        try:
            token_ids = preparer.prefix(file.request)
            pin = engine.pin_prefix(token_ids, cache_salt=file.request.cache_salt or "", ttl=file.request.ttl)
        except RequestError as error:
            raise ConfigError("pin_prefix", f"{file.path}: {error.message}") from error
        render.note(f"{file.path}: the first {pin.num_tokens} of {len(token_ids)} tokens are pinned as {pin.pin_id}")
