"""Text to train on without a download: the sources of the Python standard library, one document per file."""

import sysconfig
from pathlib import Path

import datasets
from tqdm.auto import tqdm

SMALLEST, LARGEST = 100, 300_000
"""Bytes of the smallest and the largest file that is a document."""


def standard_library(progress: bool = True) -> datasets.Dataset:
    """The .py files of this Python's standard library, in the order of their paths.

    Whole files of 100 bytes to 300 kB: a few are hundreds of times as long as most, which makes their lengths
    a fair picture of long-context data. Installed packages are left out, and files that are not UTF-8, which
    the standard library has to test its own parser with.

    Args:
        progress: show a progress bar.

    Returns:
        A data set with the column `text`.

    Raises:
        FileNotFoundError: this Python has its standard library not as files, but in an archive.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)
        and SMALLEST <= path.stat().st_size <= LARGEST
    )
    texts = []
    for path in tqdm(paths, "Reading the standard library", unit=" files", disable=not progress):
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    if not texts:
        raise FileNotFoundError(f"Found no .py files under {root}; expected the standard library's sources.")
    return datasets.Dataset.from_dict({"text": texts})
