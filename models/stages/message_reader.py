"""Conversations cut into what a slot is fed: ids, picture slices and sounds to encode, and where their rows go.

Everything is checked and cut here, without weights, so that bad input never reaches the model and the thread that owns
it only encodes. Knows messages, the template and checkpoint settings. Does not know slots nor what an answer is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from models.checkpoint.config import OmniConfig, PreprocessorConfig
from models.errors import MessageError
from models.inputs.audio import frame_count, placeholder_groups, token_count, validate_audio
from models.inputs.image import ImagePatches, image_patches
from models.inputs.messages import ChatMessage
from models.inputs.prompts import Bound, PlacedAudio, Prompt, PromptOptions, build_prompt, build_segment
from models.inputs.tokens import Tokenizer
from models.stages.runner import Rows, Runner


@dataclass(frozen=True, eq=False)
class Content:
    """A stretch of conversation, checked and cut, not encoded yet.

    ids: what media rows stand in for is in there too. slices: pictures, each with its bound in `image_bounds`.
    sounds: [n] float32 each, with the bounds its rows fill in order.
    """

    ids: tuple[int, ...]
    slices: tuple[ImagePatches, ...] = ()
    image_bounds: tuple[Bound, ...] = ()
    sounds: tuple[Tensor, ...] = ()
    sound_bounds: tuple[tuple[Bound, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def between(self, before: Sequence[int], behind: Sequence[int]) -> "Content":
        """The same with ids around it."""
        by = len(before)

        def moved(bounds: tuple[Bound, ...]) -> tuple[Bound, ...]:
            return tuple((start + by, end + by) for start, end in bounds)

        return replace(
            self,
            ids=(*before, *self.ids, *behind),
            image_bounds=moved(self.image_bounds),
            sound_bounds=tuple(map(moved, self.sound_bounds)),
        )

    def sound_rows(self, runner: Runner, *, batch_padding: bool) -> Iterator[tuple[int, Tensor]]:
        """Encode the sounds. Gives: where rows begin, and the rows [n, D]. batch_padding: see `Runner.encode_clips`."""
        chunk_length = runner.model.config.audio_chunk_length
        encoded = runner.encode_clips(self.sounds, chunk_length=chunk_length, batch_padding=batch_padding)
        for rows, bounds in zip(encoded, self.sound_bounds, strict=True):
            sizes = [end - start for start, end in bounds]
            # The joined sound may make a row more than its placeholders hold; that row stands for nothing.
            yield from zip((start for start, _ in bounds), rows[: sum(sizes)].split(sizes), strict=True)

    def encode(self, runner: Runner, *, batch_padding: bool = False) -> Rows:
        """Rows ready to be fed; takes no slot."""
        pictures = zip((start for start, _ in self.image_bounds), runner.encode_images(self.slices), strict=True)
        return Rows.mixed(self.ids, [*pictures, *self.sound_rows(runner, batch_padding=batch_padding)])


class MessageReader:
    """Reads for one checkpoint; holds nothing of a conversation."""

    def __init__(self, config: OmniConfig, tokenizer: Tokenizer, settings: PreprocessorConfig):
        self._config, self._tokenizer, self._settings = config, tokenizer, settings

    def read(self, messages: object, options: PromptOptions | None = None) -> Prompt:
        """Check a conversation and lay it out.

        messages: list of `{"role", "content"}`, content being text or a list of text, PIL images and mono float
        sound [n] at 16 kHz. Special tokens in text count as such: escape what must not act as one.
        Raises: MessageError, ImageError, AudioError, TokenError.
        """
        return self._checked(build_prompt(messages, self._tokenizer, self._settings, placeholder_groups, options))

    def read_segment(self, message: ChatMessage, options: PromptOptions) -> Prompt:
        """The same for one message's bare content, without the template."""
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
        """Pictures cut into patches, each message's sounds joined. Raises: ImageError."""
        side = self._config.vision_config.table_side
        slices = (part for image in prompt.images for part in image_patches(image.image, image.plan, table_side=side))
        return Content(
            prompt.ids,
            tuple(slices),
            prompt.image_bounds,
            tuple(_joined(audio) for audio in prompt.audios),
            tuple(audio.bounds for audio in prompt.audios),
        )


def _joined(audio: PlacedAudio) -> Tensor:
    wave = torch.cat([validate_audio(wave) for wave in audio.waves])
    # Joined, several sounds may make a row less than counted one by one: silence makes up for it.
    while token_count(frame_count(len(wave))) < audio.n_rows:
        wave = F.pad(wave, (0, 160))
    return wave
