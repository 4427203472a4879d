"""Routes that show, load and unload the models of a worker, and shut it down. For administrators."""

from typing import Any

import httpx
from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from server.dispatch.dispatcher import Dispatcher
from server.dispatch.queue import Model
from server.dispatch.workers import Worker
from server.live.moves.move_watch import MoveWatch
from server.routes.bodies import Problem, RequestBody

PATH = "/api/admin/models"
STATUS = {409: 409, 422: 400}  # of the worker -> of the answer
TIMEOUT_S = 60.0  # an unload waits until the memory is free
REFUSED: dict[int | str, dict[str, Any]] = {
    404: {"model": Problem, "description": "there is no such worker"},
    409: {"model": Problem, "description": "sessions are open, or a start runs"},
    502: {"model": Problem, "description": "the worker did not answer"},
}


class WorkerModels(BaseModel):
    """The models of a worker.

    omni: whether it is loaded. speech: the worker's report on its speech model. speech_path: in its settings.
    speech_error: why the latest one was not loaded. conversion, conversion_path, conversion_error: of voice conversion.
    """

    worker_id: str
    state: str | None
    omni: bool
    speech: dict[str, Any] | None
    speech_path: str | None
    speech_error: str | None
    conversion: dict[str, Any] | None
    conversion_path: str | None
    conversion_error: str | None


class ModelList(BaseModel):
    workers: list[WorkerModels]


class ModelUnload(RequestBody):
    """model: null: all models of the worker."""

    model_config = ConfigDict(protected_namespaces=())

    worker_id: str
    model: Model | None = None


class ModelLoad(RequestBody):
    """What to load; the paths start at the root of the worker's installation, or are model ids.

    Without a path, what the worker's settings name and what is not loaded.
    """

    model_config = ConfigDict(protected_namespaces=())

    worker_id: str
    model_path: str | None = Field(None, min_length=1, max_length=1000)
    speech_path: str | None = Field(None, min_length=1, max_length=1000)
    s3gen_path: str | None = Field(None, min_length=1, max_length=1000)


class ModelChanged(BaseModel):
    """state: of the worker. memory: bytes before and after an unload."""

    state: str
    memory: dict[str, int] | None = None


class WorkerDrain(BaseModel):
    """state: of the worker. moving: its sessions that go on with other workers. waiting: the others."""

    worker_id: str
    state: str
    moving: int
    waiting: int


def model_admin_routes(dispatcher: Dispatcher, http: httpx.AsyncClient, moves: MoveWatch) -> APIRouter:
    """http: client for the workers. moves: of sessions from workers that shut down."""
    router = APIRouter()

    def worker_of(worker_id: str) -> Worker:
        worker = next((one for one in dispatcher.workers.all if one.name == worker_id), None)
        if worker is None:
            raise HTTPException(404, f"Worker not found: {worker_id[:100]}")
        return worker

    async def forward(worker: Worker, path: str, body: dict[str, Any]) -> ModelChanged:
        name = f"{worker.name} ({worker.address})"
        try:
            response = await http.post(f"http://{worker.address}{path}", json=body, timeout=TIMEOUT_S)
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise HTTPException(502, f"{name}: expected an answer, got {type(error).__name__}") from None
        if response.status_code not in (200, 202):
            status = STATUS.get(response.status_code, 502)
            raise HTTPException(status, f"{name}: {answer.get('detail') if isinstance(answer, dict) else answer}")
        dispatcher.workers.suspend(worker)  # its slots are uncertain until its next answer
        return ModelChanged(state=str(answer.get("state")), memory=answer.get("memory"))

    @router.get(PATH)
    async def models() -> ModelList:
        return ModelList(workers=[_models_of(worker) for worker in dispatcher.workers.all])

    @router.post(f"{PATH}/unload", responses=REFUSED)
    async def unload(body: ModelUnload) -> ModelChanged:
        return await forward(worker_of(body.worker_id), "/model/unload", {"model": body.model})

    @router.post(f"{PATH}/load", status_code=202, responses=REFUSED)
    async def load(body: ModelLoad) -> ModelChanged:
        given = body.model_dump(exclude={"worker_id"}, exclude_none=True)
        return await forward(worker_of(body.worker_id), "/model/load", given)

    @router.post("/api/admin/workers/{worker_id}/drain", status_code=202, responses=REFUSED)
    async def drain(worker_id: str) -> WorkerDrain:
        worker = worker_of(worker_id)
        changed = await forward(worker, "/drain", {})
        dispatcher.workers.record_drain(worker)
        moves.poll()
        n_moving, n_all = moves.n_movable(worker), len(worker.leases)
        return WorkerDrain(worker_id=worker.name, state=changed.state, moving=n_moving, waiting=n_all - n_moving)

    return router


def _models_of(worker: Worker) -> WorkerModels:
    models = worker.health.get("models")
    models = models if isinstance(models, dict) else {"omni": worker.is_ready}

    def text(key: str) -> str | None:
        value = models.get(key)
        return value if isinstance(value, str) else None

    return WorkerModels(
        worker_id=worker.name,
        state=worker.state,
        omni=models.get("omni") is True,
        speech=worker.about("speech") or None,
        speech_path=text("speech_path"),
        speech_error=text("speech_error"),
        conversion=worker.about("conversion") or None,
        conversion_path=text("conversion_path"),
        conversion_error=text("conversion_error"),
    )
