"""The settings that a Realtime session begins with: the defaults, or those of its ephemeral secret."""

from collections.abc import Mapping
from typing import Any

from server.access.identity import Identity
from server.doors.errors import ApiError, invalid
from server.doors.live.event_error import EventError
from server.doors.model_names import ModelNames
from server.doors.realtime.events.session_patch import read_patch
from server.doors.realtime.session_config import RealtimeConfig


def initial_config(names: ModelNames, identity: Identity, session: Mapping[str, Any] | None) -> RealtimeConfig:
    """The settings that a session begins with.

    Args:
        names: of models.
        identity: whose session it is.
        session: settings of its secret; None: the defaults.
    Raises:
        ApiError.
    """
    model = (session or {}).get("model") or names.served
    if not isinstance(model, str):
        raise invalid("session.model", expected="text", got=type(model).__name__)
    config = RealtimeConfig(names.resolve_for(model, identity))
    if not session:
        return config
    try:
        return config.merged(read_patch({**session, "model": config.model}))
    except EventError as error:
        raise ApiError(400, error.message, param=error.param, code=error.code) from None
