"""`python -m training.assemble --out assets/talker`: the talker's checkpoint of all trained parts, stored as int8.

Takes hearing, seeing and language from `--mind`, the speech model from `--speech`, and the vocoder, finished or in
parts, from `--weights`; a part that is not given has random weights. Prints the bytes of each part. Nothing is written
above MAX_BYTES.
"""

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from assets.released_layout import random_weights, write_text_files
from models.checkpoint.checksums import INDEX
from models.checkpoint.config import parse_config
from models.checkpoint.files import list_tensors
from models.errors import ModelError
from models.load import expected_tensors, load_model
from models.quantize import TOKEN2WAV, folder_bytes, write_folder_weights
from training.evaluate_vocoder import trained_networks
from training.export import write_vocoder
from training.loop import weights_file
from training.talker.sizes import MAX_BYTES, talker_config
from training.talker.tokenizer import talker_lexicon

SHARD_BYTES = 14_500_000  # of tensors; a file with its header stays below 15 MB
SPEECH_MODEL = "tts"
STAGE_OF_FILE = {
    "flow.pt": "flow",
    "hift.pt": "hift",
    "campplus.onnx": "speaker",
    "speech_tokenizer_v2_25hz.onnx": "tokenizer",
}


@dataclass(frozen=True)
class Sources:
    """Where the parts come from; None = random weights.

    Args:
        mind, speech: checkpoints of `training.mind.export`.
        vocoder: folder with the weights of the vocoder's stages, or the finished vocoder of a checkpoint.
    """

    mind: Path | None = None
    speech: Path | None = None
    vocoder: Path | None = None

    @property
    def has_finished_vocoder(self) -> bool:
        """Whether the vocoder is that of a checkpoint, which is copied."""
        return self.vocoder is not None and all((self.vocoder / file).exists() for file in STAGE_OF_FILE)

    def of(self, part: str) -> str:
        """The source of a part of the model or of the vocoder, in words."""
        if part in STAGE_OF_FILE.values():
            is_trained = self.has_finished_vocoder or (
                self.vocoder is not None and weights_file(self.vocoder, part).exists()
            )
            return str(self.vocoder) if is_trained else "random"
        folder = self.speech if part == SPEECH_MODEL else self.mind
        return "random" if folder is None else str(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint; an earlier one is replaced")
    parser.add_argument("--mind", type=Path, help="checkpoint of training.mind.export")
    parser.add_argument("--speech", type=Path, help="the same with a trained speech model")
    parser.add_argument("--weights", type=Path, help="folder of the vocoder's weights or files")
    args = parser.parse_args(argv)
    try:
        print(assemble(args.out, Sources(args.mind, args.speech, args.weights)))
    except (ModelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def assemble(out: Path, sources: Sources, max_bytes: int = MAX_BYTES) -> str:
    """Write the checkpoint. Returns: the table of its parts.

    Raises: ModelError for weights that do not fit the talker, for a folder above `max_bytes`, or if `out` is a folder
        of something else.
    """
    if out.exists() and any(out.iterdir()) and not (out / INDEX).exists():
        raise ModelError(str(out), expected="a checkpoint to replace, or no folder", got="other files")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        write_text_files(folder, talker_lexicon(), talker_config())
        if sources.vocoder is not None and sources.has_finished_vocoder:
            shutil.copytree(sources.vocoder, folder / TOKEN2WAV)
        else:
            write_vocoder(folder / TOKEN2WAV, *trained_networks(sources.vocoder), int8=True)
        write_folder_weights(folder, model_weights(sources).items(), shard_bytes=SHARD_BYTES)
        load_model(folder)
        table, total = size_table(folder, sources), folder_bytes(folder)
        if total > max_bytes:
            raise ModelError(f"bytes of the talker\n{table}\n", expected=f"at most {max_bytes:,}", got=f"{total:,}")
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)
    return table


def model_weights(sources: Sources) -> Mapping[str, Tensor]:
    """All tensors of the talker in the order of the module tree. Raises: ModelError for those of another model."""
    expected = expected_tensors(parse_config(talker_config()))
    is_whole = sources.mind is not None and sources.speech is not None
    weights = {} if is_whole else random_weights(talker_config(), talker_lexicon())
    for folder, is_taken in ((sources.mind, False), (sources.speech, True)):
        if folder is None:
            continue
        given = load_model(folder).state_dict()
        if (got := {name: tuple(tensor.shape) for name, tensor in given.items()}) != expected:
            wrong = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
            raise ModelError(str(folder), expected="the talker's tensors", got=f"others: {wrong[:5]}")
        weights |= {name: given[name] for name in given if name.startswith(f"{SPEECH_MODEL}.") == is_taken}
    return {name: kept_float(weights[name]) for name in expected}


def kept_float(tensor: Tensor) -> Tensor:
    """A matrix as it is; any other tensor in bfloat16, as `torch_dtype` of the configuration says."""
    return tensor if tensor.ndim > 1 else tensor.to(torch.bfloat16)


def size_table(folder: Path, sources: Sources) -> str:
    """Bytes and source of each part, as Markdown."""
    parts: Counter[str] = Counter()
    for tensor in list_tensors(folder)[0]:
        parts[tensor.name.split(".")[0]] += tensor.n_bytes
    for file, stage in STAGE_OF_FILE.items():
        parts[stage] = (folder / TOKEN2WAV / file).stat().st_size
    rows = [(part, sources.of(part), n_bytes) for part, n_bytes in parts.items()]
    total = folder_bytes(folder)
    rows += [("tokenizer files, index, headers", "", total - parts.total()), ("sum", "", total)]
    return "\n".join(["| part | source | MB |", "|---|---|---|", *lines(rows)])


def lines(rows: list[tuple[str, str, int]]) -> Iterator[str]:
    return (f"| {part} | {source} | {n_bytes / 1e6:.2f} |" for part, source, n_bytes in rows)
