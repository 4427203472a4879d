"""The names of all limits of clients, in settings, metrics and docs/limits.md."""

from enum import StrEnum


class Limit(StrEnum):
    """A limit; the value is the name of its setting in `service.limits`, of a key's field, or of a constant."""

    SOCKETS = "sockets"
    SESSIONS = "sessions"
    REQUESTS = "requests_per_s"
    MESSAGES = "messages_per_s"
    BYTES = "mb_per_s"
    SOCKET_MESSAGES = "socket_messages_per_s"
    SOCKET_BYTES = "socket_mb_per_s"
    INTERRUPTS = "interrupts_per_s"
    PREPARES = "prepares_per_s"
    PIXELS = "megapixels_per_s"
    METRICS = "metrics_per_s"
    TAKEOVERS = "takeovers_per_s"
    SECRETS = "client_secrets"
    LIVE_TEXT = "live_text_s"
    LIVE_TEXT_IDLE = "live_text_idle_s"
    BODY = "body_bytes"
    DAY_REQUESTS = "requests_per_day"
    DAY_MINUTES = "minutes_per_day"
