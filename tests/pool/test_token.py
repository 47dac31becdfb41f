import pytest

from hf_distca.pool.token import make_token, parse_token, read_token, write_token


def test_a_token_survives_its_file_and_only_the_owner_can_read_it(tmp_path):
    path = tmp_path / "folder" / "token"
    token = make_token()
    assert token != make_token()
    for mode in (0o640, 0o604, 0o620):  # the later times over a file that others can read
        write_token(path, token)
        assert path.stat().st_mode & 0o777 == 0o600
        assert read_token(path) == token
        assert list(path.parent.iterdir()) == [path]
        path.chmod(mode)
        with pytest.raises(ValueError, match="chmod 600"):
            read_token(path)
    with pytest.raises(IsADirectoryError):
        write_token(path.parent, token)  # a folder cannot be replaced
    assert list(tmp_path.iterdir()) == [path.parent]  # no token is left anywhere else
    for text in ("", "abc", "0" * 63, "0" * 66, "g" * 64, "é" * 64, "0" * 10000):
        with pytest.raises(ValueError, match="64 hexadecimal digits") as caught:
            parse_token(text)
        assert not text or text not in str(caught.value)
