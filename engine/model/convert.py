"""A GGUF file made into a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from llmsched.engine.model.checkpoint import SAFETENSORS
from llmsched.engine.model.gguf import read_gguf
from llmsched.engine.model.gguf_config import gguf_config, gguf_generation_config
from llmsched.engine.model.gguf_tokenizer import gguf_tokenizer
from llmsched.engine.model.gguf_weights import gguf_state_dict
from llmsched.engine.progress import Progress


def convert_gguf(gguf: Path, target: Path, progress: Progress) -> None:
    """Write the model of `gguf` into the new directory `target`, weights as float32 safetensors. Raises ModelError."""
    file = read_gguf(gguf)
    target.mkdir()
    state = gguf_state_dict(file)
    tensors = {}
    for done, (name, tensor) in enumerate(state.items()):
        progress(f"converting {gguf.name}", done, len(state))
        tensors[name] = tensor.read()
    save_file(tensors, target / SAFETENSORS, metadata={"format": "pt"})
    config = gguf_config(file)
    config.dtype = "float32"
    config.save_pretrained(target)
    generation = json.dumps(gguf_generation_config(file), indent=2)
    (target / "generation_config.json").write_text(generation + "\n", encoding="utf-8")
    gguf_tokenizer(file).save_pretrained(target)
    progress(f"converting {gguf.name}", len(state), len(state))
