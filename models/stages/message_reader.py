"""Turns conversations into content to prefill: token ids, image slices and sounds, and the places of their rows.

All checks and cuts are made here, without weights: invalid input does not reach the model, and the thread that owns
the model only encodes. Contains messages, the template and checkpoint settings. Does not contain slots or answers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from models.checkpoint.config import OmniConfig, PreprocessorConfig
from models.errors import MessageError
from models.inputs.audio import frame_count, placeholder_groups, split_clip, token_count, validate_audio
from models.inputs.chat_template import ChatTemplate
from models.inputs.image import ImagePatches, image_patches
from models.inputs.messages import ChatMessage
from models.inputs.prompts import Bound, PlacedAudio, Prompt, PromptOptions, build_prompt, build_segment
from models.inputs.tokens import Tokenizer
from models.stages.runner import Rows, Runner


@dataclass(frozen=True, eq=False)
class Content:
    """A span of conversation, checked and cut, not yet encoded.

    Args:
        ids: token ids, placeholders of media rows included.
        slices: image slices.
        image_bounds: the places of each slice's rows.
        sounds: [n] float32 at 16 kHz each.
        sound_bounds: the places of each sound's rows, filled in order.
        answer: ids of the answer, if its text is given; None for one to generate.
    """

    ids: tuple[int, ...]
    slices: tuple[ImagePatches, ...] = ()
    image_bounds: tuple[Bound, ...] = ()
    sounds: tuple[Tensor, ...] = ()
    sound_bounds: tuple[tuple[Bound, ...], ...] = ()
    answer: tuple[int, ...] | None = None

    @property
    def n_image_rows(self) -> int:
        """Rows of the images."""
        return sum(end - start for start, end in self.image_bounds)

    @property
    def n_sound_rows(self) -> int:
        """Rows of the sounds."""
        return sum(end - start for bounds in self.sound_bounds for start, end in bounds)

    def __len__(self) -> int:
        return len(self.ids)

    def between(self, before: Sequence[int], after: Sequence[int]) -> "Content":
        """The same content with ids before and after it."""
        by = len(before)

        def moved(bounds: tuple[Bound, ...]) -> tuple[Bound, ...]:
            return tuple((start + by, end + by) for start, end in bounds)

        return replace(
            self,
            ids=(*before, *self.ids, *after),
            image_bounds=moved(self.image_bounds),
            sound_bounds=tuple(map(moved, self.sound_bounds)),
        )

    def sound_rows(self, runner: Runner, *, batch_padding: bool) -> Iterator[tuple[int, Tensor]]:
        """Encode the sounds. Yields: first place and rows [n, D]. batch_padding: as in `Runner.encode_clips`."""
        chunk_length = runner.model.config.audio_chunk_length
        encoded = runner.encode_clips(self.sounds, chunk_length=chunk_length, batch_padding=batch_padding)
        for rows, bounds in zip(encoded, self.sound_bounds, strict=True):
            yield from _placed(rows, bounds)

    def media_pieces(self, runner: Runner, *, batch_padding: bool = False) -> Iterator["MediaPiece"]:
        """Encode the media in pieces of bounded work: one call's image slices, or 30 s of sound.

        With `batch_padding` all sounds are one piece, see `Runner.encode_clips`.
        """
        n = runner.shapes.slices[-1]
        for first in range(0, len(self.slices), n):
            starts = [start for start, _ in self.image_bounds[first : first + n]]
            rows = runner.encode_images(self.slices[first : first + n])
            yield MediaPiece("image", list(zip(starts, rows, strict=True)))
        if batch_padding:
            if self.sounds:
                yield MediaPiece("sound", list(self.sound_rows(runner, batch_padding=True)))
            return
        chunk_length = runner.model.config.audio_chunk_length
        for sound, bounds in zip(self.sounds, self.sound_bounds, strict=True):
            clips, encoded = split_clip(sound), []
            for i, clip in enumerate(clips):
                encoded += runner.encode_clips([clip], chunk_length=chunk_length)
                placed = _placed(torch.cat(encoded), bounds) if i + 1 == len(clips) else []
                yield MediaPiece("sound", placed)

    def encode(self, runner: Runner, *, batch_padding: bool = False) -> Rows:
        """Encode all media and return the rows to prefill; takes no slot."""
        pictures = zip((start for start, _ in self.image_bounds), runner.encode_images(self.slices), strict=True)
        return Rows.mixed(self.ids, [*pictures, *self.sound_rows(runner, batch_padding=batch_padding)])


class MediaPiece(NamedTuple):
    """Part of a content's media. rows: first place and rows [n, D] of what is complete with this part."""

    kind: Literal["image", "sound"]
    rows: list[tuple[int, Tensor]]


class MessageReader:
    """Reads conversations for one checkpoint; keeps no state of them."""

    def __init__(
        self,
        config: OmniConfig,
        tokenizer: Tokenizer,
        settings: PreprocessorConfig,
        template: Callable[[], ChatTemplate] | None = None,
    ):
        """template: as in `build_prompt`."""
        self._config, self._tokenizer, self._settings, self._template = config, tokenizer, settings, template

    def read(self, messages: object, options: PromptOptions | None = None) -> Prompt:
        """Check a conversation and build its prompt.

        Args:
            messages: list of `{"role", "content"}`. Content is text or a list of text, PIL images and mono float sound
                [n] at 16 kHz. Special tokens in text act as such; the caller escapes them where they must not.
        Raises: MessageError, ImageError, AudioError, TokenError.
        """
        settings, template = self._settings, self._template
        return self._checked(
            build_prompt(messages, self._tokenizer, settings, placeholder_groups, options, template=template)
        )

    def read_segment(self, message: ChatMessage, options: PromptOptions) -> Prompt:
        """As `read`, for the content of one message without the template."""
        return self._checked(build_segment(message, self._tokenizer, self._settings, placeholder_groups, options))

    def _checked(self, prompt: Prompt) -> Prompt:
        for what, given, present in (
            ("image", prompt.images, self._config.init_vision),
            ("sound", prompt.audios, self._config.init_audio),
        ):
            if given and not present:
                raise MessageError(
                    f"{what} in a message", expected=f"a checkpoint that takes {what}", got="one without"
                )
        for audio in prompt.audios:
            for wave in audio.waves:
                validate_audio(wave)
        return prompt

    def cut(self, prompt: Prompt) -> Content:
        """Cut images into patches and join each message's sounds. Raises: ImageError."""
        side = self._config.vision_config.table_side
        slices = (part for image in prompt.images for part in image_patches(image.image, image.plan, table_side=side))
        return Content(
            prompt.ids,
            tuple(slices),
            prompt.image_bounds,
            tuple(_joined(audio) for audio in prompt.audios),
            tuple(audio.bounds for audio in prompt.audios),
        )


def _placed(rows: Tensor, bounds: Sequence[Bound]) -> list[tuple[int, Tensor]]:
    """Rows [n, D] of a joined sound by their places."""
    sizes = [end - start for start, end in bounds]
    # The joined sound may have one row more than its placeholders; that row is dropped.
    return list(zip((start for start, _ in bounds), torch.split(rows[: sum(sizes)], sizes), strict=True))


def _joined(audio: PlacedAudio) -> Tensor:
    wave = torch.cat([validate_audio(wave) for wave in audio.waves])
    # Several joined sounds may have a row less than counted one by one; silence fills it up.
    while token_count(frame_count(len(wave))) < audio.n_rows:
        wave = F.pad(wave, (0, 160))
    return wave
