"""Layout of a prompt: which text token, codes and speaker each row of the talker's context consists of. Torch-free.

A row is the sum of a text row, the rows of up to sixteen codes, and the speaker embedding. Does not contain tokenizing
(`text`) or weights.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from models.errors import SettingsError, ShapeError
from models.qwen3_tts.config import Qwen3TTSConfig

Array = np.ndarray[Any, np.dtype[Any]]

AUTO = "auto"
NONE = -1  # in place of an id


@dataclass(frozen=True)
class PromptText:
    """Token ids of a request's texts.

    role: the three tokens that open the answer. text: what is spoken, at least one token. reference: transcript of the
    reference sound, for in-context cloning. instruct: the whole instruction with its wrapper; empty for none.
    """

    role: tuple[int, int, int]
    text: tuple[int, ...]
    reference: tuple[int, ...] = ()
    instruct: tuple[int, ...] = ()


@dataclass(frozen=True)
class SpeechVoice:
    """Who speaks: a built-in speaker, a speaker embedding, or neither (voice design).

    name: key of the checkpoint's speakers, lower case. embedding: float32 [dim]. reference_codes: int64 [frames, 16] of
    the reference sound, for in-context cloning.
    """

    name: str | None = None
    embedding: Array | None = field(default=None, compare=False)
    reference_codes: Array | None = field(default=None, compare=False)


@dataclass(frozen=True)
class SpeechPrompt:
    """Rows of one prompt, and the text that is fed with the frames after it.

    text: int64 [T] text token of each row, -1 for none. codes: int64 [T, 16], -1 for none. speaker_row: row that the
    speaker embedding is added to, -1 for none. speaker: float32 [dim], if there is such a row. trailing: text token fed
    with each frame, in order; after the last, padding. is_open: more text follows.
    """

    text: Array
    codes: Array
    speaker_row: int
    speaker: Array | None
    trailing: tuple[int, ...]
    is_open: bool = False

    def __len__(self) -> int:
        return len(self.text)


class _Rows:
    """Rows in the making."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.codes: list[list[int]] = []
        self.speaker_row = NONE

    def add(self, text: int = NONE, code: int = NONE) -> None:
        """A row of a text token and a first code."""
        self.text.append(text)
        self.codes.append([code] + [NONE] * 15)

    def add_frame(self, text: int, frame: Array) -> None:
        """A row of a text token and all codes of a frame."""
        self.text.append(text)
        self.codes.append(frame.tolist())


def lay_out(
    config: Qwen3TTSConfig,
    texts: PromptText,
    voice: SpeechVoice,
    *,
    language: str = AUTO,
    streams_text: bool = False,
    is_open: bool = False,
) -> SpeechPrompt:
    """The prompt of one request.

    Args:
        texts: token ids.
        voice: a Base model needs an embedding, a CustomVoice model a name, a VoiceDesign model neither.
        language: "auto", or a key of the config's languages, in any case.
        streams_text: feed the text one token a frame instead of all of it before the first frame.
        is_open: more text follows `texts.text`; only with `streams_text`.
    Raises: SettingsError for a voice or language that the checkpoint lacks, and for a layout that cannot be built;
        ShapeError for codes or an embedding of another shape.
    """
    talker = config.talker_config
    _check(config, texts, voice, is_open and not streams_text)
    rows = _Rows()
    if config.tts_model_type != "custom_voice" or config.tts_model_size != "0b6":  # the small model ignores it
        for token in texts.instruct:
            rows.add(token)
    for token in texts.role:
        rows.add(token)
    for code in _prefix(config, language.lower(), voice.name):
        rows.add(config.tts_pad_token_id, code)
    if voice.name is not None:
        rows.add(config.tts_pad_token_id, config.speakers[voice.name])
    elif voice.embedding is not None:
        rows.speaker_row = len(rows.text)
        rows.add(config.tts_pad_token_id)
    rows.add(config.tts_bos_token_id, talker.codec_pad_id)

    end = () if is_open else (config.tts_eos_token_id,)
    if voice.reference_codes is not None:
        spoken = (*texts.reference, *texts.text, *end)
        trailing = _in_context(config, rows, spoken, voice.reference_codes, streams_text, is_open)
    elif streams_text:
        rows.add(texts.text[0], talker.codec_bos_id)
        trailing = (*texts.text[1:], *end)
    else:
        for token in (*texts.text, *end):
            rows.add(token, talker.codec_pad_id)
        rows.add(config.tts_pad_token_id, talker.codec_bos_id)
        trailing = ()
    return SpeechPrompt(
        text=np.array(rows.text, np.int64),
        codes=np.array(rows.codes, np.int64),
        speaker_row=rows.speaker_row,
        speaker=voice.embedding,
        trailing=trailing,
        is_open=is_open,
    )


