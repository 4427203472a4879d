"""Calls of functions that the model writes beside its speech: to the client, or answered here."""

import logging
from collections.abc import Callable

from server.doors.core.tool_calls import call_of
from server.doors.realtime.responses import RealtimeResponse
from worker.protocol.messages import Result
from worker.protocol.text_messages import InsertText

LOG = logging.getLogger(__name__)
# Outputs of calls that the client does not get.
NO_CALL = InsertText(text='{"error": "expected JSON with name and arguments"}', role="tool")
CANCELLED = InsertText(text='{"error": "cancelled"}', role="tool")


def send_calls(
    result: Result, opened_response: Callable[[], RealtimeResponse], add_text: Callable[[InsertText], None]
) -> None:
    """Send the calls that a unit completes; the model goes on listening or speaking meanwhile.

    Args:
        result: of the unit.
        opened_response: the open response, or a new one without a message.
        add_text: inserts a text before the next unit.
    """
    for text in result.side_texts or ():
        call = call_of(text)
        if call is None:
            LOG.warning("a text of %d characters in the side lane is no call", len(text))
            add_text(NO_CALL)
        else:
            opened_response().add_call(call, is_beside=True)


def drop_calls(result: Result, add_text: Callable[[InsertText], None]) -> None:
    """Answer the calls of a cancelled response with an error for the model. add_text: as in `send_calls`."""
    for _ in result.side_texts or ():
        add_text(CANCELLED)
