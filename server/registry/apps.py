"""Which kinds of conversation are offered, and which of them somebody has switched off. Plain classes: no I/O.

Knows names, pages and switches, for as long as the process lives. Does not know HTTP.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from models.errors import ModelError
from server.dispatch.queue import RequestType


class UnknownAppError(ModelError, LookupError):
    """There is no such app."""


@dataclass(frozen=True)
class App:
    """One kind of conversation. route: its page. request_type: of its sessions."""

    app_id: str
    name: str
    route: str
    request_type: RequestType


KNOWN = (
    App("omni", "Omni Full-Duplex", "/omni", "omni_duplex"),
    App("audio_duplex", "Audio Full-Duplex", "/audio_duplex", "audio_duplex"),
)


class Apps:
    """All of them, in their order; at first each is switched on."""

    def __init__(self, known: Sequence[App] = KNOWN):
        self.all = tuple(known)
        self._off: set[str] = set()

    @property
    def enabled(self) -> list[App]:
        return [app for app in self.all if self.is_enabled(app)]

    def is_enabled(self, app: App) -> bool:
        return app.app_id not in self._off

    def takes(self, request_type: RequestType) -> bool:
        """Whether sessions of this kind may begin."""
        return any(app.request_type == request_type for app in self.enabled)

    def switch(self, app_id: str, on: bool) -> App:
        """Sessions that run or wait are left alone. Raises: UnknownAppError."""
        app = next((app for app in self.all if app.app_id == app_id), None)
        if app is None:
            raise UnknownAppError("app", expected=" or ".join(app.app_id for app in self.all), got=app_id[:60])
        (self._off.discard if on else self._off.add)(app_id)
        return app
