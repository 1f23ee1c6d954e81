"""Search for a model's files. A model is `demo`, a Hugging Face directory, a .gguf file or a hub id."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmsched.engine.errors import ModelError, one_line
from llmsched.engine.model_files import HUB_IGNORED, HUB_PATTERNS, HUB_PICKLES, QUANTIZATION_FILE
from llmsched.engine.progress import Progress, silent
from llmsched.engine.proxies import check_proxies

#: Seconds after which a hub that does not answer counts as unreachable.
_HUB_TIMEOUT = 5.0


class HubUnreachableError(ModelError):
    """Error for a Hugging Face hub that cannot be reached."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    spec: str  # name that the user gave
    name: str  # default name in the API
    path: Path
    kind: Literal["directory", "gguf"]
    gguf: Path | None = None  # .gguf file that has the weights in quantised form


def locate(spec: str, progress: Progress = silent) -> ModelSource:
    """Find the model `spec` on disk, or download it. Raises ModelError if the model is not found."""
    if spec == "demo":
        from llmsched.engine.model.demo import GGUF_NAME, demo_directory

        directory = demo_directory(progress)
        return ModelSource(spec, "demo", directory, "directory", directory / GGUF_NAME)
    if not spec.strip():
        raise ModelError("model: the name is empty; expected a directory, a .gguf file, a hub id or demo")
    path = Path(os.path.expanduser(spec))
    if path.is_dir():
        return _open_directory(spec, Path(os.path.abspath(path)))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model {spec}: there is no such file")
        return ModelSource(spec, path.stem, path, "gguf", path)
    if path.exists():
        raise ModelError(
            f"model {spec}: expected a directory, a .gguf file, a hub id or demo, found another kind of file"
        )
    return ModelSource(spec, spec, _download(spec, progress), "directory")


def _open_directory(spec: str, path: Path) -> ModelSource:
    """Return the model in a Hugging Face directory, or in a folder models--ORGANISATION--NAME of the hub's cache."""
    # From the cache, the snapshot of the branch main is returned. A snapshot is a folder named after its commit, so
    # the model gets the repository's id as its name.
    repository = path.parent.parent if path.parent.name == "snapshots" else path
    if not repository.name.startswith("models--"):
        return ModelSource(spec, path.name, path, "directory")
    branch = repository / "refs" / "main"
    if path == repository and branch.is_file():
        path = repository / "snapshots" / branch.read_text(encoding="utf-8").strip()
    return ModelSource(spec, repository.name.removeprefix("models--").replace("--", "/"), path, "directory")


def fetch_config(repo_id: str, progress: Progress = silent) -> Path:
    """Return the path of a hub repository's config.json, cached or downloaded. Raises ModelError on failure."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    if cached := cached_config(repo_id):
        return cached
    progress(f"fetching config.json of {repo_id} from the Hugging Face hub", 0, 0)
    with _hub_failures(repo_id):
        _check_reachable(repo_id)
        config = Path(hf_hub_download(repo_id, "config.json"))
        with suppress(EntryNotFoundError):
            hf_hub_download(repo_id, QUANTIZATION_FILE)
        return config


def cached_config(repo_id: str) -> Path | None:
    """Return the path of a repository's config.json in the hub's cache on this machine, or None."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo_id, "config.json")
    except HFValidationError:  # not a hub id; fetching it says so
        return None
    return Path(found) if isinstance(found, str) else None


def _check_reachable(repo_id: str) -> None:
    """Raise an error within seconds if the hub cannot be reached."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    # Without this check, a download would retry for half a minute.
    with suppress(EntryNotFoundError):  # the loader says what the repository lacks
        if constants.HF_HUB_OFFLINE:
            return
        get_hf_file_metadata(hf_hub_url(repo_id, "config.json"), timeout=_HUB_TIMEOUT)


def _download(repo_id: str, progress: Progress) -> Path:
    """Download a hub repository and return its local directory. Without a connection, return the cached copy."""
    from huggingface_hub import snapshot_download

    progress(f"fetching {repo_id} from the Hugging Face hub", 0, 0)
    try:
        with _hub_failures(repo_id):
            _check_reachable(repo_id)
            snapshot = Path(
                snapshot_download(repo_id, allow_patterns=list(HUB_PATTERNS), ignore_patterns=list(HUB_IGNORED))
            )
            if not any(snapshot.glob("*.safetensors")):
                snapshot_download(repo_id, allow_patterns=[HUB_PICKLES])
            return snapshot
    except HubUnreachableError:
        # huggingface_hub counts a snapshot without its LICENSE as incomplete. The loader names files that it misses.
        config = cached_config(repo_id)
        if config is None:
            raise
        return config.parent


@contextmanager
def _hub_failures(repo_id: str) -> Iterator[None]:
    """Convert errors of huggingface_hub: to HubUnreachableError if there is no connection, otherwise to ModelError."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)  # huggingface_hub would log every retry
    try:
        yield
        return
    except HFValidationError:
        reason = "there is no such directory, and it is not a hub id (organisation/name)"
    except GatedRepoError:
        reason = "the hub asks for consent: accept the model's terms on its page and log in with `hf auth login`"
    except RepositoryNotFoundError:
        reason = "there is no such directory, and the hub has no such model (if it is private: `hf auth login`)"
    except Exception as error:  # huggingface_hub converts few errors of its HTTP client
        if isinstance(error, HfHubHTTPError | OSError) and not isinstance(error, LocalEntryNotFoundError):
            raise ModelError(f"model {repo_id}: the hub cannot be read: {one_line(error)}") from error
        check_proxies()
        detail = "" if isinstance(error, LocalEntryNotFoundError) else f" ({one_line(error)})"
        raise HubUnreachableError(
            f"model {repo_id}: there is no such directory, the hub cannot be reached{detail}, and its cache here lacks "
            f"the model ({constants.HF_HUB_CACHE}); give a local directory, a .gguf file or demo"
        ) from error
    finally:
        log.setLevel(level)
    raise ModelError(f"model {repo_id}: {reason}")
