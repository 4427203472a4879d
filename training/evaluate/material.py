"""The material: cases drawn from the grammar, the scenes and the rules of time, the same for each seed.

Phrases are held-out ones, unless `split` names those of training. Looks of scenes are drawn anew; training draws
others. Every microphone has noise, because training leaves digital silence nowhere.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np

from training.evaluate.acts import Act, Appear, Case, Idle, Say, Show
from training.grammar import camera, turns
from training.grammar.phrases import Split, fill, intents
from training.grammar.turns import Exchange, ToldFacts
from training.mind.voices import EngineVoice, engine_voices
from training.scenes.drawing import has_things
from training.scenes.labels import COLORS, DIGITS, SHAPES, Shown
from training.scenes.random_scenes import MANY_SHARE, draw_shown
from training.scenes.render import MIN_CONTRAST, Look, draw_look
from training.speech.voices import ENGINES, LEVEL, Engine, SpeechVoice
from training.timelines.speech import RATE, Samples, Synthesizer
from training.timelines.stage import PAUSE_S, pause_places
from training.timelines.timeline import View

QUIET_DB, NOISY_DB = 25, 15  # of speech above noise
PAUSE_SHARE = 0.35  # of sentences with a thinking pause
REQUESTS_PER_CASE = 6
SCENES_PER_CASE = 4
VOICED = ("training voices", "interruptions", "conversation")  # groups whose sound is judged
QUESTIONS = ("show_color", "show_shape", "show_digit", "show_count")
MIN_COUNTED = 10  # numbers of a reply that is interrupted
STOP_SHARE = 0.6  # of interruptions that ask to stop
UNSEEN_VOICES = (
    SpeechVoice("kal", "flite", "kal", 1.0),
    SpeechVoice("kal16", "flite", "kal16", 1.0),
    SpeechVoice("kal-diphone", "festival", "voice_kal_diphone", 1.0),
)


Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class Sizes:
    """How much is played: requests of each group, questions about scenes, watches, interruptions; minutes."""

    requests: Mapping[str, int]
    scenes: int
    watches: int
    unseen_watches: int  # in which the target never comes
    interruptions: int
    minutes: float


FULL = Sizes(
    {"training voices": 180, "unseen voice": 120, "15 dB noise": 120},
    scenes=160,
    watches=48,
    unseen_watches=6,
    interruptions=80,
    minutes=10,
)
QUICK = Sizes(
    {"training voices": 18, "unseen voice": 12, "15 dB noise": 12},
    scenes=16,
    watches=6,
    unseen_watches=1,
    interruptions=8,
    minutes=0,
)
# Of a gate that takes at most 20 s.
GATE = Sizes(
    {"training voices": 12, "unseen voice": 6, "15 dB noise": 0},
    scenes=4,
    watches=0,
    unseen_watches=0,
    interruptions=0,
    minutes=0,
)


@dataclass(frozen=True)
class Voices:
    """Synthesizers of the person by group of requests. Scenes and all else use those of training."""

    groups: Mapping[str, Sequence[Synthesizer]]

    @property
    def usual(self) -> Sequence[Synthesizer]:
        return self.groups["training voices"]

    @classmethod
    def of_engines(cls, cache: Path, engines: Collection[Engine] = ENGINES) -> "Voices":
        """The voices of engines. cache: folder that keeps their utterances."""
        usual = tuple(one for one in engine_voices(cache) if one.voice.engine in engines)
        unseen = tuple(EngineVoice(voice, cache) for voice in UNSEEN_VOICES if voice.engine in engines)
        return cls({"training voices": usual, "unseen voice": unseen, "15 dB noise": usual})


def draw_cases(
    sizes: Sizes, voices: Voices, seed: int, *, things: bool | None = None, split: Split = "held_out"
) -> list[Case]:
    """All cases of an evaluation.

    Args:
        things: whether the camera shows things; None: whether their font is installed.
        split: of the phrases.
    Raises: ModelError if an engine fails.
    """
    maker = CaseMaker(voices, seed, has_things() if things is None else things, split)
    cases = list(
        chain.from_iterable(maker.requests(group, n, group == "15 dB noise") for group, n in sizes.requests.items())
    )
    cases += maker.scenes(sizes.scenes)
    cases += [maker.watch(number, appears=True) for number in range(sizes.watches)]
    cases += [maker.watch(number, appears=False) for number in range(sizes.unseen_watches)]
    cases += [maker.interruption(number) for number in range(sizes.interruptions)]
    return cases


def draw_conversation(
    minutes: float, voices: Voices, seed: int, *, things: bool | None = None, split: Split = "held_out"
) -> Case:
    """One long conversation of one person: requests, pictures, watches, interruptions and silence.

    Arguments as for `draw_cases`.
    """
    maker = CaseMaker(voices, seed, has_things() if things is None else things, split)
    return maker.conversation(minutes)


class CaseMaker:
    """Draws cases. Each draws from a random generator of its own, so that numbers of cases change no other case."""

    def __init__(self, voices: Voices, seed: int, things: bool, split: Split):
        self._voices, self._seed, self._things, self._split = voices, seed, things, split

    def requests(self, group: str, n: int, is_noisy: bool) -> list[Case]:
        """Sessions of requests without a camera; what was told in a session is asked for in it."""
        cases = []
        for start in range(0, n, REQUESTS_PER_CASE):
            rng, name = self._rng(group, start)
            speaker, memory = rng.choice(self._voices.groups[group]), ToldFacts()
            acts = [
                self._say(rng, speaker, self._request(rng, memory)) for _ in range(min(REQUESTS_PER_CASE, n - start))
            ]
            cases.append(self._case(rng, name, "requests", group, acts, NOISY_DB if is_noisy else QUIET_DB))
        return cases

    def scenes(self, n: int) -> list[Case]:
        """Sessions of questions about pictures, each kind of question equally often."""
        cases = []
        for start in range(0, n, SCENES_PER_CASE):
            rng, name = self._rng("scene", start)
            speaker, acts = rng.choice(self._voices.usual), list[Act]()
            for number in range(start, min(start + SCENES_PER_CASE, n)):
                skill = QUESTIONS[number % len(QUESTIONS)]
                shown = self._shown_for(rng, skill)
                acts += [Show(self._view(rng, shown)), Idle(1)]
                acts.append(self._say(rng, speaker, self._question(rng, skill, shown)))
            cases.append(self._case(rng, name, "scenes", "scenes", acts))
        return cases

    def watch(self, number: int, *, appears: bool) -> Case:
        """A request to speak when something appears, other pictures, and the event. appears: False: it never comes."""
        rng, name = self._rng("watch" if appears else "watch-idle", number)
        speaker, target = rng.choice(self._voices.usual), self._target(rng)
        acts: list[Act] = [Show(self._view(rng, None, target.color)), Idle(1)]
        acts.append(self._say(rng, speaker, camera.draw_watch(rng, self._split, target)))
        for _ in range(rng.randint(2, 4) if appears else 12):
            view = self._view(rng, self._other(rng, target), target.color)
            acts += [Show(view), Idle(rng.randint(2, 5), watching=True)]
        if appears:
            acts.append(self._appear(rng, target))
        return self._case(rng, name, "watch", "watch", acts)

    def interruption(self, number: int) -> Case:
        """A request with a long reply, and an interruption of it."""
        rng, name = self._rng("interruption", number)
        speaker = rng.choice(self._voices.usual)
        return self._case(rng, name, "interruptions", "interruptions", self._interrupted(rng, speaker))

    def conversation(self, minutes: float) -> Case:
        rng, name = self._rng("conversation", 0)
        speaker, memory = self._voices.usual[0], ToldFacts()
        max_units = round(60 * minutes)
        acts: list[Act] = [Show(self._view(rng, None))]
        while 4 * len(acts) < max_units:  # an act with a reply takes more than four units
            match rng.choices(("request", "scene", "watch", "interruption", "idle"), (8, 4, 1, 2, 1))[0]:
                case "request":
                    acts.append(self._say(rng, speaker, self._request(rng, memory)))
                case "scene":
                    skill = rng.choice(QUESTIONS)
                    shown = self._shown_for(rng, skill)
                    acts += [
                        Show(self._view(rng, shown)),
                        self._say(rng, speaker, self._question(rng, skill, shown)),
                    ]
                case "watch":
                    target = self._target(rng)
                    acts.append(Show(self._view(rng, self._other(rng, target), target.color)))
                    acts.append(self._say(rng, speaker, camera.draw_watch(rng, self._split, target)))
                    acts += [Idle(rng.randint(2, 6)), self._appear(rng, target)]
                case "interruption":
                    acts += self._interrupted(rng, speaker)
                case _:
                    acts.append(Idle(rng.randint(5, 20)))
        return self._case(rng, name, "conversation", "conversation", acts, max_units=max_units)

    # --- parts ---------------------------------------------------------------------------------

    def _request(self, rng: random.Random, memory: ToldFacts) -> Exchange:
        return draw_request(rng, memory, self._split)

    def _question(self, rng: random.Random, skill: str, shown: Shown) -> Exchange:
        return question(rng, skill, shown, self._split)

    def _rng(self, kind: str, number: int) -> tuple[random.Random, str]:
        name = f"{kind.replace(' ', '-')}-{number}"
        return random.Random(f"evaluate {self._seed} {name}"), name

    def _case(
        self,
        rng: random.Random,
        name: str,
        part: str,
        group: str,
        acts: Sequence[Act],
        snr_db: float = QUIET_DB,
        max_units: int = 1_000_000,
    ) -> Case:
        """A case. Sound is judged in requests of the first group, interruptions and the conversation."""
        noise = LEVEL * 10 ** (-snr_db / 20)
        return Case(name, part, group, rng.getrandbits(31), tuple(acts), noise, max_units, group in VOICED)

    def _say(self, rng: random.Random, speaker: Synthesizer, turn: Exchange, after: int = 0, waits: bool = True) -> Say:
        sound = spoken(rng, speaker, turn.said, may_pause=not after)
        return Say(turn.skill, turn.said, sound, rng.random(), turn.text, after, waits)

    def _interrupted(self, rng: random.Random, speaker: Synthesizer) -> list[Act]:
        """A request for counting, and what the person says into the reply."""
        while True:
            long = turns.draw_counting(rng, self._split)
            if len(long.reply) >= MIN_COUNTED:
                break
        if rng.random() < STOP_SHARE:
            other = turns.draw_plain("stop", rng, self._split)
        else:
            other = rng.choice((turns.draw_arithmetic, turns.draw_small_talk))(rng, self._split)
        return [
            self._say(rng, speaker, long, waits=False),
            self._say(rng, speaker, other, after=rng.randint(1, 4)),
        ]

    def _appear(self, rng: random.Random, target: camera.Target) -> Appear:
        alert = camera.draw_alert(rng, target)
        return Appear(self._view(rng, camera.draw_match(rng, target)), target, alert.text)

    def _view(self, rng: random.Random, shown: Shown | None, avoided: str | None = None) -> View:
        """A view of something. avoided: a color that the background does not have."""
        levels = None if avoided is None else np.array(COLORS[avoided])

        def differs(look: Look) -> bool:
            return levels is None or int(np.abs(levels - look.background).max()) >= MIN_CONTRAST

        return View(shown, _until(lambda: draw_look(shown, rng), differs), 0)

    def _target(self, rng: random.Random) -> camera.Target:
        return _until(lambda: camera.draw_target(rng), lambda target: self._things or not target.is_thing)

    def _other(self, rng: random.Random, target: camera.Target) -> Shown | None:
        """A picture without the target, one of five with nothing but the background. Things have several colors."""
        if rng.random() < 0.2:
            return None
        has_color = target.color is not None
        return _until(
            lambda: draw_shown(rng, self._things),
            lambda shown: not target.matches(shown) and not (has_color and shown.kind == "thing"),
        )

    def _shown_for(self, rng: random.Random, skill: str) -> Shown:
        """A scene in which the question has an answer."""
        if skill == "show_digit":
            return Shown("digit", rng.choice(DIGITS), rng.choice(sorted(COLORS)))
        if skill == "show_shape":
            return Shown("shape", rng.choice(SHAPES), rng.choice(sorted(COLORS)))
        if skill == "show_count" and rng.random() > MANY_SHARE:
            return _until(lambda: draw_shown(rng, self._things), lambda one: one.count > 1)
        return _until(lambda: draw_shown(rng, self._things), lambda one: camera.fits(skill, one))


def draw_request(rng: random.Random, memory: ToldFacts, split: Split = "held_out") -> Exchange:
    """A request that needs no camera, as often of each kind as in training. Counting has at most ten numbers."""
    draws = [
        *turns.weighted_draws(rng, split, memory),
        (lambda: _until(lambda: turns.draw_counting(rng, split), lambda turn: len(turn.reply) <= 10), 1),
    ]
    (draw,) = rng.choices([one for one, _ in draws], [weight for _, weight in draws])
    return draw()


def question(rng: random.Random, skill: str, shown: Shown, split: Split = "held_out") -> Exchange:
    """This question about a picture."""
    said = fill(intents()[skill].draw(rng, split), plural=shown.plural, thing_name=shown.name)
    return Exchange(skill, said, (fill(intents()[skill].answer(rng), **camera.answers(skill, shown)),))


def spoken(rng: random.Random, speaker: Synthesizer, text: str, *, may_pause: bool) -> Samples:
    """The sound of a sentence, a third of them with a thinking pause where it is not complete yet."""
    words = text.split()
    cuts = pause_places(words) if may_pause and rng.random() < PAUSE_SHARE else []
    if not cuts:
        return speaker(text)
    cut = rng.choice(cuts)
    silence = np.zeros(round(rng.uniform(*PAUSE_S) * RATE), np.float32)
    return np.concatenate([speaker(" ".join(words[:cut])), silence, speaker(" ".join(words[cut:]))])


def _until(draw: Callable[[], Drawn], fits: Callable[[Drawn], bool]) -> Drawn:
    while not fits(drawn := draw()):
        pass
    return drawn
