"""The routes of reference voices."""

import asyncio
import base64
import io
import subprocess
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import soundfile

from server.registry import sound_upload
from server.request_guard import MAX_BODY_BYTES, MAX_VOICE_BODY, limit_of
from server.routes.voices import PATH
from tests.server.routes.asgi_gateway import AsgiClient, asgi_client, gateway_of, with_data_dir
from worker.config.service import Config, default_config

RATE = 48_000
TONE = np.sin(np.arange(RATE) * 2 * np.pi * 440 / RATE).astype(np.float32) / 2
WAV = io.BytesIO()
soundfile.write(WAV, np.stack([TONE, TONE], 1), RATE, format="WAV")
# Suffix -> arguments of ffmpeg.
FORMATS = {
    "mp3": [],
    "m4a": ["-c:a", "aac"],
    "webm": ["-c:a", "libopus"],
    "ogg": ["-c:a", "libvorbis"],
    "flac": [],
    "mp4": ["-c:a", "aac", "-f", "lavfi", "-i", "color=size=64x64:rate=5:duration=1", "-pix_fmt", "yuv420p"],
}


def config_in(folder: Path) -> Config:
    return with_data_dir(default_config(), folder)


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def encoded(folder: Path, suffix: str) -> bytes:
    source, target = folder / "tone.wav", folder / f"tone.{suffix}"
    source.write_bytes(WAV.getvalue())
    arguments = FORMATS[suffix]
    inputs, outputs = (arguments[2:6], arguments[:2] + arguments[6:]) if "lavfi" in arguments else ([], arguments)
    program = imageio_ffmpeg.get_ffmpeg_exe()
    command = [program, "-v", "error", "-i", str(source), *inputs, *outputs, "-shortest", str(target)]
    subprocess.run(command, check=True)
    return target.read_bytes()


async def upload(http: AsgiClient, name: str, audio: bytes | str, status: int = 200) -> Any:
    text = audio if isinstance(audio, str) else text_of(audio)
    return (await http.request("POST", PATH, status, json={"name": name, "audio_base64": text})).json()


async def uploads(http: AsgiClient) -> list[Any]:
    return [one for one in (await http.get(PATH))["ref_audios"] if one["source_type"] == "upload"]


def test_voice_is_uploaded_listed_heard_and_deleted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of(config=config_in(tmp_path))) as http:
            before = await http.get(PATH)
            assert [one["id"] for one in before["ref_audios"]] == ["default", "high"] and before["total"] == 2
            got = await upload(http, "Ännchen", WAV.getvalue())
            assert got == {"success": True, "id": got["id"], "name": "Ännchen", "message": "Uploaded"}
            (listed,) = await uploads(http)
            known = {
                "id": got["id"],
                "name": "Ännchen",
                "filename": f"{got['id']}.wav",
                "source_type": "upload",
                "transcript": "",
            }
            known |= {"transcript": "", "duration_ms": 1000, "sample_rate": 24_000}
            assert listed == {**known, "created_at": listed["created_at"]}
            sound = await http.get(f"{PATH}/{got['id']}/audio")
            samples = np.frombuffer(base64.b64decode(sound.pop("data")), "<f4")
            assert sound == {"name": "Ännchen", "duration": 1.0}
            expected = np.sin(np.arange(16_000) * 2 * np.pi * 440 / 16_000) / 2
            assert np.abs(samples - expected)[100:-100].max() < 0.01
            async with asgi_client(gateway_of(config=config_in(tmp_path))) as restarted:
                assert await uploads(restarted) == [listed]
            gone = await http.request("DELETE", f"{PATH}/{got['id']}")
            assert gone.json() == {"success": True, "id": got["id"], "name": None, "message": "Deleted"}
            assert await http.get(PATH) == before
            for path in ("", "/audio", "/audio.wav"):
                answer = await http.request("GET" if path else "DELETE", f"{PATH}/{got['id']}{path}", 404)
                assert "expected the id of a registered voice" in answer.json()["detail"]

    asyncio.run(scenario())


def test_voice_keeps_what_a_speaker_encoder_reads(tmp_path: Path) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.sin(np.arange(48_000) * 2 * np.pi * 10_000 / 48_000) / 2, 48_000, format="WAV")

    async def scenario() -> None:
        async with asgi_client(gateway_of(config=config_in(tmp_path))) as http:
            got = await upload(http, "High", file.getvalue())
            stored = await http.request("GET", f"{PATH}/{got['id']}/audio.wav")
        samples, rate = soundfile.read(io.BytesIO(stored.content))
        assert rate == 24_000 and np.abs(np.fft.rfft(samples)).argmax() == pytest.approx(10_000, abs=4)
        assert np.abs(samples).max() == pytest.approx(0.5, abs=0.02)

    asyncio.run(scenario())


