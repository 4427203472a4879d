"""Gateways with keys: their settings, keys and requests."""

from pathlib import Path
from typing import Any

from server.access.keys import hash_of
from worker.config.access import ApiKeyEntry, ClientLimits
from worker.config.service import Config, default_config
from worker.key_text import KEY_PREFIX

# As long as real ones; fixed, so that all test processes name their tests alike.
USER, ADMIN = f"{KEY_PREFIX}user{'Uu5' * 13}", f"{KEY_PREFIX}boss{'Bb7' * 13}"


def entry(name: str, key: str, **fields: Any) -> ApiKeyEntry:
    return ApiKeyEntry(name=name, hash=hash_of(key), **fields)


def config_with(folder: Path, *entries: ApiKeyEntry, **limits: Any) -> Config:
    """Settings with keys. folder: `service.data_dir`. limits: of each client."""
    config = default_config()
    update = {"data_dir": folder, "api_keys": entries, "limits": ClientLimits(**limits)}
    return config.model_copy(update={"service": config.service.model_copy(update=update)})


def user_and_admin(folder: Path, **fields: Any) -> Config:
    """Settings with the keys `USER` and `ADMIN`. fields: of the user's entry."""
    return config_with(folder, entry("user", USER, **fields), entry("boss", ADMIN, admin=True))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
