"""Turn-based chat: messages of text, images and sound in, text out, whole or streamed, over leased slots.

Knows how a conversation becomes rows and when an answer ends. Does not know the regions' shapes (`runner`)
nor the template (`prompts`). A request is checked completely before it takes a slot, and the slot is empty
again when the answer ends, however it ends.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from models.audio import frame_count, placeholder_groups, token_count, validate_audio
from models.config import PreprocessorConfig, load_preprocessor_config
from models.errors import ContextOverflowError, NumericsError, SettingsError
from models.graphs import Shapes
from models.image import image_patches
from models.load import load_model
from models.prompts import PlacedAudio, Prompt, PromptOptions, build_prompt
from models.runner import Rows, Runner
from models.sampling import TokenSet, TokenSets
from models.sampling_settings import CHAT_TEXT, TextSampling
from models.tokens import TextStream, Tokenizer

MAX_NEW_TOKENS = 512


@dataclass(frozen=True)
class Piece:
    """One generated token. id: the token. text: what it completes; empty in the middle of a character."""

    id: int
    text: str


@dataclass(frozen=True)
class Answer:
    """A whole answer. ids: all generated tokens, a stop token included. text: without special tokens."""

    ids: list[int]
    text: str
    stopped: Literal["stop", "length"]


@dataclass(frozen=True, eq=False)
class Conversation:
    """A checked conversation, media encoded: ready to be fed."""

    prompt: Prompt
    rows: Rows


class Chat:
    """Chat over a runner's slots. One call is one conversation; calls do not remember each other."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer, settings: PreprocessorConfig):
        self.runner, self.tokenizer, self.settings = runner, tokenizer, settings
        special = tokenizer.special
        # Text behind the end of speech is never shown, so there is no reason to wait for it.
        self.stop_ids = frozenset({special.im_end, special.endoftext, special.tts_eos})

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        n_slots: int = 1,
        llm_len: int = 4096,
        shapes: Shapes | None = None,
    ) -> "Chat":
        """Chat with a checkpoint folder. llm_len: rows of a conversation, answer included."""
        model, tokenizer = load_model(path, device=device, dtype=dtype), Tokenizer.load(path)
        sets = TokenSets.build([TokenSet(pad_id=tokenizer.special.im_end)], model.config.vocab_size, device)
        runner = Runner(model, sets, n_slots=n_slots, llm_len=llm_len, shapes=shapes)
        return cls(runner, tokenizer, load_preprocessor_config(path))

    def prepare(
        self,
        messages: object,
        options: PromptOptions | None = None,
        *,
        compat: Literal["reference", "fixed"] = "fixed",
    ) -> Conversation:
        """Check a conversation and encode its media; takes no slot.

        Args:
            messages: list of `{"role", "content"}`, content being text or a list of text, PIL images and
                mono float sound [n] at 16 kHz.
            compat: "reference" lets shorter sounds see the padding of the longest one in the same request, as
                the public implementation does; "fixed" encodes each by itself.
        Raises: MessageError, ImageError, AudioError, TokenError.
        """
        prompt = build_prompt(messages, self.tokenizer, self.settings, placeholder_groups, options)
        device, config = self.runner.model.device, self.runner.model.config
        ids = torch.tensor(prompt.ids, device=device)
        bounds = [*prompt.image_bounds, *prompt.audio_bounds]
        if not bounds:
            return Conversation(prompt, Rows(ids))
        side = config.vision_config.table_side
        waves = [self._wave(audio) for audio in prompt.audios]
        slices = [part for image in prompt.images for part in image_patches(image.image, image.plan, table_side=side)]
        rows = self.runner.encode_images(slices)
        sounds = self.runner.encode_clips(
            waves, chunk_length=config.audio_chunk_length, batch_padding=compat == "reference"
        )
        for audio, encoded in zip(prompt.audios, sounds, strict=True):
            # The joined sound may make a row more than its placeholders hold; that row stands for nothing.
            rows += encoded[: audio.n_rows].split([end - start for start, end in audio.bounds])
        media = torch.zeros(len(prompt.ids), config.hidden_size, dtype=self.runner.model.dtype, device=device)
        is_row = torch.zeros(len(prompt.ids), dtype=torch.bool, device=device)
        for (start, end), own in zip(bounds, rows, strict=True):
            media[start:end] = own
            is_row[start:end] = True
        return Conversation(prompt, Rows(ids, media, is_row))

    def _wave(self, audio: PlacedAudio) -> Tensor:
        wave = torch.cat([validate_audio(wave) for wave in audio.waves])
        # Joined, several sounds may make a row less than counted one by one: silence makes up for it.
        while token_count(frame_count(len(wave))) < audio.n_rows:
            wave = F.pad(wave, (0, 160))
        return wave

    def stream(
        self,
        messages: object,
        options: PromptOptions | None = None,
        *,
        sampling: TextSampling = CHAT_TEXT,
        seed: int = 0,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop_ids: Collection[int] | None = None,
        compat: Literal["reference", "fixed"] = "fixed",
    ) -> Iterator[Piece]:
        """Generate token by token; the slot is given back when the iterator ends or is closed.

        stop_ids: tokens that end the answer (default: end of message, of text, of speech); the stop token is
        yielded, with empty text. The last piece also carries what is left of an unfinished character.
        Raises: as `prepare`; ContextOverflowError if prompt and answer do not fit a slot; SettingsError;
        SlotError; NumericsError.
        """
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise SettingsError("max_new_tokens", expected="a whole number from 1", got=max_new_tokens)
        conversation = self.prepare(messages, options, compat=compat)
        n_prompt = len(conversation.rows)
        if n_prompt + max_new_tokens > self.runner.llm_len:
            raise ContextOverflowError(
                "conversation",
                expected=f"at most {self.runner.llm_len} rows, prompt and answer",
                got=f"{n_prompt} + {max_new_tokens}",
            )
        return self._generate(
            conversation, sampling, seed, max_new_tokens, self.stop_ids if stop_ids is None else frozenset(stop_ids)
        )

    def _generate(
        self, conversation: Conversation, sampling: TextSampling, seed: int, limit: int, stop_ids: Collection[int]
    ) -> Iterator[Piece]:
        runner, text = self.runner, TextStream(self.tokenizer)
        with runner.lease() as slot:
            runner.state.text.configure(slot, sampling, seed)
            _, logits = runner.feed([slot], [conversation.rows])
            for n in range(1, limit + 1):
                chosen = runner.sample([slot], logits)
                token, bad = torch.stack([chosen.ids, chosen.bad.long()]).flatten().tolist()  # the step's one sync
                if bad:
                    raise NumericsError("logits", expected="finite numbers", got="NaN, infinity or no choice left")
                stopped = token in stop_ids
                piece = "" if stopped else text.push([token])
                if stopped or n == limit:
                    yield Piece(token, piece + text.flush())
                    return
                yield Piece(token, piece)
                _, logits = runner.decode([slot], [token])

    def reply(self, messages: object, options: PromptOptions | None = None, **settings: object) -> Answer:
        """The whole answer; arguments and errors as `stream`."""
        stop_ids = settings.get("stop_ids")
        pieces = list(self.stream(messages, options, **settings))
        ids = [piece.id for piece in pieces]
        stopped = ids[-1] in (self.stop_ids if stop_ids is None else stop_ids)
        return Answer(ids, "".join(piece.text for piece in pieces), "stop" if stopped else "length")


def greedy(sampling: TextSampling = CHAT_TEXT) -> TextSampling:
    """The same settings, always taking the best token."""
    return replace(sampling, greedy=True)
