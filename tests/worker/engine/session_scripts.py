"""Conversations by seed, to be played alone or among others: opens, units, breaks, pauses, new prompts, closes.

A script is a generator that yields its session wherever others may have their turn, and goes on once that is idle;
if it yields nothing, whenever it is asked to. What it does depends on its seed alone.
"""

import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

from tests.worker.loop.engines import Director, SmallEngine, make_prompt
from worker.config.session import SessionConfig, WindowConfig
from worker.loop.session import OrderError, Session

Script = Generator[Session | None, None, None]

WINDOWS = (
    WindowConfig(mode="off"),
    WindowConfig(mode="basic", high_tokens=60, low_tokens=40),
    WindowConfig(mode="basic", high_tokens=1, low_tokens=0),
    WindowConfig(mode="context", max_units=2, previous_max_tokens=12),
    WindowConfig(mode="context", max_units=1, previous_max_tokens=3, marker=""),
)


class Prompter(Director):
    """A director that breaks off speech in the middle of a unit too: at a token of the session's own."""

    def __init__(self, **shares: float):
        super().__init__(**shares)
        self.breaks: set[tuple[str, int, int]] = set()  # session, units decided, token of the unit
        self.n_certain: dict[str, int] = {}  # events of sessions that went away in the middle of a unit

    def token(self, session: str, job: Any, token: int) -> int:
        if (session, job.session.n_decided, len(job.talk.all_ids)) in self.breaks:
            job.session.break_asked = True
        return super().token(session, job, token)


def draw_config(luck: random.Random, speaks: bool) -> SessionConfig:
    """Knobs of every kind, and small enough for the small engine."""
    return SessionConfig(
        generate_audio=speaks,
        compat=luck.choice(("fixed", "fixed", "reference")),
        ls_mode=luck.choice(("explicit", "explicit", "implicit")),
        force_listen_count=luck.choice((0, 0, 1)),
        max_new_speak_tokens_per_chunk=luck.choice((2, 5, 7)),
        max_chars_per_chunk=luck.choice((8, 28)),
        decode_mode=luck.choice(("sampling", "sampling", "greedy")),
        temperature=luck.choice((0.7, 1.3)),
        top_k=luck.choice((0, 20)),
        text_repetition_window_size=luck.choice((4, 512)),
        window=luck.choice(WINDOWS),
        early_sound=luck.random() < 0.6,
        drain_s=luck.choice((0, 2, 4)),
        seed=luck.randrange(2**64),
    )


def conversation(engine: SmallEngine, observer: Prompter, seed: int, n_units: int, speaks: bool) -> Script:
    """One session from its opening to its end."""
    luck = random.Random(seed)
    config = draw_config(luck, speaks)
    name = f"session {seed}"
    prompts = [
        make_prompt(luck.choice(("Be kind.", "Be brief.")), luck.choice((None, 1, 2)), luck.choice((0, 1)))
        for _ in range(2)
    ]
    session = engine.open(name, config, prompts[0])
    yield session
    left = n_units
    while left > 0:
        luck_now = luck.random()
        if luck_now < 0.1:
            engine.sessions.break_speech(session)
        elif luck_now < 0.2:
            observer.breaks.add((name, session.n_decided, luck.randrange(1, 4)))
        elif luck_now < 0.27:
            pause(engine, session)
            yield session
            engine.sessions.resume(session)
        elif luck_now < 0.32:
            engine.sessions.prepare(session, prompts[1])
            yield session
        for _ in range(luck.choice((1, 1, 1, 1, 2, 3))):
            send(engine, session, luck)
            left -= 1
        yield session
    if luck.random() < 0.3:  # goes away in the middle of a unit; how much of it is heard depends on others
        observer.n_certain[name] = len(engine.events[name])
        send(engine, session, luck)
        yield None
    engine.sessions.close(session)


def pause(engine: SmallEngine, session: Session) -> None:
    """No unit is taken now."""
    engine.sessions.pause(session)
    try:
        engine.send(session)
    except OrderError:
        return
    raise AssertionError(f"{session.id}: expected OrderError for a unit while paused, got none")


def send(engine: SmallEngine, session: Session, luck: random.Random) -> None:
    kind = luck.random()
    pictures = [luck.randrange(4) for _ in range(luck.choice((0, 0, 0, 1)))]
    if kind < 0.06:
        engine.send(session, None, pictures=pictures or [0])
    elif kind < 0.2:
        engine.send(session, luck.randrange(99), luck.choice((100, 7000, 24_000, 40_000)), pictures=pictures)
    else:
        engine.send(session, luck.randrange(99), pictures=pictures, force_listen=luck.random() < 0.12)


def play_alone(engine: SmallEngine, script: Script) -> None:
    for session in script:
        if session is None:
            engine.step()
        else:
            engine.settle()


def play_together(engine: SmallEngine, scripts: Sequence[Callable[[], Script]], choose: Callable[[int], int]) -> None:
    """All scripts at once, at most as many as there are slots.

    choose: a number below its argument: which script goes on, or that the loop takes a step instead.
    """
    waiting = list(scripts)
    running: dict[Script, Session | None] = {}
    while waiting or running:
        idle = [script for script, session in running.items() if session is None or is_idle(session)]
        can_begin = bool(waiting) and len(running) < engine.config.max_sessions
        what = choose(1 + len(idle) + can_begin)
        if what == 0:
            engine.step()
            continue
        script = idle[what - 1] if what <= len(idle) else waiting.pop(0)()
        try:
            running[script] = next(script)
        except StopIteration:
            del running[script]


def is_idle(session: Session) -> bool:
    return not (session.is_busy or session.waiting)
