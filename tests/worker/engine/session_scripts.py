"""Random sessions by seed, played alone or among others: opens, units, interrupts, pauses, new prompts, closes.

A script is a generator. It yields its session where other scripts may run, and continues when that session is idle; if
it yields None, it continues at any time. Its actions depend on its seed only.
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
    """A director that also interrupts sessions within a unit, at chosen tokens."""

    def __init__(self, **shares: float):
        super().__init__(**shares)
        self.interrupts: set[tuple[str, int, int]] = set()  # session, units decided, token index in the unit
        self.n_certain: dict[str, int] = {}  # events before a session was closed within a unit

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        if (session, job.session.n_decided, len(job.decoder.all_ids)) in self.interrupts:
            job.session.request_interrupt()
        return super().token_sampled(session, job, token)


def draw_config(rng: random.Random, speaks: bool) -> SessionConfig:
    """Random settings that fit the small engine."""
    return SessionConfig(
        generate_audio=speaks,
        compat=rng.choice(("fixed", "fixed", "reference")),
        ls_mode=rng.choice(("explicit", "explicit", "implicit")),
        force_listen_count=rng.choice((0, 0, 1)),
        max_new_speak_tokens_per_chunk=rng.choice((2, 5, 7)),
        max_chars_per_chunk=rng.choice((8, 28)),
        decode_mode=rng.choice(("sampling", "sampling", "greedy")),
        temperature=rng.choice((0.7, 1.3)),
        top_k=rng.choice((0, 20)),
        text_repetition_window_size=rng.choice((4, 512)),
        window=rng.choice(WINDOWS),
        early_sound=rng.random() < 0.6,
        drain_s=rng.choice((0, 2, 4)),
        seed=rng.randrange(2**64),
    )


def conversation(engine: SmallEngine, observer: Prompter, seed: int, n_units: int, speaks: bool) -> Script:
    """One session from open to close."""
    rng = random.Random(seed)
    config = draw_config(rng, speaks)
    name = f"session {seed}"
    prompts = [
        make_prompt(rng.choice(("Be kind.", "Be brief.")), rng.choice((None, 1, 2)), rng.choice((0, 1)))
        for _ in range(2)
    ]
    session = engine.open(name, config, prompts[0])
    yield session
    left = n_units
    while left > 0:
        draw = rng.random()
        if draw < 0.1:
            engine.sessions.break_speech(session)
        elif draw < 0.2:
            observer.interrupts.add((name, session.n_decided, rng.randrange(1, 4)))
        elif draw < 0.27:
            pause(engine, session)
            yield session
            engine.sessions.resume(session)
        elif draw < 0.32:
            engine.sessions.prepare(session, prompts[1])
            yield session
        for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
            send(engine, session, rng)
            left -= 1
        yield session
    if rng.random() < 0.3:  # closed within a unit; how many of its events were emitted depends on other sessions
        observer.n_certain[name] = len(engine.events[name])
        send(engine, session, rng)
        yield None
    engine.sessions.close(session)


def pause(engine: SmallEngine, session: Session) -> None:
    """Pause a session and check that it refuses a unit."""
    engine.sessions.pause(session)
    try:
        engine.send(session)
    except OrderError:
        return
    raise AssertionError(f"{session.id}: expected OrderError for a unit while paused, got none")


def send(engine: SmallEngine, session: Session, rng: random.Random) -> None:
    kind = rng.random()
    pictures = [rng.randrange(4) for _ in range(rng.choice((0, 0, 0, 1)))]
    if kind < 0.06:
        engine.send(session, None, pictures=pictures or [0])
    elif kind < 0.2:
        engine.send(session, rng.randrange(99), rng.choice((100, 7000, 24_000, 40_000)), pictures=pictures)
    else:
        engine.send(session, rng.randrange(99), pictures=pictures, force_listen=rng.random() < 0.12)


def play_alone(engine: SmallEngine, script: Script) -> None:
    for session in script:
        if session is None:
            engine.step()
        else:
            engine.settle()


def play_together(engine: SmallEngine, scripts: Sequence[Callable[[], Script]], choose: Callable[[int], int]) -> None:
    """Run all scripts at once, at most one per slot.

    choose: returns a number below its argument; it selects an idle script, a new one or an iteration of the loop.
    """
    waiting = list(scripts)
    running: dict[Script, Session | None] = {}
    while waiting or running:
        idle = [script for script, session in running.items() if session is None or is_idle(session)]
        can_begin = bool(waiting) and len(running) < engine.config.max_sessions
        choice = choose(1 + len(idle) + can_begin)
        if choice == 0:
            engine.step()
            continue
        script = idle[choice - 1] if choice <= len(idle) else waiting.pop(0)()
        try:
            running[script] = next(script)
        except StopIteration:
            del running[script]


def is_idle(session: Session) -> bool:
    return not (session.is_busy or session.waiting)
