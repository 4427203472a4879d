"""Contents of settings files for the public implementation."""

from typing import Any

# A settings file for the public implementation: every key it documents, at its documented default, and a key of an
# older version. Its example file is this one without `eta_half_duplex_s` and `recording`.
PUBLIC: dict[str, dict[str, Any]] = {
    "model": {"model_path": "openbmb/MiniCPM-o-4_5", "pt_path": None, "attn_implementation": "auto"},
    "audio": {
        "ref_audio_path": "assets/ref_audio/ref_minicpm_signature.wav",
        "playback_delay_ms": 200,
        "chat_vocoder": "token2wav",
    },
    "service": {
        "gateway_port": 8006,
        "worker_base_port": 22400,
        "max_queue_size": 1000,
        "request_timeout": 300.0,
        "compile": False,
        "data_dir": "data",
        "eta_chat_s": 15.0,
        "eta_half_duplex_s": 180.0,
        "eta_streaming_s": 20.0,
        "eta_audio_duplex_s": 120.0,
        "eta_omni_duplex_s": 90.0,
        "eta_ema_alpha": 0.3,
        "eta_ema_min_samples": 3,
    },
    "duplex": {"pause_timeout": 60.0},
    "recording": {"enabled": True, "session_retention_days": -1, "max_storage_gb": -1},
}
EXAMPLE = {
    **{name: PUBLIC[name] for name in ("model", "audio", "duplex")},
    "service": {key: value for key, value in PUBLIC["service"].items() if key != "eta_half_duplex_s"},
}
