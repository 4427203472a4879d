"""The command line of `clients.talk`: arguments, their checks, the settings of the session. Opens no files."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clients.half_duplex import half_duplex_settings
from clients.reply_sound import check_target
from models.errors import SettingsError
from worker.config.pairs import with_pairs
from worker.key_text import CLIENT_KEY_VARIABLE
from worker.protocol.half_duplex_messages import DEFAULTS, HalfDuplexSettings
from worker.protocol.messages import SYSTEM_PROMPT, Spec
from worker.protocol.wire import WireError
from worker.transcript.timeline import MAX_DELAY_MS, MAX_TAIL, PLAYER_DELAY_MS

DUPLEX_MODE, HALF_DUPLEX_MODE = "duplex", "half_duplex"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m clients.talk",
        description="Holds a conversation with a server. The input is a media file or the microphone.",
        epilog="Exit status: 0; 1 if the connection, the server or a unit failed; 2 for invalid arguments or input; "
        "130 if interrupted twice.",
    )
    parser.add_argument(
        "--url",
        default="ws://localhost:8006",
        help="ws:// or wss://host:port of a gateway, ws://host:port/ws/duplex of a worker, or a full path "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--mode",
        choices=(DUPLEX_MODE, HALF_DUPLEX_MODE),
        default=DUPLEX_MODE,
        help="duplex: both speak at any time; half_duplex: the server answers when the user has spoken",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", type=Path, metavar="FILE", help="the input: a sound or video file, no still picture")
    source.add_argument("--mic", action="store_true", help="use the microphone as input; use headphones; Ctrl-C ends")
    parser.add_argument(
        "--out", type=Path, metavar="WAV", help="write the reply on the time line: 24 kHz, mono, 16 bits"
    )
    parser.add_argument(
        "--transcript", type=Path, metavar="JSON", help="write units, turns, summary (default: beside --out)"
    )
    parser.add_argument("--fast", action="store_true", help="send a unit when the last is answered, not each second")
    parser.add_argument("--units", type=_at_least(1), metavar="N", help="most units of the input")
    parser.add_argument("--loop", action="store_true", help="restart the file at its end; Ctrl-C or --units ends")
    parser.add_argument(
        "--tail",
        type=_at_least(0, MAX_TAIL),
        default=5,
        metavar="N",
        help="most silent units after the file, until a turn ends (default: %(default)s)",
    )
    parser.add_argument("--no-video", action="store_true", help="send no pictures")
    parser.add_argument(
        "--delay-ms",
        type=_at_least(0, MAX_DELAY_MS),
        default=PLAYER_DELAY_MS,
        metavar="N",
        help="delay of the player before sound that follows silence (default: %(default)s)",
    )
    session = parser.add_argument_group("session")
    session.add_argument("--prompt", default=SYSTEM_PROMPT, metavar="TEXT", help="system text (default: %(default)s)")
    session.add_argument("--voice", type=Path, metavar="FILE", help="0.5 to 30 s of the voice to speak with")
    session.add_argument("--force-listen", type=_at_least(0), metavar="N", help="first units, which only listen")
    session.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any setting of a session, such as temperature=0.5 or window.max_units=12; overrides the options",
    )
    session.add_argument("--session-id", metavar="NAME", help="default: a new one")
    wire = parser.add_argument_group("connection")
    form = wire.add_mutually_exclusive_group()
    form.add_argument(
        "--pcm16", dest="sound", action="store_const", const="pcm16", help="send and receive sound as bytes (default)"
    )
    form.add_argument(
        "--base64", dest="sound", action="store_const", const="base64", help="send and receive sound as text"
    )
    parser.set_defaults(sound="pcm16")
    wire.add_argument(
        "--partial",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="receive sound before its unit is complete",
    )
    wire.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="continue the conversation after a lost connection, where the server keeps it",
    )
    wire.add_argument("--trace", action="store_true", help="ask the server for a trace of the session: docs/traces.md")
    wire.add_argument(
        "--key", metavar="KEY", help=f"API key of the server (default: the environment variable {CLIENT_KEY_VARIABLE})"
    )
    wire.add_argument("--insecure", action="store_true", help="wss: accept any certificate, such as a self-signed one")
    return parser


def _at_least(low: int, high: int | None = None) -> Callable[[str], int]:
    """An argparse type for whole numbers from `low` to `high`."""

    def number(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            bound = f"{low} or more" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"expected a whole number, {bound}, got {text}")
        return value

    number.__name__ = "whole number"  # argparse's name for the type in errors
    return number


def check(args: argparse.Namespace) -> None:
    """Check the arguments together and set the default of --transcript. Raises: SettingsError."""
    for name in ("fast", "loop"):
        if args.mic and getattr(args, name):
            raise SettingsError(f"--{name}", expected="--input FILE", got="--mic")
    if args.mode == HALF_DUPLEX_MODE:
        for name, given in (("fast", args.fast), ("force-listen", args.force_listen is not None)):
            if given:
                raise SettingsError(f"--{name}", expected=f"--mode {DUPLEX_MODE}", got=f"--mode {args.mode}")
    if args.out is not None and args.transcript is None:
        args.transcript = args.out.with_suffix(".json")
    taken = {path.resolve(): path for path in (args.input, args.voice) if path is not None}
    for path in (args.out, args.transcript):
        if path is None:
            continue
        check_target(path)
        if path.resolve() in taken:
            raise SettingsError(str(path), expected="a file of its own", got=f"the same as {taken[path.resolve()]}")
        taken[path.resolve()] = path


def session_config(args: argparse.Namespace) -> dict[str, Any]:
    """The `config` of `prepare`; the server checks its values. Raises: SettingsError for an invalid --set."""
    given: dict[str, Any] = {} if args.force_listen is None else {"force_listen_count": args.force_listen}
    return with_pairs(given, args.set, plain_text=True)


def turn_settings(args: argparse.Namespace) -> HalfDuplexSettings:
    """The `config` of a half-duplex `prepare`. Raises: SettingsError for an invalid --set."""
    groups = HalfDuplexSettings.model_fields
    given = with_pairs({}, args.set, plain_text=True)
    for group, values in given.items():
        known = getattr(DEFAULTS, group).__class__.model_fields if group in groups else {}
        names = values if isinstance(values, dict) else {"": values}
        if unknown := [name for name in names if name not in known]:
            expected = ", ".join(
                f"{one}.{name}" for one in groups for name in type(getattr(DEFAULTS, one)).model_fields
            )
            raise SettingsError("--set", expected=f"one of {expected}", got=f"{group}.{unknown[0]}".rstrip("."))
    try:
        return half_duplex_settings(given)
    except WireError as error:
        raise SettingsError("--set", expected="values within their range", got=str(error)) from None


def spec(args: argparse.Namespace) -> Spec:
    """The options beyond the plain protocol."""
    return Spec(
        partial_results=args.partial,
        sound_in=args.sound,
        sound_out=args.sound,
        resume=args.resume,
        trace=args.trace,
    )
