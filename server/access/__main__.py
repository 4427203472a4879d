"""`python -m server.access`: makes, lists and removes API keys. A new key is printed once and only its hash is stored.

A running gateway reads the file again within a second. Exit status: 0; 2 for invalid arguments or settings.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from models.errors import ModelError, SettingsError
from server.access.keys import KeyFile, api_keys_of, hash_of, key_file
from worker.config.access import ApiKeyEntry
from worker.config.service import Config, load_config
from worker.key_text import new_key

USAGE = 2


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m server.access", description="API keys of the gateway.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file; default: config.json at the root")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add", help="make a key and print it once")
    add.add_argument("name", help="its name in lists and logs")
    add.add_argument("--admin", action="store_true", help="the key may change what concerns everyone")
    add.add_argument("--sessions", type=int, metavar="N", help="sessions at once")
    add.add_argument("--requests-per-day", type=int, metavar="N", help="requests a day")
    add.add_argument("--minutes-per-day", type=float, metavar="N", help="minutes of sessions a day")
    add.add_argument("--model", action="append", metavar="NAME", help="a model it may use; default: all")
    add.add_argument("--print-only", action="store_true", help="print an entry for service.api_keys, store nothing")
    commands.add_parser("list", help="list the keys")
    remove = commands.add_parser("remove", help="remove a key of the file")
    remove.add_argument("name", help="its name")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        config, _ = load_config(args.config, flags={}, environ=os.environ)
        file = key_file(config)
        if args.command == "add":
            _add(args, config, file)
        elif args.command == "list":
            _list(config, file)
        else:
            _remove(args.name, file)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return USAGE
    return 0


def _add(args: argparse.Namespace, config: Config, file: KeyFile) -> None:
    if any(key.name == args.name for key in api_keys_of(config).all):
        raise SettingsError("name", expected="a name that no key has", got=args.name)
    key = new_key()
    entry = ApiKeyEntry(
        name=args.name,
        hash=hash_of(key),
        admin=args.admin,
        sessions=args.sessions,
        requests_per_day=args.requests_per_day,
        minutes_per_day=args.minutes_per_day,
        models=None if args.model is None else tuple(args.model),
    )
    if args.print_only:
        print(json.dumps(entry.model_dump(mode="json", exclude_defaults=True)))
    else:
        file.write([*file.read(), entry])
        print(f"stored in {file.path}; this is the only time that the key is shown:", file=sys.stderr)
    print(key)


def _list(config: Config, file: KeyFile) -> None:
    stored = {entry.name for entry in file.read()}
    for key in api_keys_of(config).all:
        limits = [
            f"{number:g} {what}"
            for number, what in (
                (key.limits.sessions, "sessions at once"),
                (key.limits.requests_per_day, "requests a day"),
                (key.limits.minutes_per_day, "minutes a day"),
            )
            if number is not None
        ]
        models = [] if key.models is None else [f"models {', '.join(sorted(key.models))}"]
        role = "admin" if key.is_admin else "key"
        source = file.path.name if key.name in stored else "settings"
        print("  ".join((key.name, role, source, *limits, *models)))


def _remove(name: str, file: KeyFile) -> None:
    entries = file.read()
    kept = [entry for entry in entries if entry.name != name]
    if len(kept) == len(entries):
        raise SettingsError("name", expected=f"a key of {file.path}", got=name)
    file.write(kept)


if __name__ == "__main__":
    sys.exit(main())
