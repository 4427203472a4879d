"""What a `.pt` file has instead of a state dict, from the errors of `torch.load`."""

import re
from pickle import UnpicklingError

_NAME = re.compile(r"GLOBAL ([\w.]+)|(?:class|function|type)\W+([\w.]+)")


def pt_failure(error: Exception) -> str:
    """What was found, without torch's advice to load the file with its check of code switched off.

    Args:
        error: of `torch.load` with `weights_only`.
    """
    if not isinstance(error, UnpicklingError):
        return str(error).partition("\n")[0]
    found = _NAME.search(str(error).partition("\n")[2])
    name = next(filter(None, found.groups()), "") if found else ""
    return f"a file that may run code{f' ({name})' if name else ''}, which is not loaded"
