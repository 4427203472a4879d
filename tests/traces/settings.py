"""Converts a recorded session's settings: reference mode, greedy text and speech unless the recording differs."""

from typing import Any

from tests.traces.folder import TraceError
from worker.config.session import SessionConfig, WindowConfig

# The recorded speech sampler ran at this temperature, at which only the likeliest token has weight.
CODE_TEMPERATURE = 1e-5
# The public engine stores this setting and never reads it.
IGNORED = "max_new_speak_tokens_per_chunk"
WINDOW_SETTINGS = {
    "sliding_window_mode": "mode",
    "basic_window_high_tokens": "high_tokens",
    "basic_window_low_tokens": "low_tokens",
    "context_max_units": "max_units",
    "context_previous_max_tokens": "previous_max_tokens",
    "context_previous_marker": "marker",
}


def session_config(given: dict[str, Any], unit: dict[str, Any] | None = None) -> SessionConfig:
    """The settings of a session, or of one of its units. Raises: TraceError, SettingError."""
    settings: dict[str, Any] = {
        "compat": "reference",
        "decode_mode": "greedy",
        "force_listen_count": 0,
        "tts_temperature": CODE_TEMPERATURE,
    }
    window: dict[str, Any] = {"mode": "off"}
    for name, value in given.get("constructor", {}).items():
        if name in WINDOW_SETTINGS:
            window[WINDOW_SETTINGS[name]] = value
        elif name != IGNORED:
            settings[_known("constructor", name)] = value
    for source in (given, unit or {}):
        for name, value in (source.get("generate") or {}).items():
            settings[_known("generate", name)] = value
    return SessionConfig(**settings, window=WindowConfig(**window))


def _known(field: str, name: str) -> str:
    if name not in SessionConfig.model_fields:
        raise TraceError(f"{field}.{name}", expected="a setting that exists", got="an unknown one")
    return name


def slice_limits(unit: dict[str, Any]) -> list[int]:
    """Slice limit of each frame. Raises: TraceError unless there is one per frame."""
    n_frames, limits = len(unit.get("frames") or []), unit.get("max_slice_nums") or 1
    limits = limits if isinstance(limits, list) else [limits] * n_frames
    if len(limits) != n_frames:
        raise TraceError("max_slice_nums", expected=f"{n_frames} values", got=len(limits))
    return limits
