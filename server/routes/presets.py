"""Routes for the start of a conversation: presets, their sounds, the default voice, and defaults of the page."""

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException

from models.errors import AudioError
from models.inputs.audio_sizes import SAMPLE_RATE
from server.registry.apps import Apps
from server.registry.preset_file import AudioItem, LoadedPreset, PresetVoice, TextItem
from server.registry.presets import PresetFolders
from server.registry.reference_sound import SoundFiles
from server.routes.bodies import Problem
from server.routes.preset_bodies import (
    AudioPart,
    DefaultSound,
    FrontendDefaults,
    PresetInfo,
    PresetReport,
    PresetSound,
    PresetSounds,
    TextPart,
    VoiceInfo,
)

CONTENT_MODES = ("half_duplex_audio", "turnbased")  # clients of other servers read only system_content here
NOT_FOUND: dict[int | str, dict[str, Any]] = {404: {"model": Problem, "description": "there is no such sound"}}


def preset_routes(
    folders: PresetFolders, default_voice: Path | None, defaults: FrontendDefaults, apps: Apps
) -> APIRouter:
    """default_voice: sound file for sessions without a voice of their own."""
    router = APIRouter()
    sounds = SoundFiles()

    async def sound_of(loaded: LoadedPreset, voice: PresetVoice) -> PresetSound:
        known = loaded.sounds[voice.path]
        try:
            sound = await sounds.read(known.file)
        except AudioError:  # the file was removed or changed since the preset was read
            return PresetSound(data=None, name=voice.name, duration=known.duration)
        return PresetSound(data=sound.data, name=voice.name, duration=sound.duration_s)

    @router.get("/api/frontend_defaults", response_model_exclude_none=True)
    async def frontend_defaults() -> FrontendDefaults:
        return defaults.model_copy(update={"apps": [app.app_id for app in apps.enabled]})

    @router.get("/api/default_ref_audio", responses=NOT_FOUND)
    async def default_ref_audio() -> DefaultSound:
        if default_voice is None:
            raise HTTPException(404, "No default voice: audio.ref_audio_path is not set")
        try:
            sound = await sounds.read(default_voice)
        except AudioError as error:
            raise HTTPException(404, f"No default voice: {error}") from None
        return DefaultSound(
            name=default_voice.name,
            duration=sound.duration_s,
            sample_rate=SAMPLE_RATE,
            samples=sound.n_samples,
            base64=sound.data,
        )

    @router.get("/api/presets", response_model_exclude_unset=True)
    async def all_presets() -> dict[str, list[PresetInfo]]:
        presets = await asyncio.to_thread(folders.current)
        return {mode: [_info(mode, loaded) for loaded in found] for mode, found in presets.modes.items()}

    @router.get("/api/presets/{mode}/{preset_id}/audio", response_model_exclude_unset=True, responses=NOT_FOUND)
    async def preset_audio(mode: str, preset_id: str) -> PresetSounds:
        loaded = (await asyncio.to_thread(folders.current)).find(mode, preset_id)
        if loaded is None:
            raise HTTPException(404, f"Preset not found: {mode[:60]}/{preset_id[:60]}")
        preset = loaded.preset
        found = PresetSounds()
        if preset.sounds:
            found.system_content_audio = [await sound_of(loaded, item) for item in preset.sounds]
        if preset.ref_audio is not None:
            found.ref_audio = await sound_of(loaded, preset.ref_audio)
        return found

    @router.get("/api/admin/presets")
    async def preset_report() -> PresetReport:
        presets = await asyncio.to_thread(folders.current)
        return PresetReport(
            folders=[str(folder) for folder in folders.folders],
            modes={mode: len(found) for mode, found in presets.modes.items()},
            problems=list(presets.problems),
        )

    return router


def _info(mode: str, loaded: LoadedPreset) -> PresetInfo:
    preset = loaded.preset
    info = PresetInfo(
        id=preset.id, order=preset.order, name=preset.name, description=preset.description, lang=preset.lang
    )
    if preset.system_prompt is not None:
        info.system_prompt = preset.system_prompt
    if preset.system_content is not None:
        info.system_content = [_part(item, loaded) for item in preset.system_content]
    elif preset.system_prompt is not None and mode in CONTENT_MODES:
        info.system_content = [TextPart(type="text", text=preset.system_prompt)]
    if preset.ref_audio is not None:
        voice = preset.ref_audio
        duration = loaded.sounds[voice.path].duration
        info.ref_audio = VoiceInfo(data=None, path=voice.path, name=voice.name, duration=duration)
    return info


def _part(item: TextItem | AudioItem, loaded: LoadedPreset) -> TextPart | AudioPart:
    if isinstance(item, TextItem):
        return TextPart(type="text", text=item.text)
    duration = loaded.sounds[item.path].duration
    return AudioPart(type="audio", data=None, path=item.path, name=item.name, duration=duration)
