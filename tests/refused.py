"""Expect a refusal by its entry in a table, so that no message is written twice."""

import re
from string import Formatter
from typing import Any

import pytest

from hf_distca.checks.refusal import Refusal


def refused(entry: Refusal, **values: Any) -> Any:
    """Expect the error of an entry, alone or in a list of several.

    `values` are those of its texts that count, by name.
    """
    return pytest.raises(ValueError, match=pattern(entry, **values))


def pattern(entry: Refusal, **values: Any) -> str:
    """A regular expression of the message of an entry, in which other values than those given are
    anything.
    """
    parts = []
    for text, name, spec, conversion in Formatter().parse(
        f"{entry.found}, but {entry.reason}; {entry.remedy}"
    ):
        parts.append(re.escape(text))
        # Texts of a rule name attributes of its subject.
        key = (name or "").rpartition(".")[2]
        if key in values:
            field = f"{{{key}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}}}"
            parts.append(re.escape(field.format(**values)))
        elif name is not None:
            parts.append("(?s:.*?)")
    return "".join(parts) + r"(\n|$)"
