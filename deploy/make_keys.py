"""New keys and secrets of one installation: `python3 deploy/make_keys.py`. Needs Python 3.11 or newer, and no package.

Writes `deploy/.env`, which compose reads, and `deploy/secrets/prometheus.key`, and prints the administrator's key,
which is stored nowhere. With `--kubernetes` it writes no file and prints a Secret for `kubectl apply -f -`; the
administrator's key then goes to the standard error.
"""

import argparse
import hashlib
import json
import os
import secrets
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
KEY_BYTES = 32


def make() -> tuple[dict[str, str], str, str]:
    """The variables of gateway and workers, the administrator's key, and the key of Prometheus."""
    keys = {name: f"duo_{secrets.token_urlsafe(KEY_BYTES)}" for name in ("admin", "prometheus")}
    entries = [
        {"name": name, "hash": f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"} for name, key in keys.items()
    ]
    entries[0]["admin"] = True
    variables = {
        "DUOLOGUE_SERVICE_API_KEYS": json.dumps(entries),
        "DUOLOGUE_WORKER_SECRET": secrets.token_urlsafe(KEY_BYTES),
    }
    return variables, keys["admin"], keys["prometheus"]


def write_files(folder: Path) -> str:
    """Write both files below `folder`, readable by their owner. Returns: the administrator's key.

    Raises: FileExistsError, before anything is written.
    """
    env, key_file = folder / ".env", folder / "secrets" / "prometheus.key"
    for path in (env, key_file):
        if path.exists():
            raise FileExistsError(path)
    variables, admin, prometheus = make()
    variables["GF_SECURITY_ADMIN_PASSWORD"] = secrets.token_urlsafe(KEY_BYTES)
    key_file.parent.mkdir(exist_ok=True)
    _write(env, "".join(f"{name}='{value}'\n" for name, value in variables.items()), 0o600)
    # Prometheus runs as another user in its container.
    _write(key_file, prometheus, 0o644)
    return admin


def secret(name: str) -> tuple[dict, str]:
    """A Secret of Kubernetes, and the administrator's key."""
    variables, admin, prometheus = make()
    data = {**variables, "prometheus.key": prometheus}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}, admin


def _write(path: Path, text: str, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        file.write(text)
    path.chmod(mode)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 deploy/make_keys.py", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--kubernetes", action="store_true", help="print a Secret and write no file")
    parser.add_argument("--name", default="duologue", metavar="NAME", help="of the Secret; default: %(default)s")
    args = parser.parse_args(argv)
    if args.kubernetes:
        manifest, admin = secret(args.name)
        print(json.dumps(manifest, indent=2))
        print(f"the administrator's key, shown once: {admin}", file=sys.stderr)
        return 0
    try:
        admin = write_files(FOLDER)
    except FileExistsError as error:
        print(f"error: {error}: expected no such file, got one; remove it to make new keys", file=sys.stderr)
        return 2
    print("wrote deploy/.env and deploy/secrets/prometheus.key")
    print(f"the administrator's key, shown once: {admin}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
