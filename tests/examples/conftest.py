from pathlib import Path

import pytest

from tests.examples.running import run_forked


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A small LLaMA checkpoint with a tokenizer, made by the example."""
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = "--hidden_size 64 --layers 2 --heads 4 --kv_heads 2 --vocab_size 512"
    run_forked(
        ["make_checkpoint.py", "--output", str(folder), *sizes.split()], folder / "printed", ranks=1
    )
    return folder