@pytest.mark.parametrize("suffix", FORMATS)
def test_media_formats_are_decoded(tmp_path: Path, suffix: str) -> None:
    samples = sound_upload.decoded_sound(text_of(encoded(tmp_path, suffix)))
    assert len(samples) == pytest.approx(16_000, rel=0.15) and samples.dtype == np.float32
    power = np.abs(np.fft.rfft(samples[4000:12_000]))
    assert power.argmax() * 2 == pytest.approx(440, abs=4), "expected the tone"


def test_wav_of_a_voice_supports_ranges(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of(config=config_in(tmp_path))) as http:
            whole = await http.request("GET", f"{PATH}/high/audio.wav")
            assert whole.headers["content-type"] == "audio/wav" and whole.content[:4] == b"RIFF"
            part = await http.request("GET", f"{PATH}/high/audio.wav", 206, headers={"Range": "bytes=8-11"})
            assert part.content == b"WAVE"
            head = await http.request("HEAD", f"{PATH}/high/audio.wav")
            assert head.headers["content-length"] == str(len(whole.content)) and not head.content

    asyncio.run(scenario())


def sine(seconds: float) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.full(int(16_000 * seconds), 0.1), 16_000, format="WAV")
    return file.getvalue()


def test_unfit_uploads_are_refused(tmp_path: Path) -> None:
    wav = WAV.getvalue()
    playlist = f"ffconcat version 1.0\nfile '{tmp_path}/tone.wav'\n".encode()
    cases = (
        ("x", b"", 400, "got no bytes"),
        ("x", "a", 400, "audio_base64: expected base64"),
        ("x", "%%%%", 400, "audio_base64: expected base64"),
        ("x", b"not a sound" * 99, 400, "expected a sound or video file"),
        ("x", wav[:30], 400, "audio_base64: expected"),
        ("x", b"RIFF" + bytes(8000), 400, "expected a wav file with sound"),
        ("x", playlist, 400, "expected a sound or video file"),
        ("x", sine(0.2), 400, "expected at least 0.5 s of sound, got 0.20 s"),
        ("x", sine(31), 413, "expected up to 30 s of sound, got more"),
        ("x", "A" * (sound_upload.MAX_FILE_BYTES // 3 * 4 + 8), 413, "expected at most 16777216 bytes, got 1677722"),
        ("", wav, 400, "name: expected 1 to 100 characters, got 0"),
        ("default", wav, 400, "name: expected a name that no other voice has"),
        ("../x", wav, 400, "name: expected printable characters"),
    )
    (tmp_path / "tone.wav").write_bytes(wav)

    async def scenario() -> None:
        async with asgi_client(gateway_of(config=config_in(tmp_path))) as http:
            for name, audio, status, reason in cases:
                got = await upload(http, name, audio, status)
                assert reason in got["detail"], f"expected {reason!r}, got {got}"
            assert not await uploads(http)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "{}", '{"name": "x"}', '{"name": 1, "audio_base64": ""}', '{"name": "\\ud800"']
)
def test_invalid_bodies_are_refused(tmp_path: Path, body: str) -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of(config=config_in(tmp_path))) as http:
            answer = await http.request("POST", PATH, 422, content=body)
            assert answer.json()["detail"][0]["msg"], answer.text

    asyncio.run(scenario())


def test_only_uploads_may_be_long(tmp_path: Path) -> None:
    assert limit_of(PATH) == MAX_VOICE_BODY > sound_upload.MAX_FILE_BYTES * 4 // 3
    assert limit_of(f"{PATH}/external") == limit_of("/api/config/eta") == MAX_BODY_BYTES

    async def scenario() -> None:
        async with asgi_client(gateway_of(config=config_in(tmp_path))) as http:
            answer = await http.request("POST", PATH, 413, content=b" " * (MAX_VOICE_BODY + 1))
            assert answer.json()["detail"] == f"body: expected at most {MAX_VOICE_BODY} bytes, got more"

    asyncio.run(scenario())


def test_files_of_the_server_cannot_be_registered(tmp_path: Path) -> None:
    (tmp_path / "tone.wav").write_bytes(WAV.getvalue())

    async def scenario() -> None:
        async with asgi_client(gateway_of(config=config_in(tmp_path))) as http:
            body = {"name": "x", "path": str(tmp_path / "tone.wav")}
            answer = await http.request("POST", f"{PATH}/external", 403, json=body)
            assert "this server opens no files that clients name" in answer.json()["detail"]
            assert (answer.json()["success"], answer.json()["message"]) == (False, answer.json()["detail"])
            assert not await uploads(http)
            await http.request("DELETE", f"{PATH}/default", 403)

    asyncio.run(scenario())


def test_upload_does_not_block_other_requests(tmp_path: Path) -> None:
    """The event loop answers while a sound is decoded."""

    async def scenario() -> None:
        async with asgi_client(gateway_of(config=config_in(tmp_path))) as http:
            uploading = asyncio.create_task(upload(http, "x", sine(29)))
            n_answers = 0
            while not uploading.done():
                await http.get("/health")
                n_answers += 1
                await asyncio.sleep(0)  # requests in this process do not yield
            await uploading
            assert n_answers > 10

    asyncio.run(scenario())
