"""Names of models and data sets, checked before libraries that take seconds to import."""

import json
from pathlib import Path
from typing import Literal

from hf_distca.cli import InputError
from hf_distca.collator.formats import is_hub_name
from hf_distca.predict.shapes import MODELS

CONFIG_FILE = "config.json"
MODEL_SOURCES = f"{', '.join(MODELS)}, a {CONFIG_FILE}, a folder with one, or a name on the Hub"
TIMEOUT_S = 10
"""Seconds to wait for an answer of the Hub."""
KINDS = {"model": "model", "dataset": "data set"}
"""What the Hub has, by its own name."""


def check_model(name: str) -> None:
    """Raise InputError if there is no such model, or a file or folder has no config."""
    if name in MODELS:
        return
    path = Path(name)
    try:
        if path.exists():
            _check_config(path / CONFIG_FILE if path.is_dir() else path)
        elif is_hub_name(name):
            check_on_hub(name, "model")
        else:
            raise ValueError("there is no such file or folder")
    except (OSError, ValueError) as error:
        raise no_config(name, error) from error


def no_config(name: str, error: Exception) -> InputError:
    """Return the error for a name at which there is no model config."""
    return InputError(
        f"no model config at {name!r}: {_first_line(error)}; expected {MODEL_SOURCES}, which must "
        "be reachable"
    )


def check_tokenizer(name: str) -> None:
    """Raise InputError if there is no such folder or model."""
    try:
        if is_hub_name(name):
            check_on_hub(name, "model")
        elif not Path(name).exists():
            raise ValueError("there is no such folder")
    except ValueError as error:
        raise InputError(f"no tokenizer at {name!r}: {error}") from error


def check_on_hub(name: str, kind: Literal["model", "dataset"]) -> None:
    """Raise ValueError unless the cache or the Hub has a model or a data set of this name.

    The Hub is asked once: libraries that load from the Hub ask six times, for half a minute.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import RepositoryNotFoundError
    from huggingface_hub.file_download import repo_folder_name

    if Path(HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=kind)).is_dir():
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=TIMEOUT_S)
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"the Hub has no such {KINDS[kind]}, or it is private and needs hf auth login"
        ) from error
    except Exception as error:  # of the name, the network or the Hub
        raise ValueError(f"the Hub does not find it ({_first_line(error)})") from error


def _check_config(file: Path) -> None:
    """Raise OSError or ValueError unless a file is the config of a model."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError(f"{file} has no model_type")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
