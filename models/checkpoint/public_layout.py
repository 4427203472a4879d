"""How the `config.json` of a folder says that other programs have packed its matrices: AWQ or GPTQ. Torch-free."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models.checkpoint.config import read_json
from models.errors import CheckpointError


@dataclass(frozen=True)
class PublicLayout:
    """How a folder's matrices are packed. group: columns with one scale, -1 for all; zero_plus: added to zeros."""

    method: Literal["awq", "gptq"]
    group: int
    zero_plus: int = 0

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ("qweight", "qzeros", "scales") if self.method == "awq" else ("qweight", "qzeros", "scales", "g_idx")


def public_layout(folder: Path) -> PublicLayout | None:
    """What `config.json` declares; None without a declaration or without the file.

    Raises: CheckpointError for another method, another number of bits, or groups that are not a number.
    """
    file = folder / "config.json"
    declared = read_json(file).get("quantization_config") if file.exists() else None
    if declared is None:
        return None
    given = declared if isinstance(declared, dict) else {}
    method, bits, group = given.get("quant_method"), given.get("bits"), given.get("group_size", -1)
    where = f"{file}: quantization_config"
    if method not in ("awq", "gptq") or bits != 4:
        got = f"{method} with {bits} bits" if given else declared
        raise CheckpointError(where, expected="awq or gptq with 4 bits", got=got)
    if type(group) is not int or not (group == -1 or group > 0):
        expected = "a number of columns with one scale, or -1 for all"
        raise CheckpointError(f"{where}: group_size", expected=expected, got=repr(group))
    if method == "awq":
        if (version := str(given.get("version", "gemm")).lower()) != "gemm":
            raise CheckpointError(where, expected="version gemm", got=version)
        return PublicLayout("awq", group)
    form = given.get("checkpoint_format", given.get("format", "gptq"))
    if form not in ("gptq", "gptq_v2"):
        raise CheckpointError(where, expected="checkpoint_format gptq or gptq_v2", got=form)
    return PublicLayout("gptq", group, zero_plus=1 if form == "gptq" else 0)
