"""What is used again: phrases and pictures recur, recordings are renewed, and the rest of a conversation is new."""

import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.worker.loop.engines import TINY, loaded
from training.mind import voices
from training.mind.examples import REFERENCE_TEXT, Examples
from training.mind.produce import ProducerPlan, started
from training.mind.stock import utterances as stock
from training.mind.stock.utterances import DRAWS_OF_A_VOICE, N_VOICES, USES, Stock
from training.mind.voices import Utterance, engine_voices
from training.mind.words.written import WRITTEN
from training.speech.voices import SpeechVoice
from training.timelines.recurring import WINDOW, Recurring
from training.timelines.speech import noise_bursts


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[SpeechVoice, str]]:
    """What the engines are asked for; noise stands in for them."""
    found = Counter[tuple[SpeechVoice, str]]()

    def utterance(voice: SpeechVoice, text: str) -> Utterance:
        found[voice, text] += 1
        return Utterance(noise_bursts(text), np.zeros(0, np.int64), np.zeros(0))

    monkeypatch.setattr(voices, "utterance", utterance)
    monkeypatch.setattr(stock, "rendered", lambda _: np.zeros((448, 448, 3), np.uint8))
    return found


def examples() -> Examples:
    return Examples(TINY, seconds=30.0, lesson_s=14.0)


def with_stock(seed: str = "0") -> Examples:
    return replace(examples(), stock=Stock(engine_voices(), seed))


def test_sources_recur_and_are_replaced() -> None:
    recurring, rng = Recurring("a", uses=3), random.Random(0)
    firsts = [recurring.source("talk", rng).random() for _ in range(600)]
    counts = Counter(firsts)
    assert 0.85 * 600 / 3 < len(counts) < 600 / 3 + WINDOW
    assert not set(firsts[:100]) & set(firsts[-100:]), "expected the window to move on"
    assert Recurring("b", uses=3).source("talk", rng).random() not in counts
    again = Recurring("a", uses=3).source("talk", random.Random(0))
    assert again.random() == firsts[0]
    narrow = {recurring.source("other", rng, 2).random() for _ in range(6)}
    assert len(narrow) <= 3
    assert recurring.of_text("hello", rng).random() == recurring.of_text("hello", rng).random()
    nothing = Recurring()
    assert nothing.source("talk", rng) is rng and nothing.of_text("hello", rng) is rng


def test_conversations_are_new_though_recordings_recur(
    made: Counter[tuple[SpeechVoice, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock, "N_VOICES", 1)
    drawn = replace(with_stock(), seconds=16.0)
    records = [drawn.record("talk", i) for i in range(100)]
    n_said = sum(len(one.words) for one in records)
    assert max(made.values()) == 1, "expected each recording to be made once"
    assert len(made) < 0.85 * n_said
    spoken = [one for one in records if one.words]
    assert len({one.wave.tobytes() for one in spoken}) == len(spoken) > 50
    before = len(made)
    for i in range(100, 110):
        drawn.record("talk", i)
    assert len(made) > before, "expected new recordings all the time"


def test_a_phrase_is_answered_anew(made: Counter[tuple[SpeechVoice, str]]) -> None:
    drawn, encode = with_stock(), loaded()[1].decode
    answers: dict[str, set[str]] = {}
    for i in range(240):
        record = drawn.record("chat", i)
        for said in record.words:
            reply = encode([token for token in record.targets.tolist() if token >= 0])
            answers.setdefault(encode(said.tokens.tolist()), set()).add(reply)
            assert reply in record.accepted
    assert sum(len(one) > 1 for one in answers.values()) > 3


def test_voices_and_pictures_are_few_and_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "DRAWS_OF_A_VOICE", 20)
    one, rng = Stock(engine_voices(), "0"), random.Random(0)
    used = [one.draw(rng) for _ in range(40)]
    assert len({id(voice) for voice in used}) == N_VOICES and set(used[0].phrases) == set(USES)
    assert DRAWS_OF_A_VOICE > 20
    later = [one.draw(rng) for _ in range(30 * N_VOICES)]
    assert not {id(voice) for voice in used} & {id(voice) for voice in later[-10:]}
    seeds = {recurring.seed for voice in (*used, *later) for recurring in voice.phrases.values()}
    assert len(seeds) == len(USES) * len({id(voice) for voice in (*used, *later)})


@pytest.mark.usefixtures("made")
def test_pictures_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = Counter[object]()

    def render(picture: object) -> np.ndarray:
        rendered[picture] += 1
        return np.zeros((448, 448, 3), np.uint8)

    monkeypatch.setattr(stock, "rendered", render)
    monkeypatch.setattr(stock, "N_PICTURES", 40)
    drawn = with_stock()
    n_shown = sum(len(drawn.record("captions", i).pictures) for i in range(80))
    assert drawn.stock is not None and len(drawn.stock._pictures) == 40
    assert sum(rendered.values()) < 0.6 * n_shown


def test_words_that_are_not_spoken_do_not_recur(made: Counter[tuple[SpeechVoice, str]]) -> None:
    stocked = with_stock()
    assert stocked.stock is not None
    source = stocked._source(WRITTEN, random.Random(0))
    assert source.is_silent and source.phrases is None and source.views is stocked.stock.views
    assert stocked._source("talk", random.Random(0)).phrases is not None
    lesson = replace(stocked, speaker=lambda *_: ()).record("echo", 0)
    assert lesson.is_silent and lesson.words and not lesson.wave.any()
    assert {text for _, text in made} <= {REFERENCE_TEXT}, "expected the reference voice only"


def test_held_out_records_use_nothing_again(tmp_path: Path) -> None:
    plan = ProducerPlan(Examples(TINY), tmp_path, stock=True)
    training, held_out = started(plan, 3)
    assert training.stock is not None and held_out.stock is None and held_out.split == "held_out"
    assert training.stock.seed != started(plan, 4)[0].stock.seed  # type: ignore[union-attr]
    assert started(replace(plan, silent=True), 0)[0].stock is None
    assert started(replace(plan, stock=False), 0)[0].stock is None


@pytest.mark.skipif(shutil.which("flite") is None, reason="needs flite")
def test_a_record_of_a_stock_has_phonemes() -> None:
    flite = tuple(one for one in engine_voices() if one.voice.engine == "flite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(voices, "ENGINE_SHARES", {"flite": 1.0})
        drawn = replace(examples(), lesson_s=3.0, stock=Stock(flite, "0"))
        assert (drawn.record("echo", 0).phones > 0).any()
