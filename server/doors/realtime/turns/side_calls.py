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


class SideCalls:
    """The calls of one session.

    Args:
        opened_response: the open response, or a new one without a message.
        add_text: inserts a text before the next unit.
    """

    def __init__(self, opened_response: Callable[[], RealtimeResponse], add_text: Callable[[InsertText], None]):
        self._opened_response, self._add_text = opened_response, add_text

    def send(self, result: Result) -> None:
        """Send the calls that a unit completes; the model goes on listening or speaking meanwhile."""
        for text in result.side_texts or ():
            call = call_of(text)
            if call is None:
                LOG.warning("a text of %d characters in the side lane is no call", len(text))
                self._add_text(NO_CALL)
            else:
                self._opened_response().add_call(call, is_beside=True)

    def drop(self, result: Result) -> None:
        """Answer the calls of a cancelled response with an error for the model."""
        for _ in result.side_texts or ():
            self._add_text(CANCELLED)
