"""Who speaks: from what a request names to speakers, speaker vectors and reference codes. Safe to call on any thread.

Contains names and sounds; the networks run as tasks of the engine thread. Which files voices have is in
`worker.voice_registry`.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from models.errors import SettingsError
from models.qwen3_tts.codec.codec import SpeechCodec
from models.qwen3_tts.codec.config import SAMPLE_RATE
from models.qwen3_tts.config import Qwen3TTSConfig
from models.qwen3_tts.prompt import Array, SpeechVoice
from models.token2wav.prompt.features import resample
from models.token2wav.prompt.sound_file import read_sound
from worker.protocol.speech_messages import DEFAULT_VOICE, SPEECH_VOICES, SpeakRequest
from worker.speech.cloned_voice import ClonedVoice, PreparedVoices
from worker.voice_registry import VoiceFolder, voice_file

MAX_KEPT = 64  # voices
Submit = Callable[[Callable[[], ClonedVoice]], "Future[ClonedVoice]"]


@dataclass(frozen=True)
class RequestVoice:
    """The voice of one request. transcript: of its reference codes, if it has any."""

    voice: SpeechVoice
    transcript: str = ""


@dataclass(frozen=True)
class VoiceFolders:
    """Where voices are. default: the voice of requests that name none; None: there is none."""

    builtin: Path
    registered: Path
    default: Path | None


class SpeechVoices:
    """The voices of one checkpoint.

    Args:
        config: of the checkpoint.
        codec: its networks.
        folders: files of voices.
        checkpoint: its folder.
        submit: calls something on the engine thread, between live units.
    """

    def __init__(
        self, config: Qwen3TTSConfig, codec: SpeechCodec, folders: VoiceFolders, checkpoint: Path, submit: Submit
    ):
        self._config, self._codec, self._folders, self._submit = config, codec, folders, submit
        self._prepared = PreparedVoices(folders.registered, checkpoint)
        self._kept: OrderedDict[str, ClonedVoice] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, request: SpeakRequest, *, in_context: bool = True) -> RequestVoice:
        """The voice of a request. Takes as long as the networks for a new sound: call it on a thread of its own.

        in_context: whether reference codes may be used; live text has no room for them.
        Raises: SettingsError for a voice that the checkpoint or the server lacks; AudioError; EngineError.
        """
        kind = self._config.tts_model_type
        if kind == "base":
            return self._cloned(request, in_context)
        for name, given in (("ref_audio", request.ref_audio_data), ("speaker_embedding", request.speaker_embedding)):
            if given is not None:
                raise SettingsError(name, expected=f"none: the model is of kind {kind}", got="one")
        if kind == "custom_voice":
            return RequestVoice(SpeechVoice(name=self.speaker(request.voice)))
        if request.voice is not None and request.voice not in (DEFAULT_VOICE, *SPEECH_VOICES):
            expected = "none, or a name of the API: instructions describe the voice"
            raise SettingsError("voice", expected=expected, got=request.voice[:60])
        return RequestVoice(SpeechVoice())

    def speaker(self, named: str | None) -> str:
        """The checkpoint's speaker for a name; the names of the API are spread over all of them.

        Raises: SettingsError for an unknown name.
        """
        speakers = list(self._config.speakers)
        if named is None or named == DEFAULT_VOICE:
            return speakers[0]
        if named.lower() in speakers:
            return named.lower()
        if named in SPEECH_VOICES:
            return speakers[sorted(SPEECH_VOICES).index(named) % len(speakers)]
        raise SettingsError("voice", expected=f"one of {sorted(speakers)}, or a name of the API", got=named[:60])

    def _cloned(self, request: SpeakRequest, in_context: bool) -> RequestVoice:
        if request.speaker_embedding is not None:
            vector = np.asarray(request.speaker_embedding, np.float32)
            width = self._config.talker_config.hidden_size
            if vector.shape != (width,):
                raise SettingsError("speaker_embedding", expected=f"{width} numbers", got=len(vector))
            return RequestVoice(SpeechVoice(embedding=vector))
        transcript, file = request.ref_text, None
        if request.ref_audio_data is not None:
            sound = torch.from_numpy(request.ref_audio_data.samples("ref_audio"))[None].clamp(-1, 1)
            rate = int(request.ref_audio_rate)
        else:
            file, registered = self._file_of(request.voice)
            transcript = transcript or registered
            sound, rate = read_sound(file)
        if request.x_vector_only is False and not transcript:
            raise SettingsError("ref_text", expected="a transcript of the voice, to clone it in context", got="none")
        found = self._made(resample(sound.mean(0), rate, SAMPLE_RATE).numpy(), file)
        if not transcript or request.x_vector_only or not in_context:
            return RequestVoice(SpeechVoice(embedding=found.vector))
        return RequestVoice(SpeechVoice(embedding=found.vector, reference_codes=found.codes), transcript)

    def _file_of(self, named: str | None) -> tuple[Path, str]:
        """File and transcript of a voice of the server. Raises: SettingsError."""
        folders = self._folders
        if named is None or named in (DEFAULT_VOICE, *SPEECH_VOICES):
            if folders.default is None:
                raise SettingsError("voice", expected="one by name: the server has no default voice", got="none")
            return folders.default, ""
        try:
            file = voice_file(named, folders.builtin, folders.registered)
        except SettingsError as error:
            raise SettingsError("voice", expected=error.expected, got=error.got) from None
        voice = VoiceFolder.read(folders.registered).find(named) if file.parent == folders.registered else None
        return file, "" if voice is None else voice.transcript

    def _made(self, wave: Array, file: Path | None) -> ClonedVoice:
        """Vector and codes of [n] float32 at 24 kHz, made once for each sound. file: of a voice of the server."""
        key = hashlib.sha256(wave.tobytes()).hexdigest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        found = None if file is None else self._prepared.read(file, key)
        if found is None:
            found = self._submit(lambda: ClonedVoice(self._codec.speaker(wave), self._codec.encode(wave))).result()
            if file is not None:
                self._prepared.write(file, key, found)
        with self._lock:
            self._kept[key] = found
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return found
