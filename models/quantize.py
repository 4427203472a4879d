"""`python -m models.quantize SRC DST --weights int8`: a checkpoint folder with matrices stored as int8, fp8 or int4.

Any start loads the result as it loads the source. The index declares the format and has the sizes and checksums of all
files; `python -m models.quantize --check DIR` compares them.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.checkpoint.checksums import FILES, INDEX, check_files, file_facts, files_in
from models.checkpoint.config import load_config
from models.checkpoint.files import FLOAT_BYTES, list_tensors, read_pt, read_tensors
from models.checkpoint.index import DECLARATION, DECLARED_AS, declaration
from models.checkpoint.packing import packed
from models.checkpoint.precision import PRESETS, Kind
from models.checkpoint.quantized import KINDS
from models.errors import CheckpointError, ModelError, SettingsError
from models.load import renamed
from models.token2wav.load.parts import FLOW, HIFT, HIFT_ORIGINAL

TOKEN2WAV = Path("assets") / "token2wav"
SHARD_BYTES = 2_000_000_000
# Parts of the vocoder that stay as they are: they determine pitch and phase.
VOCODER_KEPT = ("f0_predictor.", "m_source.", "conv_post.")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m models.quantize", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "source", type=Path, metavar="SRC", help="checkpoint folder; the folder to compare with --check"
    )
    parser.add_argument("result", type=Path, metavar="DST", nargs="?", help="new folder")
    parser.add_argument(
        "--check", action="store_true", help="compare the files of SRC with its checksums; write nothing"
    )
    parser.add_argument(
        "--keep", action="append", default=[], metavar="PREFIX", help="tensors that stay floats; may be repeated"
    )
    parser.add_argument(
        "--weights",
        choices=KINDS,
        default="int8",
        help="int8: all matrices and the vocoder; fp8, int4: what model.weights quantises (default: %(default)s)",
    )
    parser.add_argument(
        "--shard-bytes", type=int, default=SHARD_BYTES, metavar="N", help="most bytes of a file (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.check == (args.result is not None):
        parser.error("expected SRC and DST, or --check and SRC alone")
    try:
        if args.check:
            check_files(args.source)
            print(f"{args.source}: all files are as the index lists them")
        else:
            quantize_folder(args.source, args.result, args.weights, keep=args.keep, shard_bytes=args.shard_bytes)
            print(f"{args.result}: {folder_bytes(args.source):,} -> {folder_bytes(args.result):,} bytes")
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def quantize_folder(
    source: Path, result: Path, kind: Kind = "int8", *, keep: Iterable[str] = (), shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a folder with quantised matrices, streamed: at most one shard is in memory.

    int8 stores all matrices and the vocoder; tensors whose rows are short stay floats, and so do HiFT's pitch and
    output layers. fp8 and int4 store the linear layers that `model.weights` quantises, and all else unchanged. Files
    without weights and the ONNX files are copied. The index is written last, so that an unfinished folder does not
    load.

    Args:
        source: checkpoint folder with float weights.
        result: folder that does not exist or is empty.
        kind: what the index declares; an int4 folder has int8 matrices too (`models.checkpoint.precision`).
        keep: prefixes of names that stay floats.
        shard_bytes: most bytes of a file, unless one tensor takes more.
    Raises: CheckpointError for a source that is damaged, not of floats or not finite, and for a result with files or in
        the source; ConfigError; SettingsError for a prefix of no name. The result is as before then.
    """
    _check_apart(source, result)
    if shard_bytes < 1:
        raise SettingsError("shard_bytes", expected="at least 1", got=shard_bytes)
    load_config(source)
    stored, problems = list_tensors(source)
    problems += [
        f"{one.name}: expected one of {sorted(FLOAT_BYTES)}, got {one.dtype}"
        for one in stored
        if one.dtype not in FLOAT_BYTES
    ]
    if problems:
        raise CheckpointError(str(source), expected="a checkpoint of floats", got="; ".join(problems))
    if result.exists() and any(result.iterdir()):
        raise CheckpointError(str(result), expected="an empty folder or none", got="a folder with files")
    kept = tuple(keep)
    vocoder = _vocoder_files(source / TOKEN2WAV) if kind == "int8" else {}
    _check_kept(kept, [one.name for one in stored], vocoder)
    weights = ((one.name, tensor) for one, tensor in read_tensors(stored) if isinstance(tensor, Tensor))
    with _removed_on_failure(result):
        _copy_others(source, result)
        for file, prefixes in vocoder.items():
            write_packed_pt(result / TOKEN2WAV / file.name, read_pt(file), (*kept, *prefixes))
        write_folder_weights(result, weights, kind, keep=kept, shard_bytes=shard_bytes)


