"""A server inside the browser that answers as a test says, in the plain protocol."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from playwright.sync_api import BrowserContext, WebSocketRoute

from worker.protocol.wire import Sound

Answers = dict[str, list[dict[str, Any]]]
TONE = Sound((0.3 * np.sin(np.arange(24000) / 20)).astype(np.float32)).base64()


def plain_server(
    context: BrowserContext, ends: Sequence[int] = (), instead: Answers | None = None
) -> list[str | bytes]:
    """Replace the server by one that speaks in every unit and supports only the plain protocol.

    Args:
        ends: units that end a turn.
        instead: messages by key. A message type or "unit 1" replaces the usual answer; "before 1", "after 1" or
            "after prepare" adds to it. "open" replaces `queue_done`.

    Returns: the list of received messages, which grows.
    """
    got: list[str | bytes] = []
    instead = {} if instead is None else instead
    costs = {"cost_all_ms": 1.0, "wall_clock_ms": 2.0, "server_send_ts": 0.0, "kv_cache_length": 9, "news": "ignored"}

    def answer(socket: WebSocketRoute) -> None:
        units = itertools.count(1)

        def take(data: str | bytes) -> None:
            got.append(data)
            name = kind = json.loads(data)["type"] if isinstance(data, str) else "binary"
            usual = []
            if kind == "prepare":
                usual = [{"type": "prepared", "prompt_length": 3}]
            elif kind == "audio_chunk":
                n = next(units)
                name = f"unit {n}"
                fields = {"type": "result", "is_listen": False, "text": "plain ", "audio_data": TONE, "current_time": n}
                usual = [{**fields, **costs, "end_of_turn": n in ends}]
            place = name.removeprefix("unit ")
            before, after = (instead.get(f"{when} {place}", []) for when in ("before", "after"))
            for message in [*before, *instead.get(name, usual), *after]:
                socket.send(json.dumps(message))

        socket.on_message(take)
        for message in instead.get("open", [{"type": "queue_done"}]):
            socket.send(json.dumps(message))

    context.route_web_socket("**/ws/duplex/*", answer)
    return got
