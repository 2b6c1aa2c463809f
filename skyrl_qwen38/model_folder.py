"""What the configuration needs to know of a checkpoint, read as data: no library builds a model or runs its code."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_qwen38.overrides import ConfigError

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")


@dataclass(frozen=True)
class ModelFacts:
    """Sizes that the parallel layout must fit.

    Args:
        path: as the user wrote it.
        num_experts: E, routed experts of a layer.
        ngram_heads: K, heads of the n-gram table: heads of an n-gram order times the orders from 2 up.
        vocab_size: number of token ids.
    """

    path: str
    num_experts: int
    ngram_heads: int
    vocab_size: int


def open_model(path: str, setting: str = "trainer.policy.model.path") -> ModelFacts:
    """Check that `path` is a whole `qwen4_exp` checkpoint that carries no code.

    A folder is checked down to the tensors' offsets. A hub id is checked by its configuration; its tensors come later,
    with the download.

    Args:
        path: folder or hub id.
        setting: where the user wrote it, for messages.

    Raises:
        ConfigError: a file is missing, truncated or malformed, the model is another one, or it carries code.
    """
    folder = Path(path).expanduser()
    local = folder.is_dir()
    if not local:
        folder = _small_files_from_hub(path, setting)
    config = _read_config(folder / "config.json")
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"{path}: config.json says model_type {model_type!r}, and only qwen4_exp can be trained here")

    # Imported here: a wrong key is reported without the seconds that safetensors and torch take.
    from skyrl_qwen38.checkpoint.index import CheckpointIndex, refuse_remote_code

    try:
        refuse_remote_code(folder)
        if local:
            CheckpointIndex.open(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error
    text = config.get("text_config", config)
    return ModelFacts(
        path=path,
        num_experts=_size(text, "num_experts", path),
        ngram_heads=_size(text, "heads_per_ngram", path) * (_size(text, "ngram_size", path) - 1),
        vocab_size=_size(text, "vocab_size", path),
    )


def _small_files_from_hub(path: str, setting: str) -> Path:
    """The folder of a hub repository's text files, from the local cache or the hub."""
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ConfigError(f"{setting}={path} is not a folder; make the checkpoint or correct the path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # *.py is fetched to be refused, never run.
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.py"]))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"{setting}={path} is neither a folder here nor a repository that the hub gives: {reason}"
        ) from error


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing; name the folder of a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("text_config", {}), dict):
        raise ConfigError(f"{file} is not a model configuration: it and its text_config must be JSON objects")
    return config


def _size(text_config: dict[str, Any], key: str, path: str) -> int:
    defaults = {
        "num_experts": 512,
        "heads_per_ngram": 8,
        "ngram_size": 3,
        "vocab_size": 248320,
    }  # of Transformers' Qwen4ExpTextConfig
    value = text_config.get(key, defaults.get(key))
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{path}: config.json has {key}={value!r}, which must be a whole number of at least 1")
    return value
