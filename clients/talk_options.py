"""The command line of a talk: arguments, what fits together, settings of the session. Opens nothing."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clients.reply_sound import check_target
from models.errors import SettingsError
from worker.protocol.messages import SYSTEM_PROMPT, Spec

MAX_TAIL, MAX_DELAY_MS = 600, 10_000
PLAYER_DELAY_MS = 200


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m clients.talk",
        description="Talks to a server: a media file or the microphone goes in, the reply comes out.",
        epilog="Exit status: 0; 1 if the connection, the server or a unit failed; 2 if what was given cannot be used; "
        "130 if interrupted twice.",
    )
    parser.add_argument(
        "--url",
        default="ws://localhost:8006",
        help="ws:// or wss://host:port of a gateway, ws://host:port/ws/duplex of a worker, or a full path "
        "(default: %(default)s)",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", type=Path, metavar="FILE", help="what the model hears and sees: any media file")
    source.add_argument("--mic", action="store_true", help="talk yourself; use headphones; Ctrl-C ends it")
    parser.add_argument("--out", type=Path, metavar="WAV", help="the reply on the time line: 24 kHz, mono, 16 bits")
    parser.add_argument("--transcript", type=Path, metavar="JSON", help="units, turns, summary (default: beside --out)")
    parser.add_argument("--fast", action="store_true", help="a unit follows when the last is answered, not each second")
    parser.add_argument("--units", type=_at_least(1), metavar="N", help="hear no more of the input")
    parser.add_argument("--loop", action="store_true", help="begin the file anew at its end; Ctrl-C or --units ends it")
    parser.add_argument(
        "--tail",
        type=_at_least(0, MAX_TAIL),
        default=5,
        metavar="N",
        help="most silent units behind the file, to hear a turn out (default: %(default)s)",
    )
    parser.add_argument("--no-video", action="store_true", help="send no pictures")
    parser.add_argument(
        "--delay-ms",
        type=_at_least(0, MAX_DELAY_MS),
        default=PLAYER_DELAY_MS,
        metavar="N",
        help="how long a player waits before it starts (default: %(default)s)",
    )
    session = parser.add_argument_group("session")
    session.add_argument("--prompt", default=SYSTEM_PROMPT, metavar="TEXT", help="system text (default: %(default)s)")
    session.add_argument("--voice", type=Path, metavar="FILE", help="0.5 to 30 s of the voice to speak with")
    session.add_argument("--force-listen", type=_at_least(0), metavar="N", help="units at the start that only listen")
    session.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=VALUE",
        help="any setting of a session, as in temperature=0.5 or window.max_units=12; goes above the options",
    )
    session.add_argument("--session-id", metavar="NAME", help="default: a new one")
    wire = parser.add_argument_group("connection")
    form = wire.add_mutually_exclusive_group()
    form.add_argument(
        "--pcm16", dest="sound", action="store_const", const="pcm16", help="sound as bytes, if the server can (default)"
    )
    form.add_argument("--base64", dest="sound", action="store_const", const="base64", help="sound as text")
    parser.set_defaults(sound="pcm16")
    wire.add_argument(
        "--partial", action=argparse.BooleanOptionalAction, default=True, help="take sound as soon as there is some"
    )
    wire.add_argument("--insecure", action="store_true", help="wss: trust any certificate, such as a self-signed one")
    return parser


def _at_least(least: int, most: int | None = None) -> Any:
    def number(text: str) -> int:
        value = int(text)
        if value < least or (most is not None and value > most):
            bound = f"{least} or more" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected a whole number, {bound}, got {text}")
        return value

    number.__name__ = "whole number"  # argparse names it where it is none
    return number


def check(args: argparse.Namespace) -> None:
    """Fills in where the transcript goes. Raises: SettingsError for what does not fit together, and for no places."""
    for name in ("fast", "loop"):
        if args.mic and getattr(args, name):
            raise SettingsError(f"--{name}", expected="--input FILE", got="--mic")
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
    """What `prepare` takes in `config`; what it may be is for the server to say. Raises: SettingsError."""
    given: dict[str, Any] = {} if args.force_listen is None else {"force_listen_count": args.force_listen}
    return _with_pairs(given, args.set)


def spec(args: argparse.Namespace) -> Spec:
    """What goes beyond the plain protocol."""
    return Spec(partial_results=args.partial, sound_in=args.sound, sound_out=args.sound)


def _with_pairs(given: dict[str, Any], pairs: Sequence[str]) -> dict[str, Any]:
    """KNOB=VALUE over what is given. A value is JSON, or text where it is none; a dot leads into an object."""
    for pair in pairs:
        knob, equals, text = pair.partition("=")
        if not equals or not knob:
            raise SettingsError("--set", expected="KNOB=VALUE", got=repr(pair))
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        outer, dot, inner = knob.partition(".")
        if dot:
            held = given.get(outer)
            given[outer] = {**(held if isinstance(held, dict) else {}), inner: value}
        else:
            given[knob] = value
    return given
