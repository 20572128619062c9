"""A token that one program leaves and others of the same user find, for as long as its owner lives."""

import multiprocessing
import os
from pathlib import Path

import pytest

from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.rpc import local_token
from pagoda_common.rpc.local_token import find_token_file, left_token, new_token, with_found_token

PORT = 50052
TOKEN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pagoda" / "tokens"


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert all(len(token) == 64 and token.isalnum() for token in tokens)


def test_a_token_is_found_for_its_port_while_its_owner_lives(cache: Path) -> None:
    assert find_token_file(PORT) is None
    with left_token(PORT, TOKEN) as is_found:
        assert is_found
        file = find_token_file(PORT)
        assert file is not None
        assert Path(file).read_text() == f"{TOKEN}\n"
        assert os.stat(file).st_mode & 0o777 == 0o600
        assert cache.stat().st_mode & 0o777 == 0o700
        assert find_token_file(PORT + 1) is None
    assert find_token_file(PORT) is None
    assert not list(cache.iterdir())


def _leave_and_die() -> None:
    with left_token(PORT, TOKEN):
        os._exit(0)


def test_what_a_killed_owner_left_counts_for_nothing_and_is_replaced(cache: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=_leave_and_die)
    child.start()
    child.join(240)
    assert len(list(cache.iterdir())) == 1
    assert find_token_file(PORT) is None
    with left_token(PORT, TOKEN * 2):
        assert Path(find_token_file(PORT) or "").read_text() == f"{TOKEN * 2}\n"


def test_no_token_is_left_where_others_may_look(cache: Path) -> None:
    cache.mkdir(parents=True)
    for mode in (0o755, 0o750, 0o720, 0o710, 0o704, 0o702, 0o701):
        cache.chmod(mode)
        with left_token(PORT, TOKEN) as is_found:
            assert not is_found
        assert not list(cache.iterdir())
    cache.chmod(0o700)
    cache.rename(cache.with_name("elsewhere"))
    cache.symlink_to(cache.with_name("elsewhere"))
    with left_token(PORT, TOKEN) as is_found:
        assert not is_found


def test_a_planted_token_is_not_taken(cache: Path) -> None:
    with left_token(PORT, TOKEN):
        file = Path(find_token_file(PORT) or "")
        for mode in (0o644, 0o640, 0o620, 0o610, 0o604, 0o602, 0o601):
            file.chmod(mode)
            assert find_token_file(PORT) is None, f"{mode:o}"
        file.chmod(0o600)
        assert find_token_file(PORT) is not None
        kept = file.rename(file.with_name("kept"))
        file.symlink_to(kept)
        assert find_token_file(PORT) is None
        file.unlink()
        os.mkfifo(file, 0o600)
        assert find_token_file(PORT) is None
        if os.geteuid() == 0:
            file.unlink()
            kept.rename(file)
            assert find_token_file(PORT) is not None
            os.chown(file, 65534, 65534)
            assert find_token_file(PORT) is None


def test_it_is_shown_to_loopback_alone_and_never_in_place_of_a_configured_one() -> None:
    with left_token(PORT, TOKEN):
        found = with_found_token(SecurityConfig(), f"127.0.0.1:{PORT}")
        assert found.service_token_file == find_token_file(PORT)
        for security, address in (
            (SecurityConfig(), f"10.0.0.1:{PORT}"),
            (SecurityConfig(), "unix-abstract:a"),
            (SecurityConfig(), "127.0.0.1:x"),
            (SecurityConfig(), f"127.0.0.1:{PORT + 1}"),
            (SecurityConfig(service_token=TOKEN), f"127.0.0.1:{PORT}"),
            (SecurityConfig(service_token_file="file"), f"127.0.0.1:{PORT}"),
            (SecurityConfig(tls_ca="ca"), f"127.0.0.1:{PORT}"),
        ):
            assert with_found_token(security, address) is security


def test_a_token_that_cannot_be_put_in_its_place_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*paths: Path) -> None:
        raise OSError("no room")

    monkeypatch.setattr(local_token.os, "replace", replace)
    with pytest.raises(OSError, match="no room"):
        local_token._create(cache / "host-1", TOKEN)
    assert list(cache.iterdir()) == []
