"""Turn-based chat for one caller: messages of text, images and sound in, text out, whole or streamed.

Contains the way from a conversation to rows and the end of a reply; prefill and decode are those of `unit_steps`, as
in the worker's answers. Does not contain the template (`prompts`). A request is checked completely before it takes a
slot, and the slot is emptied when the reply ends, fails or is closed.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from models.checkpoint.config import PreprocessorConfig, load_preprocessor_config
from models.errors import ConfigError, ContextOverflowError, NumericsError, SettingsError
from models.inputs.prompts import Prompt, PromptOptions
from models.inputs.tokens import TextStream, Tokenizer
from models.load import load_model
from models.sampling.settings import CHAT_TEXT, TextSampling
from models.sampling.text import TokenSet, TokenSets
from models.stages.message_reader import MessageReader
from models.stages.region_table import Shapes
from models.stages.runner import Rows, Runner
from models.stages.unit_steps import UnitSteps

MAX_NEW_TOKENS = 512
Compat = Literal["reference", "fixed"]


@dataclass(frozen=True)
class ReplyPiece:
    """One generated token. text: the characters that it completes; empty in the middle of a character."""

    id: int
    text: str


@dataclass(frozen=True)
class ChatReply:
    """A complete reply. ids: all generated tokens, a stop token included. text: without special tokens."""

    ids: list[int]
    text: str
    stopped: Literal["stop", "length"]


class Chat:
    """Chat over a runner's slots. Each call is a conversation of its own; nothing is kept between calls."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer, settings: PreprocessorConfig):
        self.runner, self.tokenizer, self.settings = runner, tokenizer, settings
        self.steps = UnitSteps(runner, speaker=None)
        self._reader = MessageReader(runner.model.config, tokenizer, settings)
        special = tokenizer.special
        # Text after the end of speech is not shown, so it is not generated.
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
        pt_path: str | Path | None = None,
    ) -> "Chat":
        """Chat with a checkpoint folder.

        Args:
            llm_len: context rows of a conversation, reply included.
        Raises: as `load_model`; ConfigError if tokenizer or picture settings do not fit the model; TokenError.
        """
        model = load_model(path, device=device, dtype=dtype, pt_path=pt_path)
        tokenizer, settings = Tokenizer.load(path), load_preprocessor_config(path)
        config = model.config
        if tokenizer.highest_id >= config.vocab_size:
            expected = f"below {config.vocab_size} (vocab_size)"
            raise ConfigError("tokenizer: highest id", expected=expected, got=tokenizer.highest_id)
        for key, value in (
            ("image_feature_size", config.query_num),
            ("patch_size", config.vision_config.patch_size),
        ):
            if (got := getattr(settings, key)) != value:
                raise ConfigError(f"preprocessor_config.json: {key}", expected=value, got=got)
        sets = TokenSets.build([TokenSet(pad_id=tokenizer.special.im_end)], config.vocab_size, device)
        runner = Runner(model, sets, n_slots=n_slots, llm_len=llm_len, shapes=shapes)
        return cls(runner, tokenizer, settings)

    def read(self, messages: object, options: PromptOptions | None = None) -> Prompt:
        """Check a conversation and build its prompt, without encoding it and without a slot.

        Args:
            messages: list of `{"role", "content"}`. Content is text or a list of text, PIL images and mono float sound
                [n] at 16 kHz. Special tokens in text act as such; the caller escapes them where they must not.
        Raises: MessageError, ImageError, AudioError, TokenError.
        """
        return self._reader.read(messages, options)

    def encode(self, prompt: Prompt, *, compat: Compat = "fixed") -> Rows:
        """Encode a prompt's images and sound and return the rows to prefill; takes no slot.

        Args:
            compat: "reference": shorter sounds attend to the padding of the longest one in the same request, as in the
                public implementation. "fixed": each sound is encoded by itself.
        Raises: ImageError, SettingsError.
        """
        if compat not in get_args(Compat):
            raise SettingsError("compat", expected=f"one of {', '.join(get_args(Compat))}", got=compat)
        return self._reader.cut(prompt).encode(self.runner, batch_padding=compat == "reference")

    def stream(
        self,
        messages: object,
        options: PromptOptions | None = None,
        *,
        sampling: TextSampling = CHAT_TEXT,
        seed: int = 0,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop_ids: Collection[int] | None = None,
        compat: Compat = "fixed",
    ) -> Iterator[ReplyPiece]:
        """Generate token by token; the slot is released when the iterator ends or is closed.

        The last piece also contains the rest of an incomplete character.

        Args:
            stop_ids: tokens that end the reply; default: end of message, of text, of speech. The stop token is yielded
                with empty text.
        Raises: as `read` and `encode`; ContextOverflowError if prompt and reply do not fit a slot; SettingsError;
            SlotError; NumericsError.
        """
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise SettingsError("max_new_tokens", expected="a whole number from 1", got=max_new_tokens)
        for what, given, kind in (("options", options, PromptOptions | None), ("sampling", sampling, TextSampling)):
            if not isinstance(given, kind):
                raise SettingsError(what, expected=getattr(kind, "__name__", "PromptOptions"), got=type(given).__name__)
        stops = self._stops(stop_ids)
        self.runner.check_text(sampling, seed)
        prompt = self.read(messages, options)
        if len(prompt.ids) + max_new_tokens > self.runner.llm_len:
            raise ContextOverflowError(
                "conversation",
                expected=f"at most {self.runner.llm_len} rows, prompt and answer",
                got=f"{len(prompt.ids)} + {max_new_tokens}",
            )
        rows = self.encode(prompt, compat=compat)
        return self._generate(rows, sampling, seed, max_new_tokens, stops)

    def _stops(self, stop_ids: Collection[int] | None) -> frozenset[int]:
        if stop_ids is None:
            return self.stop_ids
        if not isinstance(stop_ids, Collection) or not all(type(token) is int for token in stop_ids):
            raise SettingsError("stop_ids", expected="a collection of token ids", got=stop_ids)
        return frozenset(stop_ids)

    def _generate(
        self, rows: Rows, sampling: TextSampling, seed: int, limit: int, stop_ids: frozenset[int]
    ) -> Iterator[ReplyPiece]:
        steps, text = self.steps, TextStream(self.tokenizer)
        with steps.lease() as slot:
            steps.configure_text(slot, sampling, seed)
            (chosen,) = steps.feed([slot], [rows], [True])
            for n in range(1, limit + 1):
                if (token := chosen.token) is None:
                    raise NumericsError("logits", expected="finite numbers", got="NaN, infinity or no choice left")
                stopped = token in stop_ids
                piece = "" if stopped else text.push([token])
                if stopped or n == limit:
                    yield ReplyPiece(token, piece + text.flush())
                    return
                yield ReplyPiece(token, piece)
                (chosen,) = steps.step([slot], [token], [None], [True])

    def reply(
        self,
        messages: object,
        options: PromptOptions | None = None,
        *,
        sampling: TextSampling = CHAT_TEXT,
        seed: int = 0,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop_ids: Collection[int] | None = None,
        compat: Compat = "fixed",
    ) -> ChatReply:
        """The complete reply; arguments and errors as `stream`."""
        stops = self._stops(stop_ids)
        pieces = list(
            self.stream(
                messages,
                options,
                sampling=sampling,
                seed=seed,
                max_new_tokens=max_new_tokens,
                stop_ids=stops,
                compat=compat,
            )
        )
        ids = [piece.id for piece in pieces]
        return ChatReply(ids, "".join(piece.text for piece in pieces), "stop" if ids[-1] in stops else "length")


def greedy(sampling: TextSampling = CHAT_TEXT) -> TextSampling:
    """The same settings with greedy decoding."""
    return replace(sampling, greedy=True)
