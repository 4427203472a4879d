"""The routes of the list of models."""

import time
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from server.doors.errors import NOT_FOUND
from server.doors.model_names import ModelNames


class ModelCard(BaseModel):
    """A model. created: Unix s of the gateway's start."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "duologue"


class ModelCards(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def model_routes(names: ModelNames) -> APIRouter:
    """Routes of the list of models and of one model."""
    router = APIRouter()
    created = int(time.time())

    @router.get("/v1/models")
    async def models() -> ModelCards:
        return ModelCards(data=[ModelCard(id=name, created=created) for name in names.all])

    @router.get("/v1/models/{model:path}", responses=NOT_FOUND)
    async def model(model: str) -> ModelCard:
        names.resolve_any(model)
        return ModelCard(id=model, created=created)

    return router
