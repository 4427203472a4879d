"""Starts a speech model: load, compile, capture, warm up. Contains the order; each stage is in a module of its own."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from models.qwen3_tts.codec.config import SAMPLE_RATE
from models.qwen3_tts.prompt import SpeechVoice
from worker.assembly.hub import download
from worker.config.hub_id import hub_id
from worker.config.session import EngineConfig
from worker.engine_thread import EngineThread
from worker.protocol.speech_messages import SpeakRequest
from worker.speech.compiling import compile_speech
from worker.speech.model import SpeechModel
from worker.speech.parts import SpeechParts, build_speech
from worker.speech.requests import PlannedSpeech, spoken_request
from worker.speech.voices import RequestVoice, VoiceFolders

LOG = logging.getLogger(__name__)
WARM_UP = SpeakRequest(text="Hello.", max_frames=15, seed=0)  # frames of the chunks 1, 2, 4 and 8
Progress = Callable[[str, int, int], None]


def start_speech(
    path: Path,
    config: EngineConfig,
    device: torch.device,
    thread: EngineThread,
    folders: VoiceFolders,
    progress: Progress,
) -> SpeechModel:
    """Load, compile and capture as `config.compile` says for the device, speak once, and serve.

    Args:
        path: checkpoint folder or model id.
        thread: runs.
        progress: called with (what, done, total).
    Raises: as `build_speech`; CheckpointError for a model id that cannot be downloaded; EngineError.
    """
    name = hub_id(path)
    folder = path if name is None else download(name, lambda what: progress(what, 0, 0))
    progress(f"weights of {path.name}", 0, 0)
    began = time.perf_counter()
    parts = build_speech(folder, config, device)
    loaded = time.perf_counter()
    regions = thread.submit(compile_speech, parts, config, progress).result()
    progress("first words of the speech model", 0, 0)
    thread.submit(_warm_up, parts).result()
    LOG.info(
        "speech model %s: %d slots (load %.1f s, graphs and warm-up %.1f s)",
        path.name,
        parts.n_slots,
        loaded - began,
        time.perf_counter() - loaded,
    )
    model = SpeechModel(str(path), parts, thread, folders, regions)
    model.start()
    return model


def _warm_up(parts: SpeechParts) -> None:
    """Speak a few words; a Base model reads a second of noise before. Runs on the engine thread."""
    kind, config = parts.config.tts_model_type, parts.config
    voice = SpeechVoice()
    if kind == "custom_voice":
        voice = SpeechVoice(name=next(iter(config.speakers)))
    elif kind == "base":
        sound = np.random.default_rng(0).normal(0, 0.1, SAMPLE_RATE).astype(np.float32)
        codec = parts.streams.codec
        codec.encode(sound)
        voice = SpeechVoice(embedding=codec.speaker(sound))
    planned = PlannedSpeech(WARM_UP, RequestVoice(voice), 0)
    ids = parts.tokenizer.encode_spoken(WARM_UP.text)
    slot = parts.streams.start(spoken_request(planned, parts, ids))
    try:
        while parts.streams.can_step:
            parts.streams.step()
    finally:
        parts.streams.cancel(slot)
