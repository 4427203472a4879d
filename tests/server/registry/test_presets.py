"""Presets, their sounds and the defaults of the page."""

import asyncio
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import yaml

from models.errors import ConfigError
from models.inputs.audio_sizes import SAMPLE_RATE
from server import main
from server.registry.presets import FOLDER, MODES, PresetFolders, Presets
from server.registry.voices import VoiceRegistry
from server.serving import ServeOptions
from tests.server.registry.requests import fetch, samples_of
from tests.server.routes.asgi_gateway import asgi_client, gateway_of, with_data_dir
from worker.config.service import default_config
from worker.protocol.messages import Prepare, read_text
from worker.protocol.system_content import texts_and_sound
from worker.voice_registry import voice_folder

PRESET = {"id": "one", "name": "One", "system_prompt": "Be brief."}


def write_preset(folder: Path, preset: Any, mode: str = "omni", name: str = "one.json") -> Path:
    """Write a preset below `folder`, which also contains the sounds. Returns: the folder of presets."""
    file = folder / "presets" / mode / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(preset if isinstance(preset, str) else json.dumps(preset), encoding="utf-8")
    return folder / "presets"


# --- the repository's presets ---------------------------------------------------------------------


def test_repository_has_presets_in_both_languages_for_each_mode() -> None:
    for mode, presets in Presets.load().modes.items():
        for lang in ("en", "zh"):
            assert sum(one.preset.lang == lang for one in presets) >= 3, f"{mode}: expected three in {lang}"
        assert all(one.preset.description for one in presets)
        texts = [one.preset.system_prompt or str(one.preset.system_content) for one in presets]
        assert len(set(texts)) == len(texts), mode


def test_repository_presets_are_valid_prepare_fields() -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of(preset_folder=FOLDER)) as http:
            listed = await http.get("/api/presets")
            assert tuple(listed) == MODES
            for mode in ("omni", "audio_duplex"):
                assert [one["order"] for one in listed[mode]] == sorted(one["order"] for one in listed[mode])
                for one in listed[mode]:
                    voice = one["ref_audio"]
                    assert voice.keys() == {"data", "path", "name", "duration"} and voice["data"] is None, voice
                    assert "base64" not in one and "system_content" not in one, one.keys()
                    found = await http.get(f"/api/presets/{mode}/{one['id']}/audio")
                    assert found.keys() == {"ref_audio"} and found["ref_audio"]["name"] == voice["name"], found.keys()
                    sound = samples_of(found["ref_audio"]["data"])
                    assert len(sound) / SAMPLE_RATE == pytest.approx(voice["duration"], abs=0.001)
                    fields = {"system_prompt": one["system_prompt"], "ref_audio_base64": found["ref_audio"]["data"]}
                    prepare = read_text(json.dumps({"type": "prepare", **fields}))
                    assert isinstance(prepare, Prepare) and np.array_equal(prepare.ref_audio(), sound)

    asyncio.run(scenario())


def test_repository_presets_are_valid_system_content() -> None:
    async def scenario() -> None:
        async with asgi_client(gateway_of(preset_folder=FOLDER)) as http:
            listed = await http.get("/api/presets")
            for mode in ("half_duplex_audio", "turnbased"):
                for one in (one for one in listed[mode] if "system_prompt" not in one):
                    audio = (await http.get(f"/api/presets/{mode}/{one['id']}/audio"))["system_content_audio"]
                    items = [{**item, "data": audio[0]["data"]} for item in one["system_content"]]
                    texts, sound = texts_and_sound(items)
                    assert len(audio) == 1 and len(texts) == 2 and sound == audio[0]["data"], one

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "path", ["omni/none", "none/eyes", "turnbased/eyes", "omni/..", "omni/%2e%2e", "omni/\ud83d\ude00"]
)
def test_unknown_preset_is_404(path: str) -> None:
    path = path.encode("utf-16", "surrogatepass").decode("utf-16")
    got = asyncio.run(fetch(f"/api/presets/{path}/audio", 404, preset_folder=FOLDER))
    assert "ot" in got["detail"] and len(got["detail"]) < 200, got


def test_404_names_unknown_preset() -> None:
    got = asyncio.run(fetch("/api/presets/omni/unknown/audio", 404))
    assert got == {"detail": "Preset not found: omni/unknown"}


# --- other presets --------------------------------------------------------------------------------


