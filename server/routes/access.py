"""Routes of keys: signing in and out, who asks, links for another browser, the list of keys."""

from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response

from server.access.access import SIGN_IN, Access
from server.access.credentials import COOKIE
from server.access.identity import Identity, identity_of
from server.access.keys import ApiKey
from server.access.page_cookie import COOKIE_S, LINK_S
from server.routes.access_bodies import AccessInfo, KeyInfo, KeyList, SignedOut, SignIn, SignInLink, UsedToday
from server.routes.bodies import Problem
from worker.key_text import LINK_PREFIX

REFUSED: dict[int | str, dict[str, Any]] = {401: {"model": Problem, "description": "the key is not valid"}}
NO_KEY: dict[int | str, dict[str, Any]] = {409: {"model": Problem, "description": "the request came without a key"}}


def access_routes(access: Access) -> APIRouter:
    router = APIRouter()

    def describe(key: ApiKey) -> KeyInfo:
        used = access.usage.total_of(key.name)
        return KeyInfo(
            name=key.name,
            is_admin=key.is_admin,
            sessions=key.limits.sessions,
            requests_per_day=key.limits.requests_per_day,
            minutes_per_day=key.limits.minutes_per_day,
            models=None if key.models is None else sorted(key.models),
            today=UsedToday(requests=used.requests, minutes=round(used.session_s / 60, 2)),
        )

    def info(identity: Identity, key: ApiKey | None) -> AccessInfo:
        described = None if key is None else describe(key)
        return AccessInfo(requires_key=access.keys.required, is_admin=identity.is_admin, key=described)

    @router.get(SIGN_IN)
    async def who(request: Request) -> AccessInfo:
        identity = identity_of(request)
        return info(identity, access.keys.named(identity.name) if identity.has_key else None)

    @router.post(SIGN_IN, responses=REFUSED)
    async def sign_in(body: SignIn, request: Request, response: Response) -> AccessInfo:
        if body.key.startswith(LINK_PREFIX):
            name = access.links.take(body.key)
            key = None if name is None else access.keys.named(name)
        else:
            key = access.keys.find(body.key)
        if key is None:
            raise HTTPException(401, "key: expected a valid API key or link, got another text")
        response.set_cookie(
            COOKIE,
            access.cookies.make(key),
            max_age=COOKIE_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        response.headers["Cache-Control"] = "no-store"
        return info(key.identity(identity_of(request).address), key)

    @router.delete(SIGN_IN)
    async def sign_out(response: Response) -> SignedOut:
        response.delete_cookie(COOKIE, httponly=True, samesite="strict")
        return SignedOut()

    @router.post(f"{SIGN_IN}/link", responses=NO_KEY)
    async def link(request: Request, response: Response) -> SignInLink:
        identity = identity_of(request)
        if not identity.has_key:
            raise HTTPException(409, "key: expected a request with a key, got one without")
        response.headers["Cache-Control"] = "no-store"
        return SignInLink(token=access.links.make(identity.name), expires_in_s=LINK_S)

    @router.get(f"{SIGN_IN}/keys")
    async def keys() -> KeyList:
        return KeyList(keys=[describe(key) for key in access.keys.all])

    return router
