"""Whether a server of this program answers at a port of this machine."""

import http.client
import json
import ssl

ANSWER_S = 2.0
MAX_ANSWER_BYTES = 1 << 20
TITLES = ("Duologue gateway", "Duologue worker")


def is_ours(port: int, *, secure: bool) -> bool:
    """Whether a gateway or a worker answers at 127.0.0.1: `/openapi.json` has its title.

    Args:
        port: TCP port.
        secure: whether the gateway may use https; plain HTTP is tried too, which workers use.
    """
    return any(_title(port, https) in TITLES for https in ((False, True) if secure else (False,)))


def _title(port: int, https: bool) -> str | None:
    """The title of the application at a port; None without an answer that has one."""
    connection = (
        http.client.HTTPSConnection("127.0.0.1", port, timeout=ANSWER_S, context=ssl._create_unverified_context())  # noqa: S323
        if https
        else http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    )
    try:
        connection.request("GET", "/openapi.json")
        answer = json.loads(connection.getresponse().read(MAX_ANSWER_BYTES))
        return str(answer["info"]["title"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    finally:
        connection.close()