def test_sounds_between_paragraphs(tmp_path: Path, root: Path) -> None:
    shutil.copy(root / "assets" / "ref_audio" / "high.wav", tmp_path / "high.wav")
    soundfile.write(tmp_path / "beep.flac", np.zeros((4800, 2)), 48_000)
    content = [
        {"type": "text", "text": "Like this:"},
        {"type": "audio", "path": "beep.flac", "name": "Beep"},
        {"type": "text", "text": "and this."},
        {"type": "audio", "path": "high.wav", "name": "High"},
    ]
    folder = write_preset(tmp_path, {"id": "content", "name": "Content", "system_content": content}, "turnbased")
    write_preset(tmp_path, {**PRESET, "order": 1}, "turnbased", "b.json")

    async def scenario() -> None:
        async with asgi_client(gateway_of(preset_folder=folder)) as http:
            first, second = (await http.get("/api/presets"))["turnbased"]
            assert (first["id"], second["id"], second["order"]) == ("one", "content", 999)
            assert first["system_content"] == [{"type": "text", "text": first["system_prompt"]}]
            assert "system_prompt" not in second and "ref_audio" not in second
            assert [item["type"] for item in second["system_content"]] == ["text", "audio", "text", "audio"]
            beep = {"type": "audio", "data": None, "path": "beep.flac", "name": "Beep", "duration": 0.1}
            assert second["system_content"][1] == beep, second["system_content"][1]
            assert await http.get("/api/presets/turnbased/one/audio") == {}
            found = await http.get("/api/presets/turnbased/content/audio")
            assert [sound["name"] for sound in found["system_content_audio"]] == ["Beep", "High"]
            assert len(samples_of(found["system_content_audio"][0]["data"])) == 1600
            (tmp_path / "beep.flac").unlink()
            gone = (await http.get("/api/presets/turnbased/content/audio"))["system_content_audio"]
            assert gone[0] == {"data": None, "name": "Beep", "duration": 0.1} and gone[1]["data"], gone[0]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ({**PRESET, "sytem_prompt": "x"}, "sytem_prompt: Extra inputs"),
        ({**PRESET, "order": "1"}, "order: "),
        ({**PRESET, "id": "../x"}, "id: "),
        ({"id": "one", "system_prompt": "x"}, "name: Field required"),
        ({"id": "one", "name": "One"}, "either system_prompt or system_content"),
        ({**PRESET, "system_content": []}, "either system_prompt or system_content"),
        ({**PRESET, "ref_audio": {"path": "none.wav", "name": "x"}}, "a sound at none.wav"),
        ({**PRESET, "ref_audio": {"path": "presets/omni/one.json", "name": "x"}}, "a sound at presets"),
        ({**PRESET, "ref_audio": {"path": "../../etc/passwd", "name": "x"}}, "a sound inside"),
        ({**PRESET, "ref_audio": {"path": "x.wav", "name": "x", "data": "AAAA"}}, "ref_audio.data: Extra inputs"),
        ("{", "one.json"),
        ("[]", "one.json"),
    ],
    ids=str,
)
def test_error_names_file_of_invalid_preset(tmp_path: Path, preset: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        Presets.load(write_preset(tmp_path, preset))
    assert "one.json" in str(error.value) and expected in str(error.value), f"expected {expected}, got {error.value}"


def test_preset_names_a_registered_voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.registry.presets.CHECK_S", 0.0)
    registry = VoiceRegistry(voice_folder(tmp_path))
    folder = write_preset(tmp_path, {**PRESET, "ref_audio_path": "Aunt Mary"})
    write_preset(tmp_path, {**PRESET, "id": "two", "ref_audio_path": "high"}, name="two.json")
    presets = PresetFolders(folder)
    assert [one.preset.id for one in presets.current().modes["omni"]] == ["two"], "no such voice yet"
    voice = registry.add("Aunt Mary", np.full(2 * SAMPLE_RATE, 0.1, np.float32))
    one, two = presets.current().modes["omni"]
    assert one.sounds["Aunt Mary"].file == registry.file_of(voice) and one.preset.ref_audio.name == "Aunt Mary"
    assert two.sounds["high"].file.name == "high.wav"


def test_refuses_duplicate_id_and_unknown_mode(tmp_path: Path) -> None:
    folder = write_preset(tmp_path, PRESET)
    write_preset(tmp_path, PRESET, name="two.json")
    with pytest.raises(ConfigError, match=r"two\.json.*got one"):
        Presets.load(folder)
    (folder / "omni" / "two.json").unlink()
    write_preset(tmp_path, PRESET, mode="onmi")
    with pytest.raises(ConfigError, match="onmi"):
        Presets.load(folder)


def test_missing_folder_means_no_presets(tmp_path: Path) -> None:
    assert Presets.load(tmp_path / "none").modes == {mode: [] for mode in MODES}


# --- YAML and presets of the user ---------------------------------------------------------------------

YAML = """
id: call
order: 2
name: "Call"
system_prompt: "Be brief."
ref_audio_path: "assets/ref_audio/ref_minicpm_signature.wav"
"""


def test_reads_yaml_of_public_implementation(tmp_path: Path) -> None:
    content = [{"type": "text", "text": "Like this:"}, {"type": "audio", "path": "assets/ref_audio/high.wav"}]
    write_preset(tmp_path, YAML, name="call.yaml")
    turns = {"id": "turns", "name": "Turns", "system_content": content}
    folder = write_preset(tmp_path, yaml.safe_dump(turns), "turnbased", "turns.yml")

    async def scenario() -> None:
        async with asgi_client(gateway_of(preset_folder=folder)) as http:
            listed = await http.get("/api/presets")
            voice = listed["omni"][0]["ref_audio"]
            assert voice["path"] == "assets/ref_audio/ref_minicpm_signature.wav" and voice["duration"] > 1
            assert voice["name"] == "ref_minicpm_signature"
            assert listed["turnbased"][0]["system_content"][1]["name"] == "high"
            found = await http.get("/api/presets/omni/call/audio")
            default = await http.get("/api/default_ref_audio")
            assert found["ref_audio"]["data"] == default["base64"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("id: [", "line 1 column"),
        ("- id", "expected a mapping, got list"),
        ("", "expected a mapping, got NoneType"),
        ("id: !!python/object/apply:os.getcwd []", "expected YAML"),
        (YAML + "ref_audio: {path: x.wav}", "either ref_audio or ref_audio_path"),
        (YAML.replace('"Call"', "3"), "name: "),
        (YAML.replace("ref_minicpm_signature", "none"), "a sound at assets/ref_audio/none.wav"),
        (YAML.replace("assets/ref_audio/ref_minicpm_signature", "/etc/passwd"), "a sound inside"),
    ],
)
def test_error_names_file_of_invalid_yaml(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        Presets.load(write_preset(tmp_path, text, name="one.yaml"))
    assert "one.yaml" in str(error.value) and expected in str(error.value), f"expected {expected}, got {error.value}"


def test_presets_of_the_user_are_read_while_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.registry.presets.CHECK_S", 0.0)

    async def scenario() -> None:
        gateway = gateway_of(preset_folder=FOLDER, config=with_data_dir(default_config(), tmp_path))
        async with asgi_client(gateway) as http:
            shipped = (await http.get("/api/presets"))["omni"]
            write_preset(tmp_path, {**PRESET, "order": 0})
            eyes = {**PRESET, "id": "eyes", "name": "My eyes", "ref_audio": {"path": "ref_audio/high.wav"}}
            write_preset(tmp_path, eyes, name="eyes.json")
            first, *rest = (await http.get("/api/presets"))["omni"]
            assert first["id"] == "one" and {one["id"] for one in rest} == {one["id"] for one in shipped}
            assert "My eyes" in [one["name"] for one in rest]
            write_preset(tmp_path, {**PRESET, "id": "bad", "odd": 1}, name="bad.json")
            write_preset(tmp_path, PRESET, mode="onmi")
            assert (await http.get("/api/presets"))["omni"] == [first, *rest]
            report = await http.get("/api/admin/presets")
            assert report["folders"] == [str(FOLDER), str(tmp_path / "presets")]
            assert report["modes"]["omni"] == len(rest) + 1
            assert len(report["problems"]) == 2 and "bad.json" in report["problems"][0], report
            assert "odd" in report["problems"][0] and "onmi" in report["problems"][1], report
            shutil.rmtree(tmp_path / "presets")
            assert (await http.get("/api/presets"))["omni"] == shipped
            assert (await http.get("/api/admin/presets"))["problems"] == []

    asyncio.run(scenario())
    assert caplog.text.count("bad.json") == 1, caplog.text


# --- defaults of the page ---------------------------------------------------------------------------


def test_frontend_defaults() -> None:
    expected = {
        "playback_delay_ms": 200,
        "chat_vocoder": "token2wav",
        "recording": False,
        "apps": ["turnbased", "half_duplex_audio", "omni", "audio_duplex"],
        "voices": {"min_s": 0.5, "max_s": 30.0, "max_bytes": 16 * 2**20, "max_count": 200},
    }
    assert asyncio.run(fetch("/api/frontend_defaults")) == expected
    got = asyncio.run(fetch("/api/frontend_defaults", default_lang="zh"))
    assert got == {**expected, "default_lang": "zh"}

    async def switched_off() -> None:
        async with asgi_client(gateway_of()) as http:
            await http.put("/api/admin/apps/omni", {"enabled": False})
            assert "omni" not in (await http.get("/api/frontend_defaults"))["apps"]

    asyncio.run(switched_off())


def test_command_line_reaches_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[ServeOptions] = []
    monkeypatch.setattr(main, "serve", lambda config, bound_socket, options: served.append(options) or 0)
    monkeypatch.setattr(main.log, "set_up", lambda _: None)
    assert main.main(["--port", str(_free_port()), "--lang", "zh"]) == 0
    [options] = served
    assert options.default_lang == "zh" and options.preset_folder == FOLDER, options


def test_invalid_preset_prevents_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = write_preset(tmp_path, {**PRESET, "odd": 1})
    load = Presets.load
    monkeypatch.setattr(main.Presets, "load", lambda: load(broken))
    monkeypatch.setattr(main.log, "set_up", lambda _: None)
    monkeypatch.setattr(main, "serve", lambda *_, **__: 0)
    status, output = main.main(["--port", str(_free_port())]), capsys.readouterr().err
    assert status == 2 and "one.json" in output and "odd" in output, (
        f"expected status 2 and the file's name, got {output}"
    )


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
