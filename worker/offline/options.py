"""The command line of a file's run: arguments to settings of an engine and of its one session. Torch-free."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.errors import SettingsError
from models.sampling.settings import check_number
from worker.config.compile import CompileConfig
from worker.config.session import EngineConfig, SessionConfig
from worker.describe import shown
from worker.offline.reply import PLAYER_DELAY_MS

ROOT = Path(__file__).parents[2]
TINY = ROOT / "assets" / "tiny"
DEFAULT_SOUND = ROOT / "assets" / "ref_audio" / "default.wav"
SYSTEM = "Streaming Omni Conversation."
MAX_TAIL = 600
MAX_DELAY_MS = 10_000


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m worker.offline", description="UnitDecoder to a media file, second by second, at full speed."
    )
    parser.add_argument("file", help="what the model hears and sees: anything ffmpeg reads")
    parser.add_argument("--out", metavar="WAV", help="the reply on the file's time line: 24 kHz, mono, 16 bits")
    parser.add_argument("--transcript", metavar="JSON", help="settings, turns and units")
    parser.add_argument(
        "--delay-ms",
        type=int,
        default=PLAYER_DELAY_MS,
        metavar="N",
        help="how long a player waits before it starts, so that sound does not break off (default: %(default)s)",
    )
    parser.add_argument("--timings", action="store_true", help="with times in the transcript, which differ every time")
    parser.add_argument(
        "--tail",
        type=int,
        default=5,
        metavar="N",
        help="most silent units behind the file, to hear a turn out (default: %(default)s)",
    )
    parser.add_argument("--max-units", type=int, metavar="N", help="hear no more of the file")
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--model", default=str(TINY), metavar="DIR", help="checkpoint folder or model id (default: %(default)s)"
    )
    engine.add_argument("--token2wav", metavar="DIR", help="vocoder folder (default: the checkpoint's own)")
    engine.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:0 (default: %(default)s)")
    engine.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    engine.add_argument("--compile", action="store_true", help="run under torch.compile, on a GPU from captured graphs")
    engine.add_argument("--cuda-graphs", choices=["auto", "on", "off"], default="auto", help="capture them, or not")
    session = parser.add_argument_group("session")
    session.add_argument("--system", default=SYSTEM, metavar="TEXT", help="system text (default: %(default)s)")
    session.add_argument(
        "--ref-audio",
        default=str(DEFAULT_SOUND),
        metavar="SOUND",
        help="0.5 to 30 s of the voice to speak with (default: %(default)s)",
    )
    session.add_argument("--voice-cache", metavar="DIR", help="keep prepared voices here")
    session.add_argument("--seed", type=int, default=0, metavar="N", help="of all draws (default: %(default)s)")
    session.add_argument("--greedy", action="store_true", help="always the best text token")
    session.add_argument("--euler-steps", type=int, metavar="N", help="solver steps of the flow")
    session.add_argument("--window", choices=["off", "basic", "context"], help="what leaves the context")
    session.add_argument("--max-slice-nums", type=int, metavar="N", help="slices of a large picture")
    session.add_argument("--compat", choices=["fixed", "reference"], help="reference: as the public implementation")
    session.add_argument("--force-listen", type=int, metavar="N", help="units at the start that only listen")
    session.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting of a session, value in JSON, as in window.max_units=12; goes above the options",
    )
    return parser


def check(args: argparse.Namespace) -> None:
    """What no config knows. Raises: SettingsError."""
    check_number("--tail", args.tail, at_least=0, at_most=MAX_TAIL, whole=True)
    check_number("--delay-ms", args.delay_ms, at_least=0, at_most=MAX_DELAY_MS, whole=True)


def session_config(args: argparse.Namespace) -> SessionConfig:
    """Raises: SettingError naming every knob that does not exist or is outside its range; SettingsError for no JSON."""
    options = {
        "seed": args.seed,
        "decode_mode": "greedy" if args.greedy else None,
        "euler_steps": args.euler_steps,
        "window": args.window and {"mode": args.window},
        "max_slice_nums": args.max_slice_nums,
        "compat": args.compat,
        "force_listen_count": args.force_listen,
    }
    given = {knob: value for knob, value in options.items() if value is not None}
    return SessionConfig(**_with_pairs(given, args.set))


def engine_config(args: argparse.Namespace, session: SessionConfig) -> EngineConfig:
    """An engine for this one session. Raises: SettingError."""
    steps = {} if session.euler_steps is None else {"euler_steps": session.euler_steps}
    return EngineConfig(
        model_path=args.model,
        token2wav_path=args.token2wav,
        device=args.device,
        dtype=args.dtype,
        max_sessions=1,
        session=session,
        snapshots=0,
        seed=args.seed,
        compile=CompileConfig(enabled=args.compile, cuda_graphs=args.cuda_graphs),
        **steps,
    )


def _with_pairs(given: dict[str, Any], pairs: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE laid over what is given; a key with a dot is one of a group's."""
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise SettingsError("--set", expected="KEY=VALUE", got=shown(pair))
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            expected = """a value in JSON, such as 5, true, null or "text\""""
            raise SettingsError(f"--set {key}", expected=expected, got=shown(text)) from None
        key, dot, knob = key.partition(".")
        if dot:
            value = {knob: value}
        held = given.get(key)
        both = isinstance(held, dict) and isinstance(value, dict)
        given[key] = {**held, **value} if both else value
    return given
