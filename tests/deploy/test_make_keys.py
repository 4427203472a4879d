"""Keys and secrets that `deploy/make_keys.py` makes are those that the server reads."""

import json
from pathlib import Path

import pytest

from deploy.make_keys import secret, write_files
from server.access.keys import hash_of
from worker.config.service import load_config
from worker.key_text import WORKER_SECRET_VARIABLE, scrubbed


def test_server_accepts_the_keys(tmp_path: Path) -> None:
    admin = write_files(tmp_path)
    lines = (tmp_path / ".env").read_text(encoding="utf-8").splitlines()
    environ = {name: value.strip("'") for name, _, value in (line.partition("=") for line in lines)}
    assert len(environ[WORKER_SECRET_VARIABLE]) >= 32
    config, notes = load_config(None, flags={}, environ=environ)
    assert not notes, f"expected no setting without effect, got {notes}"
    prometheus = (tmp_path / "secrets" / "prometheus.key").read_text(encoding="utf-8")
    got = {(key.name, key.admin, key.hash) for key in config.service.api_keys}
    assert got == {("admin", True, hash_of(admin)), ("prometheus", False, hash_of(prometheus))}, f"got {got}"
    assert admin not in scrubbed(admin), "expected the form of a key, which logs hide"
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600


def test_existing_keys_are_kept(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "prometheus.key").write_text("old")
    with pytest.raises(FileExistsError):
        write_files(tmp_path)
    assert not (tmp_path / ".env").exists() and (tmp_path / "secrets" / "prometheus.key").read_text() == "old"


def test_secret_of_kubernetes_has_the_variables_of_the_pods() -> None:
    manifest, admin = secret("duologue")
    data = manifest["stringData"]
    assert set(data) == {"DUOLOGUE_SERVICE_API_KEYS", WORKER_SECRET_VARIABLE, "prometheus.key"}
    hashes = {entry["name"]: entry["hash"] for entry in json.loads(data["DUOLOGUE_SERVICE_API_KEYS"])}
    assert hashes == {"admin": hash_of(admin), "prometheus": hash_of(data["prometheus.key"])}
