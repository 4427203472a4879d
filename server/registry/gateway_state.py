"""What operators change while the gateway runs, kept over a restart: disabled apps and settings of the estimates.

Only changed values are stored. They override the settings file until they are changed again or the file is removed.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from models.atomic_file import write_atomically
from models.errors import ConfigError
from server.dispatch.eta import CONFIG_FIELDS, Eta
from server.registry.apps import Apps
from worker.config.json_file import read_json
from worker.config.service import MAX_S

LOG = logging.getLogger(__name__)
FILE_NAME = "gateway_state.json"
ALPHA = "ema_alpha"


class _Stored(BaseModel):
    """apps: id -> enabled. eta: field of `EtaConfig` -> value."""

    model_config = ConfigDict(strict=True)

    apps: dict[str, bool] = {}
    eta: dict[str, Annotated[float, Field(ge=0, le=MAX_S, allow_inf_nan=False)]] = {}


class GatewayState:
    """The stored values. A damaged file is logged, and replaced by the next change.

    Args:
        path: the file, which need not exist.
    """

    def __init__(self, path: Path):
        self._path = path
        self._writing = asyncio.Lock()
        self._stored = _read(path) if path.exists() else _Stored()

    def apply(self, apps: Apps, eta: Eta) -> None:
        """Make the stored changes again. Unknown names, such as those of a later version, have no effect."""
        for app in apps.all:
            if app.app_id in self._stored.apps:
                apps.set_enabled(app.app_id, self._stored.apps[app.app_id])
        known = {*CONFIG_FIELDS.values(), ALPHA}
        changes = {key: value for key, value in self._stored.eta.items() if key in known}
        if changes.get(ALPHA, 0) > 1:
            del changes[ALPHA]
        if changes:
            LOG.info("estimates: %s overrides the settings with %s", self._path, changes)
            eta.configure(changes)

    async def store_app(self, app_id: str, *, enabled: bool) -> None:
        self._stored.apps[app_id] = enabled
        await self._write()

    async def store_eta(self, changes: Mapping[str, float]) -> None:
        self._stored.eta.update(changes)
        await self._write()

    async def _write(self) -> None:
        """Write the file. A change that cannot be stored has its effect until the gateway stops, and is logged."""
        async with self._writing:
            data = json.dumps(self._stored.model_dump(), indent=1).encode()
            try:
                await asyncio.to_thread(_write, self._path, data)
            except OSError as error:
                LOG.warning("gateway state: expected to write %s, got %s", self._path, error)


def _read(path: Path) -> _Stored:
    try:
        return _Stored.model_validate(read_json(path))
    except ConfigError as error:
        LOG.warning("gateway state: %s; nothing is restored", error)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        LOG.warning("gateway state: %s: %s: %s; nothing is restored", path, where, first["msg"])
    return _Stored()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
