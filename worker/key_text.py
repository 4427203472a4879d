"""The form of keys and secrets: making keys, and removing keys from text for logs and errors. Torch-free.

Every key and secret of this server has one of the prefixes below, so that it is recognized in any text.
"""

import re
import secrets

KEY_PREFIX = "duo_"  # of API keys
SECRET_PREFIX = "ek_"  # of ephemeral secrets
LINK_PREFIX = "link_"  # of links to the pages
KEY_BYTES = 32
KEYS_FILE = "api_keys.json"  # below `service.data_dir`
CLIENT_KEY_VARIABLE = "DUOLOGUE_API_KEY"  # the key that a client of this package sends
START_KEY_VARIABLE = "DUOLOGUE_START_KEY"  # the key that the launcher makes for one run
WORKER_SECRET_VARIABLE = "DUOLOGUE_WORKER_SECRET"  # shared by gateway and workers of one launcher
WORKER_SECRET_HEADER = "x-duologue-worker-secret"
_KEY = re.compile(rf"\b({KEY_PREFIX}|{SECRET_PREFIX}|{LINK_PREFIX})[A-Za-z0-9_-]{{16,}}")


def new_key() -> str:
    """A new key of 256 random bits."""
    return f"{KEY_PREFIX}{secrets.token_urlsafe(KEY_BYTES)}"


def scrubbed(text: str) -> str:
    """The text with the random part of every key and secret replaced by `...`."""
    return _KEY.sub(r"\1...", text)
