"""The model's own speech: word errors by an independent recogniser, and whether its voice stays the same.

The recogniser is pocketsphinx with its US English model and a language model of the grammar's replies. Its errors on
the same sentences by the voice that the talker has learned from are subtracted.
"""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import soxr

from models.errors import ModelError
from training.edits import edit_distance
from training.evaluate.acts import Played
from training.evaluate.figures import Measured, reply_to, said_in
from training.evaluate.reply_model import reply_model
from training.grammar.corpus import corpus
from training.mind.voices import EngineVoice
from training.speech.voices import TARGET, VOICES
from training.timelines.speech import RATE, Samples
from worker.protocol.wire import SOUND_RATE

if TYPE_CHECKING:
    from models.token2wav.prompt.campplus import CampPlus

MIN_WORDS = 3
PAD, HISS = RATE // 5, 0.0005  # what the recogniser needs around and below speech: silence, which is not digital
RESAMPLES = 1000
MINUTE = 60
PIECE = 2 * RATE  # of speech for one speaker vector
VOCODER = Path("assets/token2wav")  # of a checkpoint


class Ear:
    """Hears replies of the grammar. Raises: ModelError without pocketsphinx."""

    def __init__(self) -> None:
        try:
            from pocketsphinx import Decoder
        except ImportError:
            raise ModelError("pocketsphinx", expected="the extra `training`, or --no-ear", got="none") from None
        self._decoder = Decoder(samprate=RATE, lm=None)
        sentences = [words(line) for line in corpus().splitlines()]
        known = {word for sentence in sentences for word in sentence if self._decoder.lookup_word(word)}
        self._known = known
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "replies.arpa"
            file.write_text(reply_model(sentences, known), encoding="ascii")
            self._decoder.add_lm_file("replies", str(file))
        self._decoder.activate_search("replies")

    def knows(self, text: str) -> bool:
        """Whether a reply consists of words that can be heard: its errors are then those of its sound."""
        return set(words(text)) <= self._known

    def errors(self, sound: Samples, text: str) -> int:
        """Edits between the words that are heard and those of a text. sound: [n] samples at 16 kHz."""
        quiet = np.pad(sound, PAD) + HISS * np.random.default_rng(0).standard_normal(len(sound) + 2 * PAD)
        levels = (quiet.clip(-1, 1) * 32_767).astype(np.int16)
        self._decoder.start_utt()
        self._decoder.process_raw(levels.tobytes(), full_utt=True)
        self._decoder.end_utt()
        found = self._decoder.hyp()
        return edit_distance(words(found.hypstr if found else ""), words(text))


def plain(text: str) -> str:
    """A text that every engine can say: letters, digits and the usual punctuation."""
    return " ".join(re.sub(r"[^A-Za-z0-9',.?!]+", " ", text).split())


def words(text: str) -> list[str]:
    """The words of a text in lower case without punctuation."""
    return re.findall(r"[a-z']+", text.lower())


def replies_of(played: Sequence[Played], count: int) -> list[tuple[str, Samples]]:
    """Up to `count` replies of at least three words, spread over all cases: text and sound at 16 kHz."""
    found = []
    for one in played:
        for _, done in said_in(one):
            if done is not None and len(words(text := reply_to(one, done))) >= MIN_WORDS:
                first = next((unit for unit in range(int(done.start), done.until) if one.units[unit].speaks), 0)
                sound = np.concatenate([unit.sound for unit in one.units[first : done.until]])
                if len(sound):
                    found.append((text, resampled(sound)))
    step = max(1, len(found) // max(count, 1))
    return found[::step][:count]


def word_errors_above_voice(ear: Ear, replies: Sequence[tuple[str, Samples]], cache: Path) -> Measured | None:
    """Word errors of the model's sound above those of its source voice on the same sentences.

    Args:
        replies: those with words that the ear does not know are left out; None is returned if none is left.
        cache: folder of the voice's utterances.
    Raises: ModelError without the voice.
    """
    known = [(text, sound) for text, sound in replies if ear.knows(text)]
    if not known:
        return None
    source = EngineVoice(next(voice for voice in VOICES if voice.name == TARGET), cache)
    rows = np.array(
        [(ear.errors(sound, text), ear.errors(source(plain(text)), text), len(words(text))) for text, sound in known]
    )
    rng = np.random.default_rng(0)

    def above(chosen: np.ndarray) -> float:
        own, voice, n_words = chosen.sum(0)
        return float((own - voice) / n_words)

    drawn = [above(rows[rng.integers(len(rows), size=len(rows))]) for _ in range(RESAMPLES)]
    return Measured(above(rows), float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975)), len(rows))


def speaker_encoder(model: Path) -> "CampPlus":
    """The network of a checkpoint that makes speaker vectors."""
    from models.token2wav.load.parts import load_voice_parts

    return load_voice_parts(model / VOCODER).speaker_encoder


def voice_kept(played: Played, encoder: "CampPlus") -> Measured | None:
    """Cosine between the speaker vectors of the speech in the first and in the last minute; None without speech.

    Vectors are those of pieces of two seconds. n: pieces of both minutes.
    """
    if len(played.units) < 2 * MINUTE:
        return None
    first, last = (
        _pieces([unit.sound for unit in part if unit.speaks])
        for part in (played.units[:MINUTE], played.units[-MINUTE:])
    )
    if not (len(first) and len(last)):
        return None
    a, b = _vectors(encoder, first), _vectors(encoder, last)
    rng = np.random.default_rng(0)

    def cosine(one: np.ndarray, other: np.ndarray) -> float:
        return float(_unit(one.mean(0)) @ _unit(other.mean(0)))

    drawn = [
        cosine(a[rng.integers(len(a), size=len(a))], b[rng.integers(len(b), size=len(b))]) for _ in range(RESAMPLES)
    ]
    return Measured(cosine(a, b), float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975)), len(a) + len(b))


def resampled(sound: Samples) -> Samples:
    """The server's sound at 16 kHz."""
    return np.asarray(soxr.resample(sound, SOUND_RATE, RATE), np.float32)


def _pieces(sounds: Sequence[Samples]) -> np.ndarray:
    """[n, PIECE] at 16 kHz."""
    if not sounds:
        return np.zeros((0, PIECE), np.float32)
    sound = resampled(np.concatenate(sounds))
    n = len(sound) // PIECE
    return sound[: n * PIECE].reshape(n, PIECE)


def _vectors(encoder: "CampPlus", pieces: np.ndarray) -> np.ndarray:
    """[n, embedding] normalised speaker vectors."""
    import torch

    from training.speech.features import fbank_80

    with torch.no_grad():
        energies = torch.stack([fbank_80(torch.from_numpy(piece)) for piece in pieces])
        vectors = encoder(energies - energies.mean(1, keepdim=True))
    return np.stack([_unit(vector) for vector in vectors.numpy()])


def _unit(vector: np.ndarray) -> np.ndarray:
    return vector / max(float(np.linalg.norm(vector)), 1e-9)
