"""The prompt and the voice that a client's messages ask for. Slow: voices are made here, so call on a thread."""

from dataclasses import replace

from worker.loop.prompt.system_prompt import Adjustment, SystemPrompt
from worker.protocol.adjust_messages import Adjust
from worker.protocol.messages import Prepare, Spec
from worker.service import Service


def prepared_prompt(service: Service, message: Prepare) -> SystemPrompt:
    """The system prompt with its voices.

    Raises: SettingsError for an unknown name; AudioError; WireError bad_base64, bad_audio.
    """
    if message.ref_audio_path is not None:
        prompted = service.reference(named=message.ref_audio_path)
    else:
        prompted = service.reference(samples=message.ref_audio())
    spoken = prompted
    if message.tts_ref_audio_base64:
        spoken = service.reference(samples=message.tts_ref_audio())
    ref_audio = None if prompted is None else prompted.audio_16k
    return SystemPrompt.of(message.system_prompt, ref_audio, None if spoken is None else spoken.voice)


def traced_spec(service: Service, session: str, spec: Spec, notes: list[str]) -> Spec:
    """The options in force, with a note if the client asks for a trace and none is recorded. session: its name."""
    loaded = service.loaded
    is_traced = loaded is not None and loaded.engine.trace(session, spec.trace)
    if spec.trace and not is_traced:
        notes.append("spec.trace has no effect: this server records no traces (service.record_traces)")
    return spec.model_copy(update={"trace": is_traced})


def adjustment(service: Service, message: Adjust, held: SystemPrompt) -> Adjustment:
    """What an `adjust` changes beside settings.

    Args:
        held: the session's prompt now; parts that the message does not name stay.
    Raises: as `prepared_prompt`.
    """
    prompted = spoken = None
    if message.ref_audio_path is not None:
        prompted = spoken = service.reference(named=message.ref_audio_path)
    elif message.ref_audio_base64:
        prompted = spoken = service.reference(samples=message.ref_audio())
    if message.tts_ref_audio_base64:
        spoken = service.reference(samples=message.tts_ref_audio())
    prompt = held
    if prompted is not None:
        prompt = replace(prompt, ref_audio=prompted.audio_16k)
    if message.system_prompt is not None:
        prompt = SystemPrompt.of(message.system_prompt, prompt.ref_audio)
    return Adjustment(prompt=None if prompt is held else prompt, voice=None if spoken is None else spoken.voice)
