"""The settings of one response: those of the session with the options of `response.create`."""

from dataclasses import replace
from typing import Any

from server.doors.realtime.events.client_events import ResponseOptions
from server.doors.realtime.events.session_patch import check_tools
from server.doors.realtime.session_config import RealtimeConfig, choice_of, limit_of


def config_of_response(config: RealtimeConfig, options: ResponseOptions) -> RealtimeConfig:
    """The session's configuration with the options of one response. Raises: EventError."""
    changes: dict[str, Any] = {}
    if options.output_modalities:
        changes["modality"] = options.output_modalities[0]
    if options.instructions is not None:
        changes["instructions"] = options.instructions
    if options.tools is not None:
        check_tools(options.tools, "response.tools")
        changes["tools"] = tuple(options.tools)
    if options.tool_choice is not None:
        changes |= choice_of(options.tool_choice, "response.tool_choice")
    if options.max_output_tokens is not None:
        changes["max_output_tokens"] = limit_of(options.max_output_tokens)
    output = None if options.audio is None else options.audio.output
    if output is not None:
        changes["voice"] = output.voice or config.voice
        changes["output_format"] = output.format.type if output.format else config.output_format
    return replace(config, **changes)
