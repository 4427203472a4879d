"""Routes of the queue and of the waiting time estimates."""

from fastapi import APIRouter, Request

from server.access.identity import identity_of
from server.dispatch.dispatcher import Dispatcher
from server.registry.gateway_state import GatewayState
from server.routes.bodies import EtaRequest, EtaStatus, QueueStatus, Success, TicketFound, TicketUnknown
from server.routes.status_report import eta_status, queue_status, ticket_status

MAX_TICKET_ID = 100  # characters


def queue_routes(dispatcher: Dispatcher, state: GatewayState) -> APIRouter:
    router = APIRouter()

    @router.get("/api/queue")
    async def queue(request: Request) -> QueueStatus:
        return queue_status(dispatcher, identity_of(request))

    @router.get("/api/queue/{ticket_id}")
    async def one_ticket(ticket_id: str, request: Request) -> TicketFound | TicketUnknown:
        return ticket_status(dispatcher, ticket_id, identity_of(request))

    @router.delete("/api/queue/{ticket_id}")
    async def cancel(ticket_id: str, request: Request) -> Success:
        ticket, identity = dispatcher.queue.find(ticket_id), identity_of(request)
        if ticket is None:
            owner = None if identity.is_admin else identity.owner
            return Success(success=dispatcher.cancel_elsewhere(ticket_id[:MAX_TICKET_ID], owner))
        is_owned = identity.owns(ticket.owner)
        return Success(success=is_owned and dispatcher.cancel(ticket_id))

    @router.get("/api/config/eta")
    async def eta() -> EtaStatus:
        return eta_status(dispatcher)

    @router.put("/api/config/eta")
    async def configure_eta(request: EtaRequest) -> EtaStatus:
        changes = request.model_dump(exclude_unset=True, exclude_none=True)
        dispatcher.eta.configure(changes)
        await state.store_eta(changes)
        return eta_status(dispatcher)

    return router
