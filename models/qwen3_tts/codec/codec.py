"""Codes to sound for many slots, and reference sounds to codes and speaker vectors.

The host side of the codec: checks, buckets and padding. Networks and slot state are in the regions. An engine that has
codes on the device calls the regions directly.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.errors import AudioError, SettingsError, SlotError, TokenError
from models.graphs.input_block import padded_array
from models.inputs.audio import validate_audio
from models.qwen3_tts.codec import regions
from models.qwen3_tts.codec.config import CODE_GROUPS, FRAME_SAMPLES, SAMPLE_RATE
from models.qwen3_tts.codec.load import SpeechTokenizer
from models.qwen3_tts.codec.region_table import CodecParts, CodecRegions, CodecShapes
from models.qwen3_tts.codec.speaker_encoder import MIN_SAMPLES, SpeakerEncoder
from models.qwen3_tts.codec.speech_encoder import frame_count

Codes = npt.NDArray[np.int64]

# Appended to a reference sound, so that its last phoneme does not continue into the first one of the new speech.
REFERENCE_SILENCE = SAMPLE_RATE // 2


class CodeChunk(NamedTuple):
    """The next frames of one slot."""

    slot: int
    codes: Codes  # [n, 16], n at most the largest chunk


class SpeechCodec:
    """Speech decoder over slots, speech encoder and speaker encoder of one checkpoint."""

    def __init__(
        self,
        tokenizer: SpeechTokenizer,
        speaker: SpeakerEncoder | None = None,
        *,
        n_slots: int,
        shapes: CodecShapes | None = None,
    ):
        """
        Args:
            tokenizer: of `load_speech_tokenizer`.
            speaker: of `load_speaker_encoder`; None for a checkpoint without one.
            n_slots: streams that are decoded side by side.
            shapes: bucket sizes; None = the default ones.
        """
        if n_slots < 1:
            raise SettingsError("codec slots", expected="at least 1", got=n_slots)
        shapes = shapes or CodecShapes()
        self.shapes = shapes.capped(batch=n_slots) if shapes.batch[-1] > n_slots else shapes
        self.state = tokenizer.decoder.new_state(n_slots, self.shapes.frames[-1])
        self.regions = CodecRegions(CodecParts(tokenizer.decoder, tokenizer.encoder, speaker), self.state, self.shapes)
        self._n_codes = tokenizer.decoder.config.codebook_size

    def begin(self, slots: Sequence[int]) -> None:
        """Set slots to the start of a stream. Raises: SlotError."""
        self._check_slots(slots)
        for rows in self._batches(len(slots)):
            part = slots[rows]
            size = self.shapes.fit("codec_begin", "batch", len(part))
            self.regions.run(regions.begin_sound, padded_array(part, size, self.state.scratch))

    def decode(self, chunks: Sequence[CodeChunk]) -> list[Tensor]:
        """Sound of the next frames of different slots.

        Chunks of different length share a batch, which is padded to the longest.

        Returns: one [1920 * n] float32 per chunk at 24 kHz on the device.
        Raises: SlotError, TokenError; ShapeError beyond the largest chunk. All slots are unchanged then.
        """
        self._check_slots([chunk.slot for chunk in chunks])
        for chunk in chunks:
            self._check_codes(f"codes of slot {chunk.slot}", chunk.codes)
            self.shapes.fit("codec_decode", "frames", len(chunk.codes))
        waves: list[Tensor] = []
        for rows in self._batches(len(chunks)):
            part = chunks[rows]
            counts = [len(chunk.codes) for chunk in part]
            size = self.shapes.fit("codec_decode", "batch", len(part))
            codes = np.zeros((size, self.shapes.fit("codec_decode", "frames", max(counts)), CODE_GROUPS), np.int64)
            for row, chunk in enumerate(part):
                codes[row, : counts[row]] = chunk.codes
            slots = padded_array([chunk.slot for chunk in part], size, self.state.scratch)
            wave = self.regions.run(regions.decode_frames, slots, codes, padded_array(counts, size, 0))
            waves += (wave[row, : FRAME_SAMPLES * n].clone() for row, n in enumerate(counts))
        return waves

    def decode_all(self, slot: int, codes: Codes) -> Tensor:
        """Sound of any number of frames of one slot, in the largest chunks. Discarded, it primes a slot with the codes
        of a reference sound.

        Args:
            slot: advanced by all frames.
            codes: [n, 16] int64, at least one frame.
        Returns: [1920 * n] float32.
        Raises: SlotError, TokenError.
        """
        self._check_codes("codes", codes)
        step = self.shapes.frames[-1]
        starts = range(0, len(codes), step)
        return torch.cat([self.decode([CodeChunk(slot, codes[start : start + step])])[0] for start in starts])

    def encode(self, wave: object, *, silence: int = REFERENCE_SILENCE) -> Codes:
        """Codes of a reference sound, [frames, 16].

        Args:
            wave: [n] mono float samples at 24 kHz.
            silence: samples of silence to append.
        Raises: AudioError; SettingsError for a negative silence.
        """
        if silence < 0:
            raise SettingsError("silence", expected="0 samples or more", got=silence)
        sound = torch.nn.functional.pad(validate_audio(wave, what="reference sound"), (0, silence))
        waves, n_samples = self._padded(sound)
        codes = self.regions.run(regions.encode_sound, waves, n_samples)
        return codes[0, : frame_count(len(sound))].cpu().numpy().copy()

    def speaker(self, wave: object) -> npt.NDArray[np.float32]:
        """The speaker vector of a reference sound, [dim].

        Args:
            wave: [n] mono float samples at 24 kHz, at least 2048.
        Raises: AudioError; SettingsError if the checkpoint has no speaker encoder.
        """
        if "codec_speaker" not in self.regions.table:
            raise SettingsError("speaker vector", expected="a checkpoint with a speaker encoder", got="none")
        sound = validate_audio(wave, what="reference sound")
        if len(sound) < MIN_SAMPLES:
            raise AudioError("reference sound", expected=f"at least {MIN_SAMPLES} samples", got=len(sound))
        vector = self.regions.run(regions.describe_speaker, *self._padded(sound))
        return vector[0].cpu().numpy().copy()

    def _padded(self, sound: Tensor) -> tuple[npt.NDArray[np.float32], Codes]:
        """One sound at a bucket and its length, as inputs of a region."""
        most = FRAME_SAMPLES * self.shapes.sound_frames[-1]
        if len(sound) > most:
            expected = f"at most {most} samples ({most / SAMPLE_RATE:g} s), silence at the end included"
            raise AudioError("reference sound", expected=expected, got=len(sound))
        n_rows = self.shapes.fit("codec_encode", "sounds", 1)
        n_frames = self.shapes.fit("codec_encode", "sound_frames", frame_count(len(sound)))
        waves = np.zeros((n_rows, FRAME_SAMPLES * n_frames), np.float32)
        waves[0, : len(sound)] = sound.numpy()
        # Rows of padding have a length that every network can read.
        return waves, padded_array([len(sound)], n_rows, MIN_SAMPLES)

    def _batches(self, n: int) -> Iterator[slice]:
        most = self.shapes.batch[-1]
        return (slice(start, start + most) for start in range(0, n, most))

    def _check_slots(self, slots: Sequence[int]) -> None:
        if not slots or len(set(slots)) != len(slots) or not all(0 <= slot < self.state.n_slots for slot in slots):
            expected = f"different ones of 0 to {self.state.n_slots - 1}"
            raise SlotError("codec slots", expected=expected, got=list(slots))

    def _check_codes(self, what: str, codes: Codes) -> None:
        if codes.ndim != 2 or codes.shape[1] != CODE_GROUPS or not len(codes) or codes.dtype != np.int64:
            got = f"{codes.dtype} {list(codes.shape)}"
            raise TokenError(what, expected=f"int64 [1 or more, {CODE_GROUPS}]", got=got)
        if codes.min() < 0 or codes.max() >= self._n_codes:
            got = f"{codes.min()} to {codes.max()}"
            raise TokenError(what, expected=f"codes of 0 to {self._n_codes - 1}", got=got)
