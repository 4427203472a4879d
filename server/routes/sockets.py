"""The WebSocket routes, and the refusal of all other socket paths."""

from fastapi import FastAPI, WebSocket

from server.admission import Admission
from server.doors.errors import ApiError, error_response
from server.live.kinds import Kind, new_session_id, request_type_of
from server.live.sockets import GatewaySockets
from worker.protocol.session_id import session_id_of

HALF_DUPLEX_OMNI = "/ws/half_duplex_omni"  # half duplex with pictures, as clients of other servers call it


def add_sockets(app: FastAPI, sockets: GatewaySockets, admission: Admission) -> None:
    """Serve the sockets of all kinds."""

    async def serve(websocket: WebSocket, kind: Kind, session_id: str) -> None:
        refusal = admission.refusal(websocket, request_type_of(kind, session_id))
        if refusal is not None:
            await websocket.send_denial_response(error_response(websocket.url.path, ApiError(403, refusal)))
            return
        await sockets.serve(websocket, kind, session_id)

    def add(kind: Kind, path: str | None = None, *, with_id: bool) -> None:
        if with_id:

            @app.websocket(f"{path or kind.path}/{{session_id}}")
            async def named(websocket: WebSocket, session_id: str) -> None:
                await serve(websocket, kind, session_id_of(session_id))

        else:

            @app.websocket(kind.path)
            async def unnamed(websocket: WebSocket) -> None:
                await serve(websocket, kind, new_session_id(kind))

    add(Kind.DUPLEX, with_id=True)
    add(Kind.HALF_DUPLEX, with_id=True)
    add(Kind.HALF_DUPLEX, HALF_DUPLEX_OMNI, with_id=True)
    add(Kind.CHAT, with_id=False)
    add(Kind.STREAMING, with_id=True)
    add(Kind.STREAMING, with_id=False)


def refuse_other_sockets(app: FastAPI, *paths: str) -> None:
    """Refuse sockets at all paths that have no route with HTTP 404. paths: further ones that have a route."""

    @app.websocket("/{path:path}")
    async def unknown(websocket: WebSocket, path: str) -> None:
        detail = f"No socket at /{path[:100]}: expected one of {', '.join((*(kind.path for kind in Kind), *paths))}"
        await websocket.send_denial_response(error_response(websocket.url.path, ApiError(404, detail)))
