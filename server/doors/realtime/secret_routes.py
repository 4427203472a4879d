"""Routes that make ephemeral secrets for browsers, each with the settings of its sessions."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from server.access.access import Access
from server.access.client_secrets import ClientSecret
from server.access.identity import IdentityKind, identity_of
from server.access.refusal import AccessRefusedError
from server.access.shares import run_shared
from server.doors.core.transcriber import Transcriber
from server.doors.errors import ApiError, ApiErrorBody
from server.doors.model_names import ModelNames
from server.doors.realtime.initial_config import initial_config
from server.doors.realtime.session_config import Json
from server.doors.voices import VoiceNames

DEFAULT_S, MIN_S, MAX_S = 600, 10, 7200
PARAMS = {"voice": "session.audio.output.voice"}
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ApiErrorBody, "description": "the settings are invalid"},
    403: {"model": ApiErrorBody, "description": "a secret makes no secrets"},
    404: {"model": ApiErrorBody, "description": "the model is unknown"},
    429: {"model": ApiErrorBody, "description": "the client has too many secrets"},
}


class ExpiresAfter(BaseModel):
    """When a secret ends. seconds: after it is made."""

    anchor: Literal["created_at"] = "created_at"
    seconds: int = Field(DEFAULT_S, ge=MIN_S, le=MAX_S)


class SecretRequest(BaseModel):
    """session: settings of a Realtime session, as in `session.update`. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = None


class SecretAnswer(BaseModel):
    """value: the secret. expires_at: Unix s. session: the settings of its sessions."""

    value: str
    expires_at: int
    session: dict[str, Any]


def secret_routes(access: Access, names: ModelNames, voices: VoiceNames, transcriber: Transcriber) -> APIRouter:
    """Routes that make secrets, in the newer and the older form."""
    router = APIRouter()

    async def make(request: Request, session: Mapping[str, Any], seconds: int) -> tuple[ClientSecret, Json]:
        identity = identity_of(request)
        if identity.kind is IdentityKind.SECRET:
            raise ApiError(403, "key: expected an API key, got an ephemeral secret")
        config = initial_config(names, identity, session)
        try:
            await run_shared(voices.resolve, config.voice)
        except ApiError as error:
            raise error.renamed(PARAMS) from None
        try:
            secret = access.secrets.make(identity, access.keys, seconds, session)
        except AccessRefusedError as error:
            if error.limit is not None:
                access.count(error.limit)
            raise ApiError(429, str(error), headers={"retry-after": str(error.retry_after_s)}) from None
        if not transcriber.is_enabled:
            config = replace(config, transcription=None)
        shown = {**config.described(), "id": f"sess_{secrets.token_hex(12)}", "expires_at": secret.expires_at}
        return secret, shown

    @router.post("/v1/realtime/client_secrets", responses=ERRORS)
    async def client_secret(request: Request, response: Response, body: SecretRequest | None = None) -> SecretAnswer:
        body = body or SecretRequest()
        secret, shown = await make(request, body.session or {}, (body.expires_after or ExpiresAfter()).seconds)
        response.headers["Cache-Control"] = "no-store"
        return SecretAnswer(value=secret.value, expires_at=secret.expires_at, session=shown)

    @router.post("/v1/realtime/sessions", responses=ERRORS)
    async def legacy_session(
        request: Request, response: Response, session: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        secret, shown = await make(request, session or {}, DEFAULT_S)
        response.headers["Cache-Control"] = "no-store"
        return {**shown, "client_secret": {"value": secret.value, "expires_at": secret.expires_at}}

    return router
