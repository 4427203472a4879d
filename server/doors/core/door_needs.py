"""Labels in the address of a request to a door: what the session's worker must have."""

from starlette.requests import HTTPConnection

from models.errors import SettingsError
from server.dispatch.placement import needs_of
from server.dispatch.queue import Needs
from server.doors.errors import ApiError


def needs_asked(connection: HTTPConnection) -> Needs:
    """What the address demands of the worker. Raises: ApiError."""
    try:
        return needs_of(connection.query_params)
    except SettingsError as error:
        raise ApiError(400, str(error), param="labels") from None
