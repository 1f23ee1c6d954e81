"""Named API keys from a file."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from llmsched.cli.serve.strict_schema import wrong
from llmsched.engine.errors import ConfigError

_Limit = Annotated[int, Field(ge=1, le=10**12)]


class _Entry(BaseModel):
    """Entry of a file of API keys."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
    key: Annotated[str, Field(min_length=8, pattern=r"^[!-~]+$")] | None = None
    hash: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    admin: bool = False

    @model_validator(mode="after")
    def _has_one_key(self) -> _Entry:
        if (self.key is None) == (self.hash is None):
            raise wrong("give either key or hash")
        return self


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's name, rights and budgets, without the key itself."""

    name: str
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class KeyFile:
    """API keys of a file, which may be read again while the server runs.

    The file is TOML with `[[keys]]` tables or, if its name does not end in .toml, one JSON object per line. Only hashes
    of the keys are kept. Raises ConfigError for a file that is not readable or not valid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = _read(path)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def has_admin(self) -> bool:
        return any(key.admin for key in self._keys.values())

    def find(self, given: bytes) -> ApiKey | None:
        """Return the key that a client has sent, or None if the file has no such key."""
        return self._keys.get(hashlib.sha256(given).digest())

    def reload(self) -> None:
        """Read the file again. Raises ConfigError if it is not valid, and then keeps the keys as they are."""
        self._keys = _read(self._path)


def _read(path: Path) -> dict[bytes, ApiKey]:
    keys: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    for place, entry in _entries(path):
        digest = bytes.fromhex(entry.hash[7:]) if entry.hash else hashlib.sha256(str(entry.key).encode()).digest()
        if entry.name in names:
            raise ConfigError("api_keys", f"{path}, {place}: the name {entry.name!r} is used twice")
        if digest in keys:
            raise ConfigError("api_keys", f"{path}, {place}: {entry.name!r} has the same key as {keys[digest].name!r}")
        names.add(entry.name)
        keys[digest] = ApiKey(entry.name, entry.admin, entry.requests_per_minute, entry.tokens_per_minute)
    if not keys:
        raise ConfigError("api_keys", f"{path} has no keys; write at least one, or leave the option out")
    return keys


def _entries(path: Path) -> Iterator[tuple[str, _Entry]]:
    """Yield each entry and its place in the file. Error messages must not quote the file, because it has keys."""
    for place, value in _values(path):
        if not isinstance(value, dict):
            raise ConfigError("api_keys", f"{path}, {place}: is not a table or a JSON object")
        try:
            yield place, _Entry.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            message = first["msg"][0].lower() + first["msg"][1:]
            raise ConfigError("api_keys", f"{path}, {place}: {where + ': ' if where else ''}{message}") from None


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError("api_keys", f"{path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError:
        raise ConfigError("api_keys", f"{path} is not UTF-8 text") from None
    if path.suffix == ".toml":
        try:
            document = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError("api_keys", f"{path} is not valid TOML: {error}") from None
        tables = document.pop("keys", None)
        if document or not isinstance(tables, list):
            raise ConfigError("api_keys", f"{path} must consist of tables [[keys]]")
        yield from ((f"table {number}", table) for number, table in enumerate(tables, start=1))
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield f"line {number}", from_json(line)
            except ValueError:
                raise ConfigError("api_keys", f"{path}, line {number}: is not a JSON object") from None
