"""The apps, which are the kinds of conversation on offer, and whether each is enabled.

Contains no I/O. The state is not stored: a new process starts with all apps enabled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from models.errors import ModelError
from server.dispatch.queue import RequestType


class UnknownAppError(ModelError, LookupError):
    """No app has this id."""


@dataclass(frozen=True)
class App:
    """One kind of conversation. route: path of its page. request_type: of its sessions."""

    app_id: str
    name: str
    route: str
    request_type: RequestType


KNOWN = (
    App("turnbased", "Turn-based Chat", "/turnbased", "chat"),
    App("half_duplex_audio", "Half-Duplex Audio", "/half_duplex", "half_duplex_audio"),
    App("omni", "Omni Full-Duplex", "/omni", "omni_duplex"),
    App("audio_duplex", "Audio Full-Duplex", "/audio_duplex", "audio_duplex"),
)


class Apps:
    """All apps in their order. Each is enabled at first."""

    def __init__(self, known: Sequence[App] = KNOWN):
        self.all = tuple(known)
        self._disabled: set[str] = set()

    @property
    def enabled(self) -> list[App]:
        return [app for app in self.all if self.is_enabled(app)]

    def is_enabled(self, app: App) -> bool:
        return app.app_id not in self._disabled

    def accepts(self, request_type: RequestType) -> bool:
        """Whether sessions of this type may start."""
        return any(app.request_type == request_type for app in self.enabled)

    def name_of(self, request_type: RequestType) -> str:
        """The id of the app with sessions of this type; the type itself if no app has it."""
        return next((app.app_id for app in self.all if app.request_type == request_type), request_type)

    def set_enabled(self, app_id: str, enabled: bool) -> App:
        """Enable or disable an app. Running and waiting sessions continue. Raises: UnknownAppError."""
        app = next((app for app in self.all if app.app_id == app_id), None)
        if app is None:
            raise UnknownAppError("app", expected=" or ".join(app.app_id for app in self.all), got=app_id[:60])
        if enabled:
            self._disabled.discard(app_id)
        else:
            self._disabled.add(app_id)
        return app
