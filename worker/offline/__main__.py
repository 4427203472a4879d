"""`python -m worker.offline assets/warmup.mp4 --out reply.wav`: a media file through the engine.

With `--replay`, a traced session instead of a file. Exit status: 0; 1 if a unit or the engine failed, or if the replay
differs; 2 for invalid arguments or input; 130 if interrupted. Output files are
written at the end, each completely or not at all.
"""

import argparse
import io
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from models.atomic_file import check_target, write_atomically
from models.errors import ModelError, NumericsError
from models.token2wav.prompt.sound_file import write_sound
from models.token2wav.voice.voice import Voice
from worker.assembly.parts import device_type
from worker.assembly.talker_session import with_talker_session
from worker.config.session import EngineConfig, SessionConfig
from worker.engine import Engine
from worker.engine_thread import EngineError
from worker.loop.prompt.system_prompt import SystemPrompt
from worker.loop.results import Failure
from worker.media import MediaUnits, read_units
from worker.offline import reply as offline_reply
from worker.offline import table as offline_table
from worker.offline.options import check, engine_config, parser, session_config
from worker.offline.replay import replay
from worker.offline.reply import UnitOutcome
from worker.offline.run import OfflineSession
from worker.start.voices import ReferenceSound, Voices

INTERRUPTED = 130


@dataclass(frozen=True)
class OfflineRun:
    """A finished conversation. model: device and dtype, for the transcript. load_s, prepare_s, units_s: durations."""

    outcomes: list[UnitOutcome]
    model: dict[str, Any]
    load_s: float
    prepare_s: float
    units_s: float

    @property
    def n_failed(self) -> int:
        return sum(isinstance(one.event, Failure) for one in self.outcomes)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Write each row at once, also into a pipe, and replace characters that the terminal cannot encode.
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    try:
        return _run(args)
    except ModelError as error:
        _note(f"error: {error}")
        return 1 if isinstance(error, (EngineError, NumericsError)) else 2
    except KeyboardInterrupt:
        _note("interrupted")
        return INTERRUPTED


def _run(args: argparse.Namespace) -> int:
    check(args)
    if args.replay:
        return replay(args, _note)
    config = engine_config(args, session_config(args))
    config = with_talker_session(config, device_type(config.device))
    session = config.session
    _check_targets(args)
    units = read_units(args.file, max_units=args.max_units)
    reference = ReferenceSound.read(args.ref_audio)
    run = _converse(args, config, session, units, reference)
    for name, write in ((args.out, _write_sound), (args.transcript, _write_transcript)):
        try:
            if name:
                write(args, session, run)
        except OSError as error:
            _note(f"error: {name}: expected a place for a file, got {error.strerror}")
            return 1
    _summarize(run)
    return 1 if run.n_failed else 0


def _check_targets(args: argparse.Namespace) -> None:
    """Check that the output files can be written and are not the input. Raises: ModelError."""
    taken = {os.path.realpath(name): name for name in (args.file, args.ref_audio)}
    for name in filter(None, (args.out, args.transcript)):
        try:
            target = str(check_target(Path(name)))
        except OSError as error:
            raise ModelError(name, expected="a place for a file", got=error.strerror) from None
        if target in taken:
            raise ModelError(name, expected="a file of its own", got=f"the same as {taken[target]}")
        taken[target] = name


def _converse(
    args: argparse.Namespace,
    config: EngineConfig,
    session: SessionConfig,
    units: MediaUnits,
    reference: ReferenceSound,
) -> OfflineRun:
    if session.early_unit != "off":
        _note("note: early_unit has no effect: a file's sound comes in whole seconds")
    started = time.perf_counter()
    with Engine.build(config) as engine:
        loaded = time.perf_counter()
        voice = _voice(args, engine, session, reference)
        conversation = OfflineSession(engine, session, SystemPrompt.of(args.system, reference.audio_16k(), voice))
        prepared = time.perf_counter()
        outcomes = []
        with tqdm(total=_n_units(units), desc="units", unit="unit", disable=None) as bar:
            bar.write(offline_table.header())
            for one in conversation.hear(units, args.tail):
                outcomes.append(one)
                bar.write(offline_table.row(one))
                bar.update()
        done = time.perf_counter()
    model = engine.parts.model
    described = {"device": model.device.type, "dtype": str(model.dtype).removeprefix("torch.")}
    return OfflineRun(outcomes, described, loaded - started, prepared - loaded, done - prepared)


def _voice(args: argparse.Namespace, engine: Engine, session: SessionConfig, reference: ReferenceSound) -> Voice | None:
    if not session.generate_audio:
        return None
    if not engine.has_vocoder:
        _note("no vocoder: the reply is text without sound")
        return None
    cache = args.voice_cache and Path(args.voice_cache)
    voices = Voices(engine.config.token2wav_folder, device=engine.device, cache=cache)
    voice = voices.of(reference)
    if voices.problem:
        _note(f"voice not cached: {voices.problem}")
    return voice


def _n_units(units: MediaUnits) -> int | None:
    """The total of the progress bar on a terminal: decoding the sound alone is fast. None if unknown."""
    if not sys.stderr.isatty() or not units.has_sound:
        return units.max_units
    return sum(1 for _ in read_units(units.path, frames_per_second=0, max_units=units.max_units))


def _write_sound(args: argparse.Namespace, session: SessionConfig, run: OfflineRun) -> None:
    write_sound(args.out, torch.from_numpy(offline_reply.sound(run.outcomes, args.delay_ms)))


def _write_transcript(args: argparse.Namespace, session: SessionConfig, run: OfflineRun) -> None:
    head = {
        "file": Path(args.file).name,
        "model": Path(args.model).resolve().name,
        "ref_audio": Path(args.ref_audio).name,
        "system": args.system,
        **run.model,
        "compile": args.compile,
        "cuda_graphs": args.cuda_graphs,
        "tail": args.tail,
        "delay_ms": args.delay_ms,
        "session": session.model_dump(mode="json"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }
    document = offline_reply.transcript(run.outcomes, head, args.delay_ms)
    if args.timings:
        document["timings"] = {
            "load_s": run.load_s,
            "prepare_s": run.prepare_s,
            "units_s": run.units_s,
            "units_ms": offline_reply.times(run.outcomes),
        }
    write_atomically(Path(args.transcript), offline_reply.to_json(document))


def _summarize(run: OfflineRun) -> None:
    n, n_turns = len(run.outcomes), len(offline_reply.turns(run.outcomes))
    _note(
        f"[{n} units, {n_turns} turns, {run.n_failed} failed: load {run.load_s:.2f} s, prepare {run.prepare_s:.2f} s, "
        f"units {run.units_s:.2f} s, {n / run.units_s:.2f} times real time]"
    )


def _note(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
