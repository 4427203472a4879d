"""The converter: sounds of single calls in batches and pieces, voices, faults of one request, the end."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.errors import AudioError, CheckpointError, ModelError, SlotError, TokenError
from models.token2wav.s3gen.model import S3Gen
from models.token2wav.s3gen.region_table import S3Shapes
from tests.models.compare import assert_close
from tests.models.token2wav.prompt.prompt_sounds import prompt
from tests.models.token2wav.s3gen import tiny_s3gen
from worker.config.compile import CompileConfig
from worker.conversion import converter
from worker.conversion.converter import ConversionJob, ConversionSource, Converter
from worker.conversion.unit_gate import UnitGate
from worker.engine_thread import EngineThread
from worker.loop.batch_runner import DeviceLostError
from worker.start.voices import ReferenceSound

SHAPES = S3Shapes(batch=(1, 2), speech_tokens=(4, 20), prompt=(50,), sound=(60, 120))
VOICE = ReferenceSound(torch.from_numpy(prompt(0.6, 24_000)), 24_000)
WAIT_S = 60.0


@pytest.fixture(scope="module")
def model() -> S3Gen:
    return tiny_s3gen.make(vocab=tiny_s3gen.ALL_TOKENS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_s3gen.write(tmp_path_factory.mktemp("s3gen"))


def opened(path: Path) -> Converter:
    plain = CompileConfig(enabled=False)
    return Converter(path, device=torch.device("cpu"), dtype=torch.float32, compile=plain, shapes=SHAPES)


@pytest.fixture(scope="module")
def running(path: Path) -> Iterator[Converter]:
    made = opened(path)
    yield made
    made.close()


def tokens(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(tiny_s3gen.ALL_TOKENS, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


class Client:
    """One request, with what it received."""

    def __init__(self, running: Converter, source: ConversionSource, voice: ReferenceSound = VOICE, seed: int = 0):
        self.parts: list[Any] = []
        self.job: ConversionJob = running.submit(source, voice, seed, self.parts.append)

    def sound(self) -> torch.Tensor:
        n_tokens = self.job.done.result(WAIT_S)
        assert self.parts[0] == n_tokens
        return torch.from_numpy(np.concatenate(self.parts[1:]))


def alone(model: S3Gen, speech_tokens: tuple[int, ...], seed: int) -> torch.Tensor:
    with torch.no_grad():
        voice = model.prepare_voice(VOICE.samples[0], VOICE.rate)
        return model.sound(torch.tensor(speech_tokens), voice, seed=seed)


def test_requests_that_share_batches_have_their_own_sound(running: Converter, model: S3Gen) -> None:
    wanted, all_wait = [(tokens(n, n), n) for n in (4, 9, 20, 6)], threading.Event()
    running.submit(ConversionSource(speech_tokens=tokens(4)), VOICE, 0, lambda _: all_wait.wait(WAIT_S) and None)
    before = running.batches, running.pieces
    clients = [Client(running, ConversionSource(speech_tokens=given), seed=seed) for given, seed in wanted]
    all_wait.set()
    for client, (given, seed) in zip(clients, wanted, strict=True):
        assert_close(client.sound(), alone(model, given, seed), 1e-4)
    n_batches, n_pieces = running.batches - before[0], running.pieces - before[1]
    assert (n_pieces, n_batches) == (5, 3), f"expected batches of 1, 2 and 2, got {n_batches} of {n_pieces} pieces"


def test_long_sound_comes_in_joined_pieces(running: Converter) -> None:
    """Fifty tokens at most twenty at a time: the cuts are after 14, 22 and 30 tokens, and so on."""
    client = Client(running, ConversionSource(speech_tokens=tokens(50)))
    sound = client.sound()
    assert len(sound) == 50 * 960 and sound.isfinite().all()
    sizes = [len(part) for part in client.parts[1:]]
    assert sizes == [14 * 960 - 480, 8 * 960, 8 * 960, 8 * 960, 12 * 960 + 480], "every piece is sent when it is ready"


def test_sound_is_converted_like_its_tokens(running: Converter) -> None:
    """1.9 s: more than the tokenizer's largest window."""
    wave = prompt(1.9, 16_000, seed=4)[0]
    client = Client(running, ConversionSource(wave, 16_000))
    sound = client.sound()
    assert len(sound) == 48 * 960, f"expected 25 tokens a second of 960 samples, got {len(sound)} samples"
    assert not torch.equal(sound, Client(running, ConversionSource(wave[::-1].copy(), 16_000)).sound())


def test_faults_end_one_request(running: Converter, model: S3Gen) -> None:
    wrong = Client(running, ConversionSource(speech_tokens=(tiny_s3gen.ALL_TOKENS,)))
    short = Client(running, ConversionSource(np.zeros(10, np.float32), 16_000))
    odd = ReferenceSound(torch.full((1, 24_000), torch.nan), 24_000)
    voiceless = Client(running, ConversionSource(speech_tokens=tokens(4)), odd)
    good = Client(running, ConversionSource(speech_tokens=tokens(4)))
    gone = Client(running, ConversionSource(speech_tokens=tokens(400)))
    gone.job.cancel()
    for client, error in ((wrong, TokenError), (short, AudioError), (voiceless, AudioError), (gone, ModelError)):
        with pytest.raises(error):
            client.job.done.result(WAIT_S)
    assert_close(good.sound(), alone(model, tokens(4), 0), 1e-4)
    assert running.n_jobs == 0


