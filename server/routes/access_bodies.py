"""Request and response bodies about keys."""

from typing import Literal

from pydantic import BaseModel, Field

from server.routes.bodies import RequestBody


class SignIn(RequestBody):
    """key: an API key, or the token of a link."""

    key: str = Field(max_length=200)


class UsedToday(BaseModel):
    """Use of a key since midnight UTC. minutes: of sessions with a slot."""

    requests: int
    minutes: float


class KeyInfo(BaseModel):
    """A key without the key itself; null limits are none. is_admin: it may change what concerns everyone."""

    name: str
    is_admin: bool
    sessions: int | None
    requests_per_day: int | None
    minutes_per_day: float | None
    models: list[str] | None
    today: UsedToday


class KeyList(BaseModel):
    keys: list[KeyInfo]


class AccessInfo(BaseModel):
    """Who asks. requires_key: whether keys are configured. key: null without one."""

    requires_key: bool
    is_admin: bool
    key: KeyInfo | None


class SignInLink(BaseModel):
    """token: for one sign-in, in the fragment of any page's address. expires_in_s: how long it may be used."""

    token: str
    expires_in_s: float


class SignedOut(BaseModel):
    success: Literal[True] = True
