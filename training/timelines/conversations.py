"""Random conversations on a stage: who says what, when it is interrupted, what the camera shows.

`draw_timeline` gives one conversation of a length; the same seed gives the same conversation.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from models.inputs.tokens import SpecialTokens
from training.grammar import camera, turns
from training.grammar.phrases import Split
from training.grammar.turns import Exchange, ToldFacts
from training.scenes.labels import Shown, watched_class
from training.scenes.random_scenes import draw_movement, draw_shown
from training.scenes.render import draw_look
from training.timelines.pacing import Encode
from training.timelines.recurring import WINDOW, Recurring
from training.timelines.speech import Synthesizer
from training.timelines.stage import Stage, answer_unit, heard_in
from training.timelines.timeline import FORCED_UNITS, Timeline, View

BACKCHANNELS = ("mhm", "uh huh", "right", "yes", "ah", "oh")
RECENT_S = 12.0  # earlier pictures that the model did not name are asked for within this time
LONG_IDLE_UNITS = (10, 60)
LATE_CAMERA = 0.4  # of conversations with a camera: it is off at first
CAMERA_S = (0.5, 3.0)  # after the camera is turned on or off
PHRASES_OF_A_LABEL = 2  # at a time, where phrases recur: questions about one label of pictures


@dataclass(frozen=True)
class Habits:
    """How often things happen: shares between 0 and 1, but for `watching` and `view_s`.

    pause: of sentences with a thinking pause. interruption, backchannel: of replies. camera: of conversations that may
    have one, of which LATE_CAMERA begin without. watching: weight of a request to watch for something; other actions
    with a camera have 0.4 to 4, and turning it on has more the larger this is. While the model
    watches: looking: share of actions that show a new picture or end the watching; target: share of those that show
    the target or end the watching. view_s: least and most seconds of a picture.
    """

    pause: float = 0.35
    interruption: float = 0.25
    backchannel: float = 0.15
    camera: float = 0.5
    long_idle: float = 0.04
    watching: float = 1.0
    looking: float = 0.75
    target: float = 0.35
    view_s: tuple[float, float] = (1.0, 4.0)


WATCHFUL = Habits(camera=1.0, watching=10.0, target=0.25)
# Many decisions about new pictures, of which few show the target, in little time.
GLANCING = Habits(camera=1.0, watching=40.0, looking=0.95, target=0.15, view_s=(0.6, 1.6))


@dataclass
class _State:
    """What the conversation is at. now: time from which on the next thing may happen."""

    now: float
    memory: ToldFacts = field(default_factory=ToldFacts)
    has_camera: bool = False
    shown: Shown | None = None
    before: Shown | None = None
    before_until: float = 0.0
    is_quiet: bool = False
    target: camera.Target | None = None


class RandomConversation:
    """One conversation. `run` plays actions until a length is reached."""

    def __init__(
        self,
        rng: random.Random,
        encode: Encode,
        special: SpecialTokens,
        synthesize: Synthesizer,
        *,
        split: Split = "train",
        things: bool = True,
        habits: Habits | None = None,
        phrases: Recurring | None = None,
        views: Recurring | None = None,
    ):
        """
        Args:
            encode, special: of the checkpoint's tokenizer.
            synthesize: the person's voice.
            split: phrases that the person uses.
            things: the camera shows things, which need a font.
            phrases, views: where what is said and shown recurs.
        """
        self._phrases, self._views = phrases or Recurring(), views or Recurring()
        self._rng, self._split, self._things = rng, split, things
        self._habits = habits or Habits()
        self._stage = Stage(rng, encode, special, synthesize, self._phrases)
        self._state = _State(now=rng.uniform(0.3, 3.0))
        self._may_see = rng.random() < self._habits.camera
        if self._may_see and rng.random() >= LATE_CAMERA:
            self._turn_camera_on(0)

    def run(self, seconds: float) -> Timeline:
        """The conversation, about as long as this."""
        while self._state.now < seconds:
            self.act()
        return self._stage.build(self._state.now)

    def act(self) -> None:
        """One random action."""
        state = self._state
        if state.is_quiet and self._rng.random() < 0.35:
            self._exchange(self._plain("speak_again"))
            return
        if state.has_camera and state.target is not None and self._rng.random() < self._habits.looking:
            # Most new pictures do not show it: a model that names every new picture would be wrong.
            if self._rng.random() < self._habits.target:
                self._see_target()
            else:
                self._change_view()
            return
        if self._rng.random() < self._habits.long_idle:
            state.now += self._rng.randint(*LONG_IDLE_UNITS)
            return
        actions: list[tuple[Callable[[], None], float]] = [
            (self._talk, 6),
            (self._count, 1),
            (self._ask_camera, 4 if state.has_camera else 0.4),
            (self._quiet, 0.3),
            (self._idle, 1),
        ]
        if self._may_see and not state.has_camera:
            actions.append((self._turn_camera_on, 0.6 * self._habits.watching + 4))
        if state.has_camera:
            actions += [(self._change_view, 1.5), (self._watch_motion, 1), (self._ask_before, 0.8)]
            actions.append((self._turn_camera_off, 0.4))
            if state.target is None and not state.is_quiet:
                actions.append((self._watch, self._habits.watching))
        (action,) = self._rng.choices([one for one, _ in actions], [weight for _, weight in actions])
        action()

    # --- actions -------------------------------------------------------------------------------

    def _talk(self) -> None:
        def draws(rng: random.Random) -> list[tuple[Callable[[], Exchange], float]]:
            # There is nothing to stop: no answer.
            stop = (lambda: turns.draw_plain("stop", rng, self._split), 0.3)
            return [*turns.weighted_draws(rng, self._split, self._state.memory), stop]

        weights = [weight for _, weight in draws(self._rng)]
        (number,) = self._rng.choices(range(len(weights)), weights)
        self._exchange(self._drawn(f"talk {number}", lambda source: draws(source)[number][0]()))

    def _count(self) -> None:
        turn = self._drawn("count", lambda source: turns.draw_counting(source, self._split))
        self._exchange(turn, interruption=1.0 if turn.skill == "count_freely" else 0.5)

    def _ask_camera(self) -> None:
        state = self._state
        if state.has_camera and (state.shown is None or self._rng.random() < 0.6):
            self._change_view()
        if state.has_camera and state.shown is None:
            skill = self._rng.choice(("show_thing", "show_color"))
            self._exchange(self._drawn(skill, lambda source: camera.draw_nothing(source, self._split, skill)))
        else:
            window = WINDOW if state.shown is None else PHRASES_OF_A_LABEL
            kind, draw = f"ask {state.shown}", lambda source: camera.draw_question(source, self._split, state.shown)
            self._exchange(self._drawn(kind, draw, window))

    def _turn_camera_on(self, unit: int | None = None) -> None:
        """From `unit` on, None: the next one, the camera shows its surroundings, or in half of the cases an object.

        In unit 0 it shows the surroundings.
        """
        source = self._views.source("view", self._rng)
        shown = None if unit == 0 or source.random() < 0.5 else draw_shown(source, self._things)
        if self._state.target is not None and self._state.target.matches(shown):
            return
        self._state.has_camera = True
        self._show(shown, heard_in(self._state.now) + 1 if unit is None else unit, source)
        if unit is None:
            self._state.now += self._rng.uniform(*CAMERA_S)

    def _turn_camera_off(self) -> None:
        unit = heard_in(self._state.now) + 1
        self._remember_view(unit)
        self._stage.show(None, unit)
        self._state.has_camera, self._state.shown = False, None
        self._state.now += self._rng.uniform(*CAMERA_S)

    def _change_view(self) -> None:
        """Show something else, or nothing, from the next unit on."""
        source = self._views.source("view", self._rng)
        shown = None if source.random() < 0.15 else draw_shown(source, self._things)
        if self._state.target is not None and self._state.target.matches(shown):
            return
        self._show(shown, heard_in(self._state.now) + 1, source)
        self._state.now += self._rng.uniform(*self._habits.view_s)

    def _watch_motion(self) -> None:
        """Something crosses the picture; then the person asks where it went."""
        source = self._views.source("motion", self._rng)
        n_units = source.randint(3, 6)
        movement = draw_movement(source, n_units, self._things)
        if self._state.target is not None and self._state.target.matches(movement.shown):
            return
        start = heard_in(self._state.now) + 1
        self._remember_view(start)
        look = draw_look(movement.shown, source)
        self._stage.show(View(movement.shown, look, start, movement), start)
        self._state.shown = movement.shown
        self._state.now = start + n_units - self._rng.uniform(0.0, 1.0)
        asked = self._phrases.source(f"motion {movement.shown.name}", self._rng, PHRASES_OF_A_LABEL)
        self._exchange(camera.draw_motion(asked, self._split, movement.shown, movement.motion))

    def _ask_before(self) -> None:
        state = self._state
        is_known = state.before is not None and state.now - state.before_until < RECENT_S
        if is_known or state.before is None:
            asked = self._phrases.source("before", self._rng)
            self._exchange(camera.draw_shown_before(asked, self._split, state.before))

    def _watch(self) -> None:
        source = self._phrases.source("watch", self._rng)
        target = camera.draw_target(source)
        if not self._things and target.is_thing:
            return
        if target.matches(self._state.shown):
            self._show(None, heard_in(self._state.now) + 1)
            self._state.now += 1.0
        self._exchange(camera.draw_watch(source, self._split, target), interruption=0.0)
        self._state.target = target
        self._stage.watch(watched_class(target.color, target.name), self._stage.next_free)

    def _see_target(self) -> None:
        """What is watched for appears and the model speaks, or the person calls it off."""
        state, target = self._state, self._state.target
        assert target is not None
        state.target = None
        if self._rng.random() < 0.15:
            end = self._exchange(self._plain("watch_cancel"), interruption=0.0)
            self._stage.watch(0, answer_unit(end))
            return
        unit = max(heard_in(state.now) + 1, FORCED_UNITS, self._stage.next_free)
        shown = camera.draw_match(self._rng, target)
        self._show(shown, unit)
        self._stage.watch(0, unit + 1)
        if state.is_quiet:
            state.now = unit + 2.0
            return
        alert = camera.draw_alert(self._rng, target)
        _, state.now = self._stage.speak(alert.reply, unit, alert.skill)
        state.now += self._gap()

    def _quiet(self) -> None:
        if not self._state.is_quiet:
            self._exchange(self._plain("quiet"), interruption=0.0)
            self._state.is_quiet = True

    def _idle(self) -> None:
        self._state.now += self._rng.uniform(2, 9)

    # --- exchanges -----------------------------------------------------------------------------

    def _exchange(self, turn: Exchange, interruption: float | None = None) -> float:
        """The person says something and the model answers, unless it is to be quiet.

        Args:
            interruption: share of such replies that are interrupted; None: by habit.
        Returns: the end of what the person says.
        """
        rng, state, habits = self._rng, self._state, self._habits
        end = self._stage.hear(turn.said, state.now, turn.skill, habits.pause)
        if state.is_quiet and turn.skill == "speak_again":
            state.is_quiet = False
        elif state.is_quiet or not turn.reply:
            state.now = end + self._gap()
            return end
        first = max(answer_unit(end), self._stage.next_free)
        last, until = self._stage.speak(turn.reply, first, turn.skill)
        share = habits.interruption if interruption is None else interruption
        if last > first and rng.random() < share:
            self._interrupt(first, last)
        else:
            if until - first > 3 and rng.random() < habits.backchannel:
                self._stage.hear(rng.choice(BACKCHANNELS), rng.uniform(first + 1.2, until - 1.0), "backchannel")
            # A quick person begins before the sound of the reply ends; its text has ended by then.
            state.now = max(until + self._gap(), last + 1.0)
        return end

    def _drawn(self, kind: str, draw: Callable[[random.Random], Exchange], window: int = WINDOW) -> Exchange:
        """A turn of a kind, whose phrase may recur; its answer is drawn anew."""
        source = self._phrases.source(kind, self._rng, window)
        turn = draw(source)
        return turn if source is self._rng else turns.answered_anew(turn, self._rng)

    def _plain(self, skill: str) -> Exchange:
        return self._drawn(skill, lambda source: turns.draw_plain(skill, source, self._split))

    def _interrupt(self, first: int, last: int) -> None:
        """The person speaks while text is left: to stop it, or to say something else."""
        # From the first sound of the reply on, to the latest moment that is noticed in its last unit.
        start = self._rng.uniform(first + 1.0, last + 0.69)
        if not self._stage.interrupt(start):
            raise ValueError(f"interruption at {start:.1f} s: expected text until unit {last}")
        self._state.now = start
        if self._rng.random() < 0.6:
            self._exchange(self._plain("stop"))
        else:
            self._talk()

    def _gap(self) -> float:
        """Seconds until the next utterance; below zero the person is quick."""
        return self._rng.choice((self._rng.uniform(-0.3, 0.6), self._rng.expovariate(1 / 1.5), self._rng.uniform(1, 5)))

    # --- views ---------------------------------------------------------------------------------

    def _show(self, shown: Shown | None, unit: int, source: random.Random | None = None) -> None:
        self._remember_view(unit)
        self._stage.show(View(shown, draw_look(shown, source or self._rng), unit), unit)
        self._state.shown = shown

    def _remember_view(self, until: int) -> None:
        """Keep what was shown up to a unit as the picture before."""
        if self._state.shown is not None:
            self._state.before, self._state.before_until = self._state.shown, float(until)


def draw_timeline(
    seed: int,
    seconds: float,
    encode: Encode,
    special: SpecialTokens,
    synthesize: Synthesizer,
    *,
    split: Split = "train",
    things: bool = True,
    habits: Habits | None = None,
    phrases: Recurring | None = None,
    views: Recurring | None = None,
) -> Timeline:
    """A conversation of about this length. Arguments as for `RandomConversation`."""
    rng = random.Random(f"{split} {seed}")
    conversation = RandomConversation(
        rng, encode, special, synthesize, split=split, things=things, habits=habits, phrases=phrases, views=views
    )
    return conversation.run(seconds)