def _prefix(config: Qwen3TTSConfig, language: str, speaker: str | None) -> tuple[int, ...]:
    """Control codes that state the language."""
    talker = config.talker_config
    dialect = talker.spk_is_dialect.get(speaker or "")
    if dialect and language in (AUTO, "chinese"):
        code = talker.codec_language_id[dialect]
    elif language == AUTO:
        return talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id
    elif language in config.languages:
        code = config.languages[language]
    else:
        raise SettingsError("language", expected=f"one of {[AUTO, *sorted(config.languages)]}", got=repr(language))
    return talker.codec_think_id, talker.codec_think_bos_id, code, talker.codec_think_eos_id


def _in_context(
    config: Qwen3TTSConfig, rows: _Rows, spoken: tuple[int, ...], frames: Array, streams_text: bool, is_open: bool
) -> tuple[int, ...]:
    """Add the rows of transcript, text and reference frames. Returns: the text that follows."""
    talker, pad = config.talker_config, config.tts_pad_token_id
    if not streams_text:
        for token in spoken:
            rows.add(token, talker.codec_pad_id)
        rows.add(pad, talker.codec_bos_id)
        for frame in frames:
            rows.add_frame(pad, frame)
        return ()
    n_rows = len(frames) + 1
    if is_open and len(spoken) < n_rows:
        expected = f"at least {n_rows} tokens of transcript and text, as many as the reference has frames, and one"
        raise SettingsError("live text with a reference", expected=expected, got=len(spoken))
    beside = [*spoken[:n_rows], *([pad] * (n_rows - len(spoken)))]
    rows.add(beside[0], talker.codec_bos_id)
    for token, frame in zip(beside[1:], frames, strict=True):
        rows.add_frame(token, frame)
    return spoken[n_rows:]


def _check(config: Qwen3TTSConfig, texts: PromptText, voice: SpeechVoice, is_open_at_once: bool) -> None:
    """Raises: SettingsError or ShapeError, as `lay_out`."""
    kind = config.tts_model_type
    needs = {"base": "a speaker embedding", "custom_voice": "a speaker's name", "voice_design": "no voice"}[kind]
    got = "a name" if voice.name is not None else "no voice" if voice.embedding is None else "a speaker embedding"
    fits = {"base": "a speaker embedding", "custom_voice": "a name", "voice_design": "no voice"}[kind] == got
    if not fits or (voice.name is not None and voice.embedding is not None):
        raise SettingsError(f"voice of a {kind} model", expected=needs, got=got)
    if voice.name is not None and voice.name not in config.speakers:
        raise SettingsError("voice", expected=f"one of {sorted(config.speakers)}", got=repr(voice.name))
    if not texts.text:
        raise SettingsError("text", expected="at least one token", got="none")
    if texts.instruct and kind == "base":
        raise SettingsError("instructions of a base model", expected="none", got=f"{len(texts.instruct)} tokens")
    if is_open_at_once:
        raise SettingsError("live text", expected="the layout that streams the text", got="all text before the sound")
    if voice.embedding is not None and voice.embedding.shape != (config.talker_config.hidden_size,):
        expected = (config.talker_config.hidden_size,)
        raise ShapeError("speaker embedding", expected=expected, got=voice.embedding.shape)
    codes = voice.reference_codes
    if codes is None:
        return
    if kind != "base":
        raise SettingsError(f"reference codes of a {kind} model", expected="none", got=f"{len(codes)} frames")
    if not texts.reference:
        raise SettingsError("reference codes", expected="a transcript of the reference", got="none")
    if codes.ndim != 2 or codes.shape[1] != 16 or not len(codes):
        raise ShapeError("reference codes", expected="[frames, 16]", got=codes.shape)
    if codes.min() < 0 or codes.max() >= config.talker_config.n_codes:
        limits = f"codes in 0..{config.talker_config.n_codes - 1}"
        raise SettingsError("reference codes", expected=limits, got=f"{codes.min()}..{codes.max()}")
