"""Names of models, data sets and kernels, checked before libraries that take seconds to import."""

import json
import re
from importlib.metadata import distribution
from pathlib import Path
from typing import Literal

from hf_distca.cli import InputError
from hf_distca.collator.formats import is_hub_name
from hf_distca.kernel_names import check_installed
from hf_distca.predict.shapes import MODELS
from hf_distca.progress import terminal_status

CONFIG_FILE = "config.json"
AUTO_CLASSES = "transformers/models/auto/modeling_auto.py"
CAUSAL_TYPES = re.compile(
    r"^MODEL_FOR_(?:CAUSAL_LM|IMAGE_TEXT_TO_TEXT|MULTIMODAL_LM)_MAPPING_NAMES = "
    r"OrderedDict\((.*?)^\)",
    re.DOTALL | re.MULTILINE,
)
"""Source of the tables in transformers that give the language model of each type, with towers or
without."""
TYPE = re.compile(r'^\s+\("([^"]+)", ', re.MULTILINE)
"""Type in a line of such a table."""
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
            _check_cached_config(name)
        else:
            raise ValueError("there is no such file or folder")
    except (OSError, ValueError) as error:
        raise no_config(name, error) from error


def check_kernel(name: str) -> None:
    """Raise InputError if the package of a kernel is not installed."""
    try:
        check_installed(name)
    except ImportError as error:
        raise InputError(str(error)) from error


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
        with terminal_status(f"Asking the Hub for the {KINDS[kind]} {name}"):
            HfApi().repo_info(name, repo_type=kind, timeout=TIMEOUT_S)
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"the Hub has no such {KINDS[kind]}, or it is private and needs hf auth login"
        ) from error
    except Exception as error:  # of the name, the network or the Hub
        raise ValueError(f"the Hub does not find it ({_first_line(error)})") from error


def _check_cached_config(name: str) -> None:
    """Raise OSError or ValueError if the cache has a config that cannot be used."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, CONFIG_FILE)
    if isinstance(cached, str):
        _check_config(Path(cached))


def _check_config(file: Path) -> None:
    """Raise OSError or ValueError unless a file is the config of a causal language model."""
    content = json.loads(file.read_text(encoding="utf-8"))
    model_type = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(model_type, str):
        raise ValueError(f"{file} has no model_type")
    package = distribution("transformers")
    known_types = causal_types(Path(str(package.locate_file(AUTO_CLASSES))))
    if known_types and model_type not in known_types:
        raise ValueError(
            f"transformers {package.version} has no causal language model of the type "
            f"{model_type!r}"
        )


def causal_types(source: Path) -> set[str]:
    """Return the types of causal language models in the source of transformers' auto classes.

    The source is read because importing it takes torch. The set is empty if the table of types is
    elsewhere, as in other versions of transformers.
    """
    tables = CAUSAL_TYPES.findall(source.read_text(encoding="utf-8")) if source.is_file() else []
    return {model_type for table in tables for model_type in TYPE.findall(table)}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
