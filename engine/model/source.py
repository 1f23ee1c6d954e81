"""Search for a model's files. A model is `demo`, a Hugging Face directory, a .gguf file or a hub id."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmsched.engine.errors import ModelError, one_line
from llmsched.engine.progress import Progress, silent

#: Files of a hub repository that serving needs; other formats of the same weights are not downloaded.
HUB_PATTERNS = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
HUB_IGNORED = ("*/*", "consolidated*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Model on disk.

    `spec` is the model as the user named it. `name` is its default name in the API. `path` is its directory or .gguf
    file.
    """

    spec: str
    name: str
    path: Path
    kind: Literal["directory", "gguf"]


def locate(spec: str, progress: Progress = silent) -> ModelSource:
    """Find the model `spec` on disk; download `demo` and hub ids first. Raises ModelError if it is not found."""
    if spec == "demo":
        from llmsched.engine.model.demo import demo_directory

        return ModelSource(spec, "demo", demo_directory(progress), "directory")
    if not spec.strip():
        raise ModelError("model: the name is empty; expected a directory, a .gguf file, a hub id or demo")
    path = Path(os.path.expanduser(spec))
    if path.is_dir():
        return ModelSource(spec, path.resolve().name, path, "directory")
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model {spec}: there is no such file")
        return ModelSource(spec, path.stem, path, "gguf")
    if path.exists():
        raise ModelError(
            f"model {spec}: expected a directory, a .gguf file, a hub id or demo, found another kind of file"
        )
    return ModelSource(spec, spec, _download(spec, progress), "directory")


def fetch_config(repo_id: str, progress: Progress = silent) -> Path:
    """Return the path of a hub repository's config.json, after downloading it unless it is cached.

    Raises ModelError if the hub has no such repository or cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    progress(f"fetching config.json of {repo_id} from the Hugging Face hub", 0, 0)
    with _hub_failures(repo_id):
        return Path(hf_hub_download(repo_id, "config.json"))


def _download(repo_id: str, progress: Progress) -> Path:
    """Download a hub repository and return its local directory. Without a connection, return the cached copy."""
    from huggingface_hub import snapshot_download

    progress(f"fetching {repo_id} from the Hugging Face hub", 0, 0)
    with _hub_failures(repo_id):
        snapshot = Path(
            snapshot_download(repo_id, allow_patterns=list(HUB_PATTERNS), ignore_patterns=list(HUB_IGNORED))
        )
        if not any(snapshot.glob("*.safetensors")):
            snapshot_download(repo_id, allow_patterns=["pytorch_model*.bin"])
        return snapshot


@contextmanager
def _hub_failures(repo_id: str) -> Iterator[None]:
    """Convert errors of huggingface_hub to ModelErrors that tell the user how to proceed."""
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
    except LocalEntryNotFoundError:
        reason = (
            "there is no such directory, the hub cannot be reached and its cache here lacks the model; "
            "give a local directory, a .gguf file or demo"
        )
    except (HfHubHTTPError, OSError) as error:
        reason = f"the hub cannot be read: {one_line(error)}"
    finally:
        log.setLevel(level)
    raise ModelError(f"model {repo_id}: {reason}")
