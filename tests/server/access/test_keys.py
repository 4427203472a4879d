"""API keys: hashes, constant time, the file and its changes, the command, and texts without keys."""

import io
import json
import logging
from pathlib import Path

import pytest

from models.errors import ConfigError, SettingsError
from server.access import keys as keys_module
from server.access.__main__ import main
from server.access.keys import ApiKey, ApiKeys, KeyFile, api_keys_of, hash_of
from tests.server.access.keyed_gateway import ADMIN, USER, config_with, entry
from worker import log
from worker.config.access import ApiKeyEntry
from worker.config.service import load_config
from worker.config.settings import SettingError
from worker.key_text import new_key, scrubbed


def keys_of(folder: Path, *entries: ApiKeyEntry) -> ApiKeys:
    return api_keys_of(config_with(folder, *entries))


def test_finds_keys_and_no_others(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, entry("user", USER, sessions=2), entry("boss", ADMIN, admin=True))
    user, boss = keys.find(USER), keys.find(ADMIN)
    assert user is not None and boss is not None and keys.required
    assert (user.name, user.is_admin, user.limits.sessions) == ("user", False, 2) and boss.is_admin
    for wrong in ("", "duo_", USER[:-1], USER + "x", USER.upper(), hash_of(USER), "\udc80", new_key()):
        assert keys.find(wrong) is None, wrong


def test_compares_every_hash_in_constant_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of comparisons depends on the number of keys only, and each is `hmac.compare_digest`."""
    calls: list[tuple[str, str]] = []
    real = keys_module.hmac.compare_digest

    def counted(one: str, other: str) -> bool:
        calls.append((one, other))
        return real(one, other)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", counted)
    all_keys = [new_key() for _ in range(5)]
    keys = keys_of(tmp_path, *(entry(f"k{index}", key) for index, key in enumerate(all_keys)))
    for key in (*all_keys, new_key(), ""):
        calls.clear()
        keys.find(key)
        assert len(calls) == 5, f"expected a comparison with each key, got {len(calls)}"
        assert all(len(one) == len(other) for one, other in calls)


def test_stores_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUOLOGUE_SERVICE_DATA_DIR", str(tmp_path))
    assert main(["add", "alice", "--sessions", "2", "--minutes-per-day", "30", "--model", "m"]) == 0
    key = capsys.readouterr().out.strip()
    file = tmp_path / "api_keys.json"
    assert key.startswith("duo_") and key not in file.read_text() and file.stat().st_mode & 0o777 == 0o600
    config, _ = load_config(None, flags={}, environ={"DUOLOGUE_SERVICE_DATA_DIR": str(tmp_path)})
    found = api_keys_of(config).find(key)
    assert found is not None and (found.limits.sessions, found.limits.minutes_per_day) == (2, 30)
    assert found.models == {"m"}
    assert main(["add", "alice"]) == 2 and "a name that no key has" in capsys.readouterr().err
    assert main(["add", "a b"]) == 2 and main(["add", "x", "--sessions", "0"]) == 2
    assert main(["add", "boss", "--admin", "--print-only"]) == 0
    printed, boss_key = capsys.readouterr().out.splitlines()
    assert json.loads(printed) == {"name": "boss", "hash": hash_of(boss_key), "admin": True}
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert "alice  key  api_keys.json  2 sessions at once  30 minutes a day  models m" in shown and key not in shown
    assert main(["remove", "alice"]) == 0 and main(["remove", "alice"]) == 2
    assert api_keys_of(config).required, "expected keys to stay required without any"


def test_reads_the_file_again(tmp_path: Path) -> None:
    now = 0.0
    file = KeyFile(tmp_path / "api_keys.json")
    keys = ApiKeys((), file, lambda: now)
    assert not keys.required
    file.write([entry("user", USER)])
    assert keys.find(USER) is None, "expected the file to be checked once a second"
    now = 1.5
    assert keys.find(USER) is not None and keys.required
    file.path.write_text("{")
    now = 3.0
    assert keys.find(USER) is not None, "expected the former keys after a damaged file"
    file.path.unlink()
    now = 4.5
    assert keys.find(USER) is None and keys.required, "expected no open server after the file is removed"


@pytest.mark.parametrize("content", ["{", "[]", '{"keys": {}}', '{"keys": [1]}', '{"keys": [{"name": "x"}]}'])
def test_refuses_damaged_file_at_the_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "api_keys.json").write_text(content)
    with pytest.raises((ConfigError, SettingsError)):
        keys_of(tmp_path)


def test_refuses_names_and_hashes_given_twice(tmp_path: Path) -> None:
    for entries in ((entry("a", USER), entry("a", ADMIN)), (entry("a", USER), entry("b", USER))):
        with pytest.raises(SettingsError, match="once"):
            ApiKeys([ApiKey.of(one) for one in entries], KeyFile(tmp_path / "none"))


@pytest.mark.parametrize(
    "value",
    [
        USER,
        json.dumps([USER]),
        json.dumps([{"name": "x", "hash": USER}]),
        json.dumps([{"name": "x", "key": USER}]),
        json.dumps([{"name": USER + "/", "hash": "y"}]),
        json.dumps({"x": USER}),
    ],
)
def test_errors_of_settings_show_no_key(value: str) -> None:
    with pytest.raises(SettingError) as caught:
        load_config(None, flags={}, environ={"DUOLOGUE_SERVICE_API_KEYS": value})
    assert USER not in str(caught.value) and USER[8:] not in str(caught.value), caught.value


def test_unknown_setting_shows_no_key() -> None:
    with pytest.raises(SettingError) as caught:
        load_config(None, flags={}, environ={"DUOLOGUE_SERVICE_API_KEY": USER})
    assert USER[8:] not in str(caught.value), caught.value


def test_logs_show_no_key() -> None:
    stream = io.StringIO()
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        log.set_up(stream=stream)
        logging.getLogger("x").warning("GET /ws?token=%s and ek_%s", USER, "a" * 32)
        try:
            raise ValueError(f"openai-insecure-api-key.{USER}")
        except ValueError:
            logging.getLogger("x").exception("failed")
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    text = stream.getvalue()
    assert "duo_..." in text and "ek_..." in text and USER[4:] not in text and "a" * 32 not in text, text


def test_scrubs_only_keys() -> None:
    assert scrubbed("duo_short task_force week_end_of_the_year_x") == "duo_short task_force week_end_of_the_year_x"
