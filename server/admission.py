"""The one place that admits or refuses a session, over WebSockets and HTTP, before anything else happens for it."""

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from server.dispatch.queue import RequestType
from server.origins import Origins
from server.registry.apps import Apps


@dataclass(frozen=True)
class Admission:
    """The checks of a session's request."""

    origins: Origins
    apps: Apps

    def refusal(self, connection: HTTPConnection, request_type: RequestType) -> str | None:
        """Why the request is refused with HTTP 403; None if it is admitted."""
        if not self.origins.allows(connection):
            return "origin: expected this server's own pages"
        if not self.apps.accepts(request_type):
            return f"app disabled: {self.apps.name_of(request_type)}"
        return None
