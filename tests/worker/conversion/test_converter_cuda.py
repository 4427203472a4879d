"""The converter on a GPU: captured graphs alone while it serves, and its memory back when it is closed."""

from pathlib import Path

import pytest
import torch

from models.graphs.region_graphs import compile_counters
from models.token2wav.s3gen.region_table import S3Shapes
from tests.models.token2wav.s3gen import tiny_s3gen
from tests.worker.conversion.test_converter import VOICE, Client, tokens
from worker.config.compile import CompileConfig
from worker.conversion.converter import ConversionSource, Converter
from worker.start.memory import release_memory

pytestmark = pytest.mark.gpu
SHAPES = S3Shapes(batch=(1, 2), speech_tokens=(4, 20), prompt=(50,), sound=(60, 120))
WORKSPACES = 64 * 2**20  # bytes of libraries, which stay with the process


def test_closing_gives_the_memory_of_live_graphs_back(tmp_path: Path) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    path, device = tiny_s3gen.write(tmp_path), torch.device("cuda")
    compiling = CompileConfig(enabled=True)
    converter = Converter(path, device=device, dtype=torch.bfloat16, compile=compiling, shapes=SHAPES)
    warm = compile_counters()
    for n in (3, 20, 50):
        sound = Client(converter, ConversionSource(speech_tokens=tokens(n)), VOICE).sound()
        assert len(sound) == 960 * n and sound.isfinite().all()
    assert compile_counters() == warm, "expected nothing compiled after warm-up"
    held = torch.cuda.memory_reserved()
    converter.close()
    del converter
    now = release_memory(device)["after"]
    assert held > before, f"expected memory of graphs, got {held} after {before} bytes"
    assert now - before <= 0.1 * (held - before) + WORKSPACES, f"expected about {before} bytes, got {now} of {held}"
