"""Reads client messages in tests, and builds parts of messages."""

import base64
import json
import struct
from typing import Any, get_args

import pytest

from worker.protocol.messages import read_text
from worker.protocol.wire import Form, WireError

FORMS = get_args(Form)
PICTURE = b"\xff\xd8\xff\xd9"
# The required fields of a result that listened.
LISTEN = {"is_listen": True, "current_time": 1, "cost_all_ms": 9.0, "server_send_ts": 1777777777.25}
LISTEN |= {"wall_clock_ms": 12.3, "kv_cache_length": 812}


def b64(*samples: float) -> str:
    """Samples as little-endian float32 in base64."""
    return base64.b64encode(struct.pack(f"<{len(samples)}f", *samples)).decode()


def sent(**fields: Any) -> Any:
    """The message that these fields are read as."""
    return read_text(json.dumps(fields))


def refused(**fields: Any) -> WireError:
    """The error that these fields are refused with."""
    with pytest.raises(WireError) as caught:
        sent(**fields)
    return caught.value
