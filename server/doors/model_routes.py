"""The routes of the list of models."""

import time
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from server.dispatch.queue import Model
from server.dispatch.workers import Workers
from server.doors.errors import NOT_FOUND
from server.doors.model_names import ModelNames


class ModelCard(BaseModel):
    """A model. created: Unix s of the gateway's start. task: `omni`: live sessions and chats, `speech`: texts,
    `conversion`: sounds in other voices. loaded: whether a worker that is ready serves it.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "duologue"
    task: Model
    loaded: bool


class ModelCards(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def model_routes(names: ModelNames, workers: Workers) -> APIRouter:
    """Routes of the list of models and of one model."""
    router = APIRouter()
    created = int(time.time())

    def card(name: str, served: str) -> ModelCard:
        task = names.task_of(served)
        return ModelCard(id=name, created=created, task=task, loaded=workers.n_slots_of(task) > 0)

    @router.get("/v1/models")
    async def models() -> ModelCards:
        return ModelCards(data=[card(name, name) for name in names.all])

    @router.get("/v1/models/{model:path}", responses=NOT_FOUND)
    async def model(model: str) -> ModelCard:
        return card(model, names.resolve_any(model))

    return router
