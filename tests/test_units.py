"""Numbers with their nouns."""

import pytest

from hf_distca.units import counted


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, ("rank",), "0 ranks"),
        (1, ("rank",), "1 rank"),
        (2000, ("rank",), "2,000 ranks"),
        (1, ("micro-batch", "micro-batches"), "1 micro-batch"),
        (2, ("micro-batch", "micro-batches"), "2 micro-batches"),
    ],
)
def test_a_noun_agrees_with_its_number(count, noun, text):
    assert counted(count, *noun) == text
