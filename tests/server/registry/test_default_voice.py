"""The default voice: its samples, errors, and decoding once per file."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile

from models.inputs.audio_sizes import SAMPLE_RATE
from server.registry.reference_sound import SoundFiles
from tests.server.registry.requests import config_with, fetch, samples_of
from tests.server.routes.asgi_gateway import asgi_client, gateway_of


def test_default_voice(root: Path) -> None:
    path = root / "assets" / "ref_audio" / "default.wav"
    got = asyncio.run(fetch("/api/default_ref_audio"))
    expected, rate = soundfile.read(path, dtype="float32")
    assert got.keys() == {"name", "duration", "sample_rate", "samples", "base64"}
    assert (got["name"], got["sample_rate"], rate) == ("default.wav", 16_000, 16_000)
    assert (got["samples"], got["duration"]) == (len(expected), pytest.approx(len(expected) / rate, abs=0.001))
    assert np.array_equal(samples_of(got["base64"]), expected)


def test_default_voice_is_converted_to_mono_at_16_khz(tmp_path: Path) -> None:
    seconds = np.arange(44_100) / 44_100
    tone = 0.5 * np.sin(2 * np.pi * 440 * seconds)
    soundfile.write(tmp_path / "tone.ogg", np.stack([tone, tone], axis=1), 44_100)
    got = asyncio.run(fetch("/api/default_ref_audio", config=config_with(tmp_path / "tone.ogg")))
    sound = samples_of(got["base64"])
    assert len(sound) == got["samples"] == pytest.approx(16_000, abs=2)
    loudest = np.argmax(np.abs(np.fft.rfft(sound))) * SAMPLE_RATE / len(sound)
    assert loudest == pytest.approx(440, abs=2) and 0.45 < np.abs(sound).max() < 0.55, (loudest, np.abs(sound).max())


@pytest.mark.parametrize("what", ["unset", "missing", "folder", "text", "empty", "long"])
def test_unusable_default_voice_is_404(tmp_path: Path, what: str) -> None:
    path = None if what == "unset" else tmp_path / f"{what}.wav"
    if what == "folder":
        path.mkdir()
    elif what == "text":
        path.write_text("no sound")
    elif what == "empty":
        soundfile.write(path, np.zeros(0), 16_000)
    elif what == "long":
        soundfile.write(path, np.zeros(8_000 * 31), 8_000)
    got = asyncio.run(fetch("/api/default_ref_audio", 404, config=config_with(path)))
    assert got["detail"].startswith("No default voice: ") and str(tmp_path) not in got["detail"], got
    assert ("audio.ref_audio_path" if what == "unset" else path.name) in got["detail"], got


def test_sound_is_decoded_once_until_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "voice.wav"
    shorter = tmp_path / "shorter.wav"
    soundfile.write(path, np.zeros(16_000), 16_000)
    soundfile.write(shorter, np.zeros(8_000), 16_000)
    opened: list[Path] = []
    whole = soundfile.SoundFile
    monkeypatch.setattr(soundfile, "SoundFile", lambda file: opened.append(file) or whole(file))

    async def scenario() -> None:
        files = SoundFiles()
        sounds = await asyncio.gather(*(files.read(path) for _ in range(8)))
        assert len(opened) == 1 and {sound.n_samples for sound in sounds} == {16_000}, opened
        shutil.copy(shorter, path)
        assert (await files.read(path)).n_samples == 8_000 and len(opened) == 2

    asyncio.run(scenario())


def test_decoding_does_not_block_other_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request waits for a sound, others are answered."""
    release = asyncio.Event()
    path = tmp_path / "voice.wav"
    soundfile.write(path, np.zeros(1600), 16_000)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        whole = soundfile.SoundFile

        def slow(file: Path) -> soundfile.SoundFile:
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(30)
            return whole(file)

        monkeypatch.setattr(soundfile, "SoundFile", slow)
        async with asgi_client(gateway_of(config=config_with(path))) as http:
            waiting = asyncio.create_task(http.get("/api/default_ref_audio"))
            for _ in range(5):
                await http.get("/livez")
            assert not waiting.done(), "expected the request to wait for its sound"
            release.set()
            assert (await waiting)["samples"] == 1600

    asyncio.run(scenario())
