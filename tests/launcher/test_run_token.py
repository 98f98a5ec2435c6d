from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.errors import SettingError
from lockstep.run.machines.run_token import find_token, token_file

pytestmark = pytest.mark.launcher


def test_the_environment_comes_first(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "LOCKSTEP_TOKEN": "0123456789abcdef"}
    token = find_token(environ)
    assert token.key == find_token({**environ, "LOCKSTEP_TOKEN": " 0123456789abcdef\n"}).key
    assert token.key != find_token({**environ, "LOCKSTEP_TOKEN": "0123456789abcdeF"}).key
    assert token.source == "LOCKSTEP_TOKEN"
    assert not list(tmp_path.iterdir())


def test_a_file_of_the_users_own_serves_where_nothing_is_set(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    token = find_token(environ)
    path = tmp_path / ".config" / "lockstep" / "token"
    assert token.source == str(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text().strip()) == 64
    assert find_token(environ).key == token.key
    assert [p.name for p in path.parent.iterdir()] == ["token"]


def test_launchers_that_come_at_once_get_the_same_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: find_token({"HOME": str(tmp_path)}).key, range(40)))
    assert len(keys) == 1


def test_the_key_is_not_shown(tmp_path: Path) -> None:
    token = find_token({"HOME": str(tmp_path)})
    assert token.key.hex() not in repr(token)
    assert repr(token.key) not in repr(token)


def test_everybody_may_be_let_in_explicitly() -> None:
    token = find_token({"LOCKSTEP_TOKEN": "none"})
    assert token.open_to_all
    assert token.key == find_token({"LOCKSTEP_TOKEN": "none"}).key


@pytest.mark.parametrize("given", ["a", "fifteen letters"])
def test_a_token_that_can_be_guessed_is_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(SettingError, match="can be guessed") as error:
        find_token({"LOCKSTEP_TOKEN": given})
    assert given == "a" or given not in str(error.value)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    find_token(environ)
    token_file(environ).chmod(0o640)
    with pytest.raises(SettingError, match="0640"):
        find_token(environ)


def test_a_file_without_a_token_is_refused(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    find_token(environ)
    token_file(environ).write_text("\n")
    with pytest.raises(SettingError, match="fewer than 16"):
        find_token(environ)


def test_a_home_that_cannot_be_written_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="set LOCKSTEP_TOKEN to the same text"):
        find_token({"HOME": str(tmp_path / "file")})
