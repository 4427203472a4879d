"""The command line of an offline run, and the engine and session settings it stands for. Torch-free."""

import argparse
from pathlib import Path
from typing import Any, get_args

from models.checkpoint.embedded import DEFAULT
from models.checkpoint.precision import Weights
from models.errors import SettingsError
from models.sampling.settings import check_number
from worker.config.compile import CompileConfig
from worker.config.pairs import with_pairs
from worker.config.session import EngineConfig, SessionConfig
from worker.transcript.timeline import MAX_DELAY_MS, MAX_TAIL, PLAYER_DELAY_MS

ROOT = Path(__file__).parents[2]
DEFAULT_SOUND = ROOT / "assets" / "ref_audio" / "default.wav"
SYSTEM = "Streaming Omni Conversation."


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker.offline",
        description="Runs a conversation with a media file as input, unit by unit, at full speed.",
    )
    parser.add_argument(
        "file", nargs="?", help="the input: any sound or video file that ffmpeg reads, no still picture"
    )
    replay = parser.add_argument_group("replay", "instead of a media file; takes --model, --token2wav and --device")
    replay.add_argument("--replay", metavar="TRACE", help="run a traced session again and compare each unit")
    replay.add_argument(
        "--strip", metavar="TRACE", help="with --replay: only write a copy without sound, pictures, voices and texts"
    )
    replay.add_argument(
        "--first", action="store_true", help="with --replay: end after the first unit whose ids or sound differ"
    )
    parser.add_argument("--out", metavar="WAV", help="write the reply on the file's time line: 24 kHz, mono, 16 bits")
    parser.add_argument("--transcript", metavar="JSON", help="write settings, turns and units")
    parser.add_argument(
        "--delay-ms",
        type=int,
        default=PLAYER_DELAY_MS,
        metavar="N",
        help="delay of the player before sound that follows silence, which avoids gaps (default: %(default)s)",
    )
    parser.add_argument("--timings", action="store_true", help="add times to the transcript; they differ between runs")
    parser.add_argument(
        "--tail",
        type=int,
        default=5,
        metavar="N",
        help="most silent units after the file, until a turn ends (default: %(default)s)",
    )
    parser.add_argument("--max-units", type=int, metavar="N", help="most units of the file")
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--model",
        default=str(ROOT / DEFAULT),
        metavar="DIR",
        help="checkpoint folder or model id (default: %(default)s)",
    )
    engine.add_argument("--token2wav", metavar="DIR", help="vocoder folder (default: the checkpoint's own)")
    engine.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:0 (default: %(default)s)")
    engine.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    engine.add_argument(
        "--weights", default="bf16", choices=get_args(Weights), help="of linear layers (default: %(default)s)"
    )
    engine.add_argument(
        "--compile", action="store_true", help="compile the model first, which takes minutes; default: off"
    )
    engine.add_argument("--cuda-graphs", choices=["auto", "on", "off"], default="auto", help="capture CUDA graphs")
    session = parser.add_argument_group("session")
    session.add_argument("--system", default=SYSTEM, metavar="TEXT", help="system text (default: %(default)s)")
    session.add_argument(
        "--ref-audio",
        default=str(DEFAULT_SOUND),
        metavar="SOUND",
        help="0.5 to 30 s of the voice to speak with (default: %(default)s)",
    )
    session.add_argument("--voice-cache", metavar="DIR", help="folder to cache prepared voices in")
    session.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all sampling (default: %(default)s)")
    session.add_argument("--greedy", action="store_true", help="always the most likely text token")
    session.add_argument("--euler-steps", type=int, metavar="N", help="solver steps of the flow")
    session.add_argument("--window", choices=["off", "basic", "context"], help="what is evicted when the context grows")
    session.add_argument("--max-slice-nums", type=int, metavar="N", help="most slices of a large picture")
    session.add_argument("--compat", choices=["fixed", "reference"], help="reference: as the public implementation")
    session.add_argument("--force-listen", type=int, metavar="N", help="first units, which only listen")
    session.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting of a session, the value in JSON, such as window.max_units=12; overrides the options",
    )
    return parser


def check(args: argparse.Namespace) -> None:
    """Check the arguments that are not settings. Raises: SettingsError."""
    if (args.file is None) == (args.replay is None):
        raise SettingsError("input", expected="a media file or --replay", got="both" if args.file else "neither")
    for name in ("strip", "first"):
        if getattr(args, name) and not args.replay:
            raise SettingsError(f"--{name}", expected="--replay with it", got="none")
    check_number("--tail", args.tail, at_least=0, at_most=MAX_TAIL, whole=True)
    check_number("--delay-ms", args.delay_ms, at_least=0, at_most=MAX_DELAY_MS, whole=True)


def session_config(args: argparse.Namespace) -> SessionConfig:
    """The session's settings. Raises: SettingError for every invalid one; SettingsError for an invalid `--set`."""
    options = {
        "seed": args.seed,
        "decode_mode": "greedy" if args.greedy else None,
        "euler_steps": args.euler_steps,
        "window": args.window and {"mode": args.window},
        "max_slice_nums": args.max_slice_nums,
        "compat": args.compat,
        "force_listen_count": args.force_listen,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return SessionConfig(**with_pairs(given, args.set, plain_text=False))


def engine_config(args: argparse.Namespace, session: SessionConfig) -> EngineConfig:
    """The settings of an engine with this one session. Raises: SettingError."""
    steps: dict[str, Any] = {} if session.euler_steps is None else {"euler_steps": session.euler_steps}
    return EngineConfig(
        model_path=args.model,
        token2wav_path=args.token2wav,
        device=args.device,
        dtype=args.dtype,
        weights=args.weights,
        max_sessions=1,
        session=session,
        snapshots=0,
        seed=args.seed,
        compile=CompileConfig(enabled=args.compile, cuda_graphs=args.cuda_graphs),
        **steps,
    )
