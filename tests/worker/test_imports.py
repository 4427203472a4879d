"""Modules that a worker imports: torch's compiler only if something compiles, and none while it serves."""

import io
import time
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from tests.worker.http.client_scripts import ALOUD, base64_of, chunk
from tests.worker.http.processes import WorkerProcess, running
from tests.worker.http.scripted_client import ScriptedClient
from worker.config.service import ROOT
from worker.protocol.messages import Error, Result
from worker.start.voices import ReferenceSound

IMPORT_LINE = "import time:"  # prefix of Python's line for each module, in the order of loading
SETTLE_S = 0.3  # until a line is read that was written


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    flags = ("--max-sessions", "2", "--max-warmup-chunks", "1", "--no-compile")
    environ = {"PYTHONPROFILEIMPORTTIME": "1"}
    with running(
        tmp_path_factory.mktemp("worker"), *flags, config={"duplex": {"euler_steps": 1}}, environ=environ
    ) as process:
        yield process


def loaded(worker: WorkerProcess) -> list[str]:
    time.sleep(SETTLE_S)
    return [line.rpartition("|")[2].strip() for line in worker.lines if line.startswith(IMPORT_LINE)]


def webp() -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (64, 48)).save(data, "WEBP")
    return data.getvalue()


def test_does_not_load_the_compiler_without_compiling(worker: WorkerProcess) -> None:
    names = loaded(worker)
    assert {"torch", "worker.engine"} <= set(names), f"expected the worker's modules, got {names[:20]}"
    parts = [name for name in names if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))]
    assert not parts, f"expected no part of the compiler, got {parts[-1]} and {len(parts) - 1} before it"


def test_loads_no_module_while_serving(worker: WorkerProcess) -> None:
    before = loaded(worker)

    def more() -> list[str]:
        return loaded(worker)[len(before) :]

    def ask(message: Any, kind: type) -> None:
        client.send(message)
        client.expect(kind)

    with ScriptedClient(worker) as client:
        client.prepare(ALOUD)
        client.units(range(2))
        assert more() == [], "by a unit"
        ask(chunk(2, frame_base64_list=[base64_of(webp())]), Result)
        assert more() == [], "by a picture"
        for nonsense in ("{", {"type": "unheard of"}, bytes(40), chunk(3, frame_base64_list=[base64_of(bytes(40))])):
            ask(nonsense, Error)
        assert more() == [], "by nonsense"
        high = ReferenceSound.read(ROOT / "assets" / "ref_audio" / "high.wav").audio_16k()
        client.prepare(ALOUD, ref_audio_base64=base64_of(high))
        client.stop()
    for path in ("/health", "/readyz", "/metrics", "/compile_report", "/nowhere"):
        worker.ask(path)
    assert more() == [], "by another voice, or over HTTP"