def test_client_that_leaves_within_its_last_piece_ends_nothing_else(running: Converter, model: S3Gen) -> None:
    """A request whose task is cancelled cancels the future, too."""
    jobs, is_submitted = list[ConversionJob](), threading.Event()

    def leave(part: object) -> None:
        is_submitted.wait(WAIT_S)
        if isinstance(part, np.ndarray):
            jobs[0].done.cancel()

    jobs.append(running.submit(ConversionSource(speech_tokens=tokens(4)), VOICE, 0, leave))
    good = Client(running, ConversionSource(speech_tokens=tokens(6)))
    is_submitted.set()
    assert_close(good.sound(), alone(model, tokens(6), 0), 1e-4)
    assert running.is_running, "expected a converter that serves on"


def test_end_fails_what_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converter, "MAX_JOBS", 2)
    running = opened(path)
    clients = [Client(running, ConversionSource(speech_tokens=tokens(2000))) for _ in range(2)]
    with pytest.raises(SlotError, match="expected fewer than 2 at a time, got 2"):
        Client(running, ConversionSource(speech_tokens=tokens(4)))
    running.close()
    assert not running.is_running
    for client in clients:
        with pytest.raises(ModelError, match="got one that was closed"):
            client.job.done.result(WAIT_S)
    with pytest.raises(ModelError, match="got one that was closed"):
        Client(running, ConversionSource(speech_tokens=tokens(4)))
    with pytest.raises(CheckpointError, match="absent"):
        opened(path.with_name("absent.safetensors"))


@pytest.mark.parametrize(("runs", "expected"), [(True, "auto"), (False, "plain")])
def test_compiling_uses_kernels_where_they_run(
    path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool, expected: str
) -> None:
    given: list[str] = []
    monkeypatch.setattr(converter, "uses_kernels", lambda config, device: runs and config.enabled)
    monkeypatch.setattr(converter, "compile_components", lambda *_, kernels, **__: given.append(kernels))
    compiling = CompileConfig(enabled=True)
    made = Converter(path, device=torch.device("cpu"), dtype=torch.float32, compile=compiling, shapes=SHAPES)
    made.close()
    assert given == [expected]


class Units:
    """An `EngineWork` of units that are in flight, and leave no time, until `rest`."""

    def __init__(self) -> None:
        self.is_idle, self.n_runs = False, 0

    def slack_s(self) -> float:
        return float("inf") if self.is_idle else -0.1

    def run(self, slack_s: float) -> None:
        self.n_runs += 1

    def after_others(self, seconds: float) -> None: ...

    def fail(self, error: Exception) -> None: ...

    def end(self) -> None: ...


def test_conversions_wait_for_units(path: Path) -> None:
    thread, units = EngineThread(torch.device("cpu")), Units()
    thread.start()
    gate, plain = UnitGate(thread), CompileConfig(enabled=False)
    made = Converter(path, device=torch.device("cpu"), dtype=torch.float32, compile=plain, shapes=SHAPES, gate=gate)
    try:
        thread.add(units, first=True)
        waiting, left = (Client(made, ConversionSource(speech_tokens=tokens(4))) for _ in range(2))
        left.job.cancel()
        n_runs = units.n_runs
        while units.n_runs < n_runs + 100:
            time.sleep(0.001)
        assert not waiting.parts and made.pieces == 0, "units have no time to spare"
        units.is_idle = True
        assert len(waiting.sound()) == 4 * 960
        units.is_idle = False
        end = Client(made, ConversionSource(speech_tokens=tokens(4)))
    finally:
        made.close()
        gate.close()
        thread.close()
    with pytest.raises(ModelError):
        end.job.done.result(WAIT_S)


def test_only_a_lost_device_ends_the_engine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = []

    def lose(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def speak(one: Converter, *args: Any) -> None:
        if errors:
            raise errors[0]
        real(one, *args)

    real = Converter._speak
    monkeypatch.setattr(Converter, "_speak", speak)
    thread, units = EngineThread(torch.device("cpu")), Units()
    units.is_idle = True
    thread.start()
    gate, plain = UnitGate(thread), CompileConfig(enabled=False)
    made = Converter(path, device=torch.device("cpu"), dtype=torch.float32, compile=plain, shapes=SHAPES, gate=gate)
    try:
        thread.add(units, first=True)
        for error in (torch.OutOfMemoryError("no room"), torch.AcceleratorError("CUDA error: one call")):
            errors[:] = [error]
            with pytest.raises(type(error)):
                Client(made, ConversionSource(speech_tokens=tokens(4))).sound()
            errors.clear()
            assert len(Client(made, ConversionSource(speech_tokens=tokens(4))).sound()) == 4 * 960
        assert thread.failure is None, f"expected units that go on, got {thread.failure!r}"
        errors[:] = [torch.AcceleratorError("CUDA error: an illegal memory access was encountered")]
        with monkeypatch.context() as patch, pytest.raises(ModelError):
            patch.setattr(torch.cpu, "synchronize", lose)
            Client(made, ConversionSource(speech_tokens=tokens(4))).sound()
        assert thread.thread is not None
        thread.thread.join(WAIT_S)
        assert isinstance(thread.failure, DeviceLostError), f"expected an engine that ends, got {thread.failure!r}"
        assert not made.is_running
    finally:
        made.close()
        gate.close()
        thread.close()
