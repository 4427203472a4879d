"""Which model paths are model ids of the Hugging Face hub. Torch-free; contacts no network."""

import re
from pathlib import Path
from typing import Annotated

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)


class HubIdAllowed:
    """Annotation of a path setting that also takes a model id of the hub."""


ModelPath = Annotated[Path, HubIdAllowed()]
OptionalModelPath = Annotated[Path | None, HubIdAllowed()]


def hub_id(path: str | Path, base: Path | None = None) -> str | None:
    """The model id `owner/name` that `path` is, or None if it is a path.

    An existing file or folder is a path, and so is everything that is absolute or does not have exactly two parts.

    Args:
        base: folder that a relative path starts at; None: the working directory.
    """
    text = Path(path).as_posix() if isinstance(path, Path) else path
    if not HUB_ID.fullmatch(text) or (base or Path()).joinpath(text).exists():
        return None
    return text