def write_folder_weights(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    kind: Kind = "int8",
    *,
    keep: tuple[str, ...] = (),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write shards with quantised matrices, then the index with the declaration and the checksums of all other files.

    Shards are filled in the order of the weights.
    """
    shards: list[list[str]] = []
    total = 0
    shard: dict[str, Tensor] = {}

    def write() -> None:
        save_file(shard, folder / f"part-{len(shards) + 1:05d}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in weights:
        entry = {name: tensor.contiguous()} if name.startswith(keep) else _packed(name, tensor, kind)
        n_bytes = sum(one.nbytes for one in entry.values())
        if shard and sum(one.nbytes for one in shard.values()) + n_bytes > shard_bytes:
            write()
        shard |= entry
        total += n_bytes
    if shard:
        write()
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number:05d}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    metadata = {"total_size": total, DECLARED_AS: declaration(kind), FILES: file_facts(folder)}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _packed(name: str, tensor: Tensor, kind: Kind) -> dict[str, Tensor]:
    if kind == "int8":
        return packed(name, tensor)
    own = PRESETS[kind].kind_of(renamed(name), tuple(tensor.shape))
    return {name: tensor.contiguous()} if own is None else packed(name, tensor, own)


def write_packed_pt(file: Path, tensors: Mapping[str, Tensor], keep: tuple[str, ...] = ()) -> None:
    """Write a `.pt` file whose matrices are int8, with its declaration. keep: prefixes of names that stay floats."""
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        state |= {name: tensor.contiguous()} if name.startswith(keep) else packed(name, tensor)
    torch.save({DECLARED_AS: DECLARATION, "state_dict": state}, file)


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in files_in(folder))


def _copy_others(source: Path, result: Path) -> None:
    """Copy every file that has no weights to store as int8."""
    for file in files_in(source):
        place = file.relative_to(source)
        if place.name != INDEX and (place.suffix != ".safetensors" or place.parent != Path()):
            (result / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, result / place)


def _vocoder_files(folder: Path) -> dict[Path, tuple[str, ...]]:
    """The vocoder's files with matrices, flow and HiFT, and the prefixes of each that stay floats; none without one."""
    hift = HIFT_ORIGINAL if (folder / HIFT_ORIGINAL).exists() else HIFT
    kept = (*VOCODER_KEPT, *(f"generator.{name}" for name in VOCODER_KEPT))
    return {folder / name: prefixes for name, prefixes in ((FLOW, ()), (hift, kept)) if (folder / name).exists()}


def _check_apart(source: Path, result: Path) -> None:
    """Raises: CheckpointError for folders of which one contains the other; results would be copied as sources."""
    inner, outer = result.resolve(), source.resolve()
    if inner.is_relative_to(outer) or outer.is_relative_to(inner):
        raise CheckpointError(str(result), expected=f"a folder neither in {outer} nor around it", got=inner)


def _check_kept(keep: tuple[str, ...], names: list[str], vocoder: Iterable[Path]) -> None:
    """Raises: SettingsError for a prefix that no name of a tensor has, those of the vocoder's files included."""
    if missing := [prefix for prefix in keep if not any(name.startswith(prefix) for name in names)]:
        others = [name for file in vocoder for name in read_pt(file)]
        for prefix in missing:
            if not any(name.startswith(prefix) for name in others):
                raise SettingsError("keep", expected="prefixes of tensors' names", got=f"{prefix}, which none has")


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """A context that makes a folder or fills an empty one, and undoes both if it fails."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for one in folder.iterdir():
            shutil.rmtree(one) if one.is_dir() else one.unlink()
        if is_new:
            folder.rmdir()
        raise


if __name__ == "__main__":
    sys.exit(main())
