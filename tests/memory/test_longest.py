import pytest

from hf_distca.memory.counter import STEP, longest_tokens


@pytest.mark.parametrize(
    ("available", "longest"), [(0, 0), (1023, 0), (1024, 1024), (7 * 1024 + 5, 7168), (10**6, 976 * 1024)]
)
def test_as_many_as_fit(available, longest):
    asked = []

    def needed(tokens):
        asked.append(tokens)
        return tokens

    assert longest_tokens(needed, available) == longest
    assert all(tokens % STEP == 0 for tokens in asked)


def test_where_memory_grows_faster_with_length_no_more_than_fit():
    def needed(tokens):
        return tokens + max(0, tokens - 5000)

    assert needed(longest_tokens(needed, 9000)) <= 9000
