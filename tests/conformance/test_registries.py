"""Items 33, 34 and 41 of the conformance list: static files, presets, defaults of the pages and reference voices."""

import base64
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from models.inputs.audio_sizes import SAMPLE_RATE
from server.pages import STATIC
from server.registry.voices import BUILTIN
from tests.conformance.servers import Servers

VOICES = "/api/assets/ref_audio"
TYPES = {
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".md": "text/markdown",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
}


@pytest.fixture
def http(servers: Servers) -> Iterator[httpx.Client]:
    base = f"http://127.0.0.1:{servers.gateway}"
    with httpx.Client(base_url=base, timeout=60, trust_env=False, verify=False) as client:
        yield client


def samples_of(data: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(data, validate=True), "<f4")


def test_item_33_static_files(http: httpx.Client) -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    for path in files:
        answer = http.get(f"/static/{path.relative_to(STATIC)}")
        assert (answer.status_code, answer.content == path.read_bytes()) == (200, True), path
        assert answer.headers["content-type"].split(";")[0] == TYPES[path.suffix], path
    worklets = [path.name for path in files if "registerProcessor(" in path.read_text(encoding="utf-8")]
    assert len(worklets) >= 2, f"expected the modules of capture and playback, got {worklets}"
    for name in worklets:
        assert http.head(f"/static/duplex/lib/{name}").headers["content-type"].startswith("text/javascript"), name


def test_item_34_presets_and_defaults(http: httpx.Client) -> None:
    presets = http.get("/api/presets").json()
    assert set(presets) == {"audio_duplex", "half_duplex_audio", "omni", "turnbased"}
    for mode, found in presets.items():
        assert found and all(isinstance(one["order"], int) and one["name"] for one in found), mode
        audio = http.get(f"/api/presets/{mode}/{found[0]['id']}/audio").json()
        sounds = [*audio.get("system_content_audio", []), *([audio["ref_audio"]] if "ref_audio" in audio else [])]
        for sound in sounds:
            samples = samples_of(sound["data"])
            assert len(samples) / SAMPLE_RATE == pytest.approx(sound["duration"], abs=0.001), mode
            assert sound["name"] and np.abs(samples).max() <= 1
    missing = http.get("/api/presets/omni/none/audio")
    assert (missing.status_code, missing.json()["detail"]) == (404, "Preset not found: omni/none")
    default = http.get("/api/default_ref_audio").json()
    assert default["sample_rate"] == SAMPLE_RATE and len(samples_of(default["base64"])) == default["samples"]
    assert default["samples"] / SAMPLE_RATE == pytest.approx(default["duration"], abs=0.001)
    assert http.get("/api/frontend_defaults").json()["playback_delay_ms"] == 200


def test_item_41_reference_voices(servers: Servers, http: httpx.Client) -> None:
    before = http.get(VOICES).json()
    text = base64.b64encode((BUILTIN / "high.wav").read_bytes()).decode()
    uploaded = http.post(VOICES, json={"name": "test voice", "audio_base64": text})
    assert uploaded.status_code == 200 and uploaded.json()["success"] is True, uploaded.text
    voice_id = uploaded.json()["id"]
    listed = http.get(VOICES).json()
    assert listed["total"] == before["total"] + 1 == len(listed["ref_audios"])
    assert voice_id in [one["id"] for one in listed["ref_audios"]]
    refused = http.post(VOICES, json={"name": "bad", "audio_base64": base64.b64encode(b"no sound").decode()})
    assert refused.status_code == 400 and "expected a sound" in refused.json()["detail"]

    with servers.open("/ws/duplex/adx_voice") as client:
        assert client.receive() == {"type": "queue_done"}
        for named in ("test voice", voice_id, "high.wav"):
            client.send(type="prepare", ref_audio_path=named)
            assert client.receive()["type"] == "prepared", named
        for named in ("/etc/passwd", "../registry.json", "config.json"):
            client.send(type="prepare", ref_audio_path=named)
            refusal = client.receive()
            assert refusal["type"] == "error" and "test voice" in refusal["error"], refusal

    deleted = http.delete(f"{VOICES}/{voice_id}").json()
    assert deleted == {"success": True, "id": voice_id, "name": None, "message": "Deleted"}
    assert http.get(VOICES).json() == before
    assert http.delete(f"{VOICES}/{voice_id}").status_code == 404
