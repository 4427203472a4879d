"""Removes keys and secrets from text for logs and errors. Torch-free.

Every key and secret of this server has one of the prefixes below, so that its form is known.
"""

import re

KEY_PREFIX = "duo_"  # of API keys
SECRET_PREFIX = "ek_"  # of ephemeral secrets
LINK_PREFIX = "link_"  # of links to the pages
_KEY = re.compile(rf"\b({KEY_PREFIX}|{SECRET_PREFIX}|{LINK_PREFIX})[A-Za-z0-9_-]{{16,}}")


def scrubbed(text: str) -> str:
    """The text with the random part of every key and secret replaced by `...`."""
    return _KEY.sub(r"\1...", text)
