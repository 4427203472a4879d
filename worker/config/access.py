"""Settings of API keys and of the limits of clients. Torch-free."""

from typing import ClassVar

from pydantic import Field

from worker.config.settings import Settings

KEY_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
KEY_HASH = r"^sha256:[0-9a-f]{64}$"


class ApiKeyEntry(Settings):
    """One API key: its name, the hash of the key, and its limits. `python -m server.access add` makes one."""

    hides_values: ClassVar[bool] = True  # a user may have entered the key itself

    name: str = Field(pattern=KEY_NAME, examples=["alice", "phone-line"], description="name in lists and logs")
    hash: str = Field(pattern=KEY_HASH, examples=["sha256:<64 hexadecimal digits>"], description="SHA-256 of the key")
    admin: bool = Field(False, description="whether the key may change what concerns everyone")
    sessions: int | None = Field(None, ge=1, le=1_000_000, description="sessions at once; null: no limit")
    requests_per_day: int | None = Field(None, ge=0, le=10**9, description="requests a day; null: no limit")
    minutes_per_day: float | None = Field(
        None, ge=0, le=10**9, description="minutes of sessions with a slot a day; null: no limit"
    )
    models: tuple[str, ...] | None = Field(
        None, strict=False, description="names of the models that the key may use; null: all"
    )


class ClientLimits(Settings):
    """Limits of each client, and of each of its connections. A client is a key or, without one, an address."""

    sockets: int = Field(64, ge=1, le=1_000_000, description="open WebSockets of one client")
    sessions: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="sessions at once of one address without a key, waiting ones included; null: half of all slots, "
        "at least 2",
    )
    requests_per_s: float = Field(
        50.0, ge=0.1, le=1_000_000, description="HTTP requests and handshakes a second of one client, on average"
    )
    messages_per_s: float = Field(
        2000.0, ge=1, le=10_000_000, description="messages a second that are read from one client's sockets"
    )
    mb_per_s: float = Field(64.0, ge=0.1, le=1_000_000, description="megabytes a second that are read from one client")
    socket_messages_per_s: float = Field(
        250.0, ge=1, le=10_000_000, description="messages a second that are read from one connection"
    )
    socket_mb_per_s: float = Field(
        8.0, ge=0.1, le=1_000_000, description="megabytes a second that are read from one connection"
    )
    interrupts_per_s: float = Field(
        5.0,
        ge=0.1,
        le=1_000_000,
        description="messages a second of one connection that interrupt, or demand an answer at once",
    )
    prepares_per_s: float = Field(
        2.0,
        ge=0.1,
        le=1_000_000,
        description="messages a second of one connection that begin a context anew or change the session",
    )
    megapixels_per_s: float = Field(
        32.0, ge=0.1, le=1_000_000, description="millions of pixels a second that are decoded for one connection"
    )
    metrics_per_s: float = Field(
        10.0, ge=0.1, le=1_000_000, description="requests a second of one address for `/metrics`"
    )
    takeovers_per_s: float = Field(
        5.0,
        ge=0.1,
        le=1_000_000,
        description="searches a second of one client for a session of a lost gateway that no worker has",
    )
    connections: int = Field(
        256, ge=1, le=1_000_000, description="open HTTP connections of one address; addresses of this machine: any"
    )
    header_timeout_s: float = Field(
        10.0,
        ge=0.1,
        le=3600,
        description="seconds for a TLS handshake, and for a request's headers from the connection or their first byte",
    )
    body_timeout_s: float = Field(
        20.0,
        ge=0.1,
        le=3600,
        description="seconds after which a body that brings less than 1 kB a second on average ends the connection",
    )
    unread_timeout_s: float = Field(
        15.0,
        ge=0.1,
        le=3600,
        description="seconds for which a WebSocket's client may take no data, or leave a ping unanswered",
    )
    live_text_s: float = Field(
        600.0,
        ge=0.1,
        le=86_400,
        description="seconds for which one utterance of `/v1/audio/speech/stream` may have a slot of the speech model",
    )
    live_text_idle_s: float = Field(
        60.0,
        ge=0.1,
        le=86_400,
        description="seconds for which a client of `/v1/audio/speech/stream` may send nothing while text is expected",
    )
