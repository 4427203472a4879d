"""Routes of the queue and of the estimates of how long one waits. Knows FastAPI; everything else the desk does."""

from fastapi import APIRouter

from server.dispatch.dispatcher import Desk
from server.routes.bodies import EtaRequest, EtaStatus, QueueStatus, Success, TicketFound, TicketUnknown
from server.routes.status_report import eta_status, queue_status, ticket_status


def queue_routes(desk: Desk) -> APIRouter:
    router = APIRouter()

    @router.get("/api/queue")
    async def queue() -> QueueStatus:
        return queue_status(desk)

    @router.get("/api/queue/{ticket_id}")
    async def one_ticket(ticket_id: str) -> TicketFound | TicketUnknown:
        return ticket_status(desk, ticket_id)

    @router.delete("/api/queue/{ticket_id}")
    async def cancel(ticket_id: str) -> Success:
        return Success(success=desk.cancel(ticket_id))

    @router.get("/api/config/eta")
    async def eta() -> EtaStatus:
        return eta_status(desk)

    @router.put("/api/config/eta")
    async def adjust_eta(wanted: EtaRequest) -> EtaStatus:
        desk.eta.adjust(**wanted.model_dump(exclude_unset=True, exclude_none=True))
        return eta_status(desk)

    return router
