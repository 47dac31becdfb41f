import pytest

from hf_distca.pool.token import TokenError, make_token, parse_token, read_token, write_token


def test_a_token_survives_its_file_and_only_the_owner_can_read_it(tmp_path):
    path = tmp_path / "token"
    path.write_text("an older file")
    path.chmod(0o644)
    token = make_token()
    write_token(path, token)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == token
    assert list(tmp_path.iterdir()) == [path]


def test_tokens_differ():
    assert make_token() != make_token()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_use_is_refused(tmp_path, mode):
    path = tmp_path / "token"
    write_token(path, make_token())
    path.chmod(mode)
    with pytest.raises(TokenError, match="chmod 600"):
        read_token(path)


@pytest.mark.parametrize("text", ["", "abc", "0" * 63, "0" * 66, "g" * 64, "é" * 64, "0" * 10000])
def test_something_else_is_refused_and_not_shown(tmp_path, text):
    with pytest.raises(TokenError, match="64 hexadecimal digits") as caught:
        parse_token(text)
    assert not text or text not in str(caught.value)


def test_no_file_is_a_clear_error(tmp_path):
    with pytest.raises(TokenError, match="cannot read the token file"):
        read_token(tmp_path / "none")
