"""Tokenizers of model folders, hub ids and GGUF files."""

from typing import Any

from fncore.errors import UserError
from fncore.models.hf import resolve


def load_tokenizer(model: str) -> Any:
    """The `transformers` tokenizer of a model, named as for `fncore.models.hf.load`. No remote code runs.

    Raises `UserError` where there is no such model, or none that `transformers` can read.
    """
    from transformers import AutoTokenizer

    path = resolve(model)
    folder, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True, **options)
    except Exception as error:  # whatever a broken file makes of the readers below
        raise UserError(f"{model}: no readable tokenizer ({' '.join(str(error).split())[:300]})") from error
