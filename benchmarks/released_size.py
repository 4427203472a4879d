"""`python -m benchmarks.released_size DIR`: a checkpoint folder of the released size with random weights, 19 GB.

For benchmarks of programs that load from disk. Tokenizer, image settings and the networks that prepare voices are those
of the embedded checkpoint; every network that runs in a conversation has its released size. With `--model speech` the
folder has Qwen3-TTS 1.7B CustomVoice with the embedded checkpoint's tokenizer, 4.5 GB.
"""

import argparse
import itertools
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from assets import build_tiny_speech as speech
from assets import build_tiny_vocoder as vocoder
from models.layers.weights import on_meta, tensor_shapes
from models.qwen3_tts.codec.load import TOKENIZER_FOLDER, SpeechTokenizer
from models.qwen3_tts.codec.random_weights import RELEASED_TOKENIZER, mean_and_std
from models.qwen3_tts.config import parse_qwen3_tts_config
from models.qwen3_tts.load import talker_tensors
from models.qwen3_tts.random_weights import released_config
from models.token2wav.settings import FlowConfig, HiftConfig

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "assets" / "tiny"
NAMES, CONFIG = ROOT / "tests/data/released_state_dict.tsv", ROOT / "tests/data/released_config.json"
SHARD_BYTES = 4 * 2**30
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the released checkpoint: name and shape."""
    for line in NAMES.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line:
            continue
        pattern, shape = line.split("\t")
        sizes = tuple(int(size) for size in shape.split("x"))
        places = RANGE.findall(pattern)
        for numbers in itertools.product(*(range(int(first), int(last) + 1) for first, last in places)):
            name = pattern
            for number in numbers:
                name = RANGE.sub(str(number), name, count=1)
            yield name, sizes


def draw(name: str, shape: tuple[int, ...], device: str, generator: torch.Generator) -> torch.Tensor:
    """Weights that keep the variance of activations; norms near one, biases near zero."""
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if name.endswith("original0"):
        return tensor.fill_(1.0)
    if tensor.ndim == 1:
        return tensor.normal_(0.0 if "bias" in name else 1.0, 0.02, generator=generator)
    return tensor.normal_(0.0, 1 / math.sqrt(math.prod(shape[1:])), generator=generator)


def write_model(folder: Path, device: str) -> None:
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    n_shards = total = 0

    def flush() -> None:
        nonlocal n_shards
        n_shards += 1
        name = f"model-{n_shards:05d}.safetensors"
        save_file(shard, folder / name)
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in tensors():
        shard[name] = draw(name, shape, device, generator).cpu()
        total += shard[name].nbytes
        if sum(tensor.nbytes for tensor in shard.values()) > SHARD_BYTES:
            flush()
    flush()
    document = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document), encoding="utf-8")
    shutil.copy(CONFIG, folder / "config.json")
    for path in TINY.glob("*"):
        if path.is_file() and path.name not in {"config.json", *index.values()} and "model" not in path.name:
            shutil.copy(path, folder / path.name)


def write_vocoder(folder: Path) -> None:
    shutil.copytree(TINY / "assets" / "token2wav", folder)
    flow = FlowConfig(speaker_dim=vocoder.SPEAKER_DIM)  # of the small networks that prepare voices
    (folder / "flow.yaml").write_text(vocoder.flow_yaml(flow), encoding="utf-8")
    torch.save(vocoder.plain_weights("flow", vocoder.on_meta(vocoder.Flow, flow)), folder / "flow.pt")
    torch.save(vocoder.hift_weights(vocoder.on_meta(vocoder.Hift, HiftConfig())), folder / "hift.pt")


def write_speech(folder: Path, device: str) -> None:
    """Language models of Qwen3-TTS in bfloat16 and its codec in float32."""
    generator = torch.Generator(device).manual_seed(0)
    config = {**released_config("1b7").model_dump(), **speech.text_ids(), "tokenizer_type": "qwen3_tts_tokenizer_12hz"}
    shapes = talker_tensors(parse_qwen3_tts_config(config))
    speech.write_folder(folder, config, {name: draw(name, shape, device, generator) for name, shape in shapes.items()})
    with on_meta():
        codec = tensor_shapes(SpeechTokenizer(RELEASED_TOKENIZER))

    def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, device=device).normal_(*mean_and_std(name, shape), generator=generator)

    about = {**RELEASED_TOKENIZER.model_dump(), "model_type": "qwen3_tts_tokenizer_12hz"}
    weights = {name: drawn(name, shape) for name, shape in codec.items()}
    speech.write_folder(folder / TOKENIZER_FOLDER, about, weights)
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(TINY / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.released_size", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=("omni", "speech"), default="omni")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to draw")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    if options.model == "speech":
        write_speech(options.folder, options.device)
        return
    write_model(options.folder, options.device)
    write_vocoder(options.folder / "assets" / "token2wav")


if __name__ == "__main__":
    main()
