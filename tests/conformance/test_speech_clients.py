"""Text-to-speech parts of the stock clients, against a gateway and the tiny speech model in this process."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import soundfile

from assets.build_tiny_speech import build
from tests.conformance.test_examples import PYTHON, ROOT
from tests.server.live_gateway import running_gateway, wait_until
from tests.worker.speech.served import SpeechWorker, speech_worker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no stock clients: `setup_stock_clients` of run_tests.sh"),
]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpeechWorker]:
    data = tmp_path_factory.mktemp("data")
    with speech_worker(build(data / "voices"), data) as worker:
        yield worker


@pytest.mark.parametrize("client", ["openai", "livekit", "pipecat"])
def test_client_gets_the_speech_of_the_model(worker: SpeechWorker, client: str, tmp_path: Path) -> None:
    file, path = tmp_path / "speech.wav", worker.service.settings.engine.speech_path

    async def scenario() -> None:
        async with running_gateway(worker.port, model={"omni": False, "speech_path": path}) as gateway:
            workers = gateway.gateway.dispatcher.workers
            await wait_until(lambda: workers.n_free_of("speech") > 0, "the speech model")
            arguments = ("Good morning.", "--client", client, "--save", str(file))
            address = ("--base-url", f"http://127.0.0.1:{gateway.port}/v1")
            program = await asyncio.create_subprocess_exec(
                *(str(PYTHON), str(ROOT / "examples" / "speech.py"), *arguments, *address),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            printed, _ = await program.communicate()
            assert program.returncode == 0, printed.decode()
            await wait_until(lambda: not workers.leases, "a slot that is given back")

    asyncio.run(scenario())
    sound, rate = soundfile.read(file)
    assert rate == 24_000 and len(sound) / rate > 0.1 and abs(sound).max() > 0.01
