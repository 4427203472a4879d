"""The utterances of one request: its text in parts that fit a slot, each laid out as a prompt. No networks."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from models.errors import ContextOverflowError, SettingsError
from models.qwen3_tts.prompt import lay_out
from models.qwen3_tts.runaway import RunawayLimits
from models.qwen3_tts.settings import FrameSampling
from models.qwen3_tts.streams import SpokenRequest
from worker.protocol.speech_messages import SpeakRequest, SpeechTask
from worker.speech.parts import SpeechParts
from worker.speech.voices import RequestVoice

TASKS: dict[str, SpeechTask] = {"base": "Base", "custom_voice": "CustomVoice", "voice_design": "VoiceDesign"}
MAX_SEEDS = 2**64
# A part ends after a sentence, else at white space.
# A run of marks is tried once, from its start: trying each of its places takes time that grows with its square.
SENTENCE = re.compile(r".+?(?:(?<![.!?…])[.!?…]++[\"'”’)\]]*+\s+|[。！？；]+|\n+|$)", re.DOTALL)
WORD = re.compile(r"\s*\S+|\s+$")
MIN_PART_TOKENS = 16

Fits = Callable[[str], bool]


@dataclass(frozen=True)
class PlannedSpeech:
    """A request with its voice and the seed that it runs with."""

    request: SpeakRequest
    voice: RequestVoice
    seed: int


def check_request(request: SpeakRequest, parts: SpeechParts) -> None:
    """Raises: SettingsError for a request that the checkpoint cannot serve."""
    task = TASKS[parts.config.tts_model_type]
    if request.task not in (None, task):
        raise SettingsError("task_type", expected=f"{task}, the model's", got=request.task)
    known = ("auto", *sorted(parts.config.languages))
    if request.language.lower() not in known:
        raise SettingsError("language", expected=f"one of {list(known)}", got=request.language[:60])
    if not request.is_open and not parts.tokenizer.encode_spoken(request.text):
        raise SettingsError("text", expected="text to speak", got="none")


def spoken_request(
    planned: PlannedSpeech, parts: SpeechParts, ids: tuple[int, ...], *, number: int = 0, is_open: bool = False
) -> SpokenRequest:
    """One utterance.

    Args:
        planned: the request.
        ids: tokens of the text, or with `is_open` its first ones.
        number: of the utterance among those of the request, which decides its seed.
        is_open: more tokens follow.
    Raises: SettingsError, ShapeError as `lay_out`; ContextOverflowError if it leaves no room for speech.
    """
    request, voice = planned.request, planned.voice
    takes_instructions = parts.config.tts_model_type != "base"
    texts = parts.tokenizer.texts(
        "", reference=voice.transcript, instruct=request.instructions if takes_instructions else ""
    )
    prompt = lay_out(
        parts.config,
        replace(texts, text=ids),
        voice.voice,
        language=request.language,
        streams_text=is_open,
        is_open=is_open,
    )
    if len(prompt) >= parts.runner.max_len:
        expected = f"fewer than {parts.runner.max_len} rows with the voice and the instructions"
        raise ContextOverflowError("text", expected=expected, got=len(prompt))
    return SpokenRequest(
        prompt,
        len(ids),
        voice.voice.reference_codes,
        (planned.seed + number) % MAX_SEEDS,
        _sampling(request, parts.sampling),
        RunawayLimits(max_frames=request.max_frames),
        request.first_chunk_frames,
    )


def text_parts(planned: PlannedSpeech, parts: SpeechParts) -> Iterator[tuple[int, ...]]:
    """The tokens of each utterance of a request. A slot has room for all frames that an utterance may have."""
    limits = RunawayLimits()
    alone = len(spoken_request(planned, parts, (0,)).prompt) - 1
    room = parts.runner.max_len - alone - limits.base_frames - 1
    most = max(MIN_PART_TOKENS, room // (1 + limits.frames_per_token))
    encode = parts.tokenizer.encode_spoken
    text = planned.request.text.strip()
    whole = encode(text)
    if len(whole) <= most:
        yield whole
        return
    part = ""
    for piece in _pieces(text, lambda piece: len(encode(piece)) <= most):
        if part and len(encode(part + piece)) > most:
            yield encode(part.strip())
            part = ""
        part += piece
    if part.strip():
        yield encode(part.strip())


def _pieces(text: str, fits: Fits) -> Iterator[str]:
    """Sentences; words of sentences that are too long, and halves of words that are."""
    for sentence in SENTENCE.findall(text):
        if fits(sentence):
            yield sentence
            continue
        for word in WORD.findall(sentence):
            yield from _halves(word, fits)


def _halves(word: str, fits: Fits) -> Iterator[str]:
    if fits(word) or len(word) < 2:
        yield word
        return
    middle = len(word) // 2
    yield from _halves(word[:middle], fits)
    yield from _halves(word[middle:], fits)


def _sampling(request: SpeakRequest, stated: FrameSampling) -> FrameSampling:
    """The checkpoint's sampling with what the request changes."""
    given = request.sampling.model_dump(exclude_none=True)
    penalty = given.pop("repetition_penalty", stated.repetition_penalty)
    return replace(stated, first=replace(stated.first, **given), repetition_penalty=penalty)
