"""What reads clients' input, in this process: for each, how a message is made, and which errors are refusals.

A reader accepts a message or refuses it with one of its errors. Everything else is a finding: another exception, an
error that cannot be sent or is very long, or more than `MAX_CPU_S` for one message.
"""

import binascii
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.fuzz import media
from benchmarks.fuzz.bodies import CHAT_BODY, CONVERSION_PARTS, OMNI_SESSION, SPEECH_BODY
from benchmarks.fuzz.mutations import Mutator
from models.errors import ModelError
from models.inputs.image import EncodedImage, cut, open_image, plan
from server.doors.chat.request import chat_order
from server.doors.conversion.request import conversion_order
from server.doors.core.request_fields import RequestFields
from server.doors.dialects.minicpm_o.client_messages import (
    MESSAGES,
    UNITS,
    InputAppend,
    ModeInit,
    ModeUpdate,
    read_unit,
    voice_sound,
)
from server.doors.dialects.minicpm_o.client_messages import read_message as read_mode_message
from server.doors.dialects.vllm_omni.settings import OmniInput, OmniSettings
from server.doors.errors import ApiError
from server.doors.gpt_live import client_events as gpt_live
from server.doors.live.event_error import EventError, EventRefusedError
from server.doors.live.pictures import check_picture, data_of, n_pixels_of
from server.doors.realtime.events import client_events as realtime
from server.doors.realtime.events.session_patch import SessionPatch, read_patch
from server.doors.realtime.items import item_of
from server.doors.realtime.session_config import RealtimeConfig
from server.doors.speech.request import order_of, speech_order
from server.registry.sound_upload import decoded_sound
from worker.chat.media_parts import MediaDecoder
from worker.config.session import SessionConfig
from worker.protocol.chat_messages import CHAT_REQUESTS, read_chat
from worker.protocol.codec import Reader
from worker.protocol.gateway_messages import RESUME_CLIENT
from worker.protocol.half_duplex_messages import HALF_DUPLEX_CLIENT
from worker.protocol.messages import CLIENT, Spec, read_binary
from worker.protocol.speech_messages import CONVERSION_REQUESTS, SPEAK_CLIENT
from worker.protocol.streaming_messages import STREAMING_CLIENT
from worker.protocol.wire import WireError, clean, json_text, pack_frame, read_object

MAX_CPU_S = 2.0
MAX_ERROR_CHARS = 4000
Data = str | bytes


class FoundError(Exception):
    """What a reader did that it must not. kind: what finds of the same cause have in common."""

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class FuzzTarget:
    """One reader.

    Attributes:
        make: a message.
        read: reads it.
        refusals: errors that refuse a message.
        weight: share of the messages; readers that start programs have little.
    """

    make: Callable[[Mutator], Data]
    read: Callable[[Any], object]
    refusals: tuple[type[Exception], ...]
    weight: float = 1.0

    def check(self, data: Data) -> bool:
        """Returns: whether the message was accepted. Raises: FoundError."""
        began = time.thread_time()
        try:
            self.read(data)
            is_accepted = True
        except self.refusals as error:
            is_accepted = False
            _check_refusal(error)
        except Exception as error:
            raise FoundError(_place(error), f"{type(error).__name__}: {str(error)[:300]}") from error
        if (spent := time.thread_time() - began) > MAX_CPU_S:
            raise FoundError("slow", f"expected at most {MAX_CPU_S} s, got {spent:.1f} s")
        return is_accepted

    def case(self, name: str, seed: int, number: int) -> Data:
        """The message with this number."""
        return self.make(Mutator(random.Random(f"{name}/{seed}/{number}")))


def _check_refusal(error: Exception) -> None:
    """Check that a refusal can be sent to a client."""
    text = str(error)
    if not 0 < len(text) <= MAX_ERROR_CHARS:
        raise FoundError(
            f"length of {_place(error)}", f"expected a text of 1 to {MAX_ERROR_CHARS} characters, got {len(text)}"
        )
    if isinstance(error, ApiError):
        if not 400 <= error.status < 500:
            raise FoundError(f"status of {_place(error)}", f"expected a status of 4xx, got {error.status}")
        json.dumps(error.fields()).encode()
        error.response()
    elif isinstance(error, EventRefusedError):
        json_text(error.error.fields(error.event_id)).encode("utf-8", "replace")
    else:
        clean(text).encode()


def _place(error: Exception) -> str:
    """Type and innermost place of an exception."""
    step, place = error.__traceback__, ""
    while step is not None:
        place = f"{step.tb_frame.f_code.co_filename.rpartition('/')[2]}:{step.tb_lineno}"
        step = step.tb_next
    return f"{type(error).__name__} at {place}"


# --- how messages are made and read -----------------------------------------------------------------


def _of_reader(reader: Reader[Any]) -> Callable[[Mutator], str]:
    classes = list(reader.classes.values())

    def make(mutator: Mutator) -> str:
        return mutator.as_text(mutator.changed(mutator.of_model(mutator.rng.choice(classes))))

    return make


def _of_models(models: Mapping[str, type[Any]]) -> Callable[[Mutator], str]:
    kinds = list(models.items())

    def make(mutator: Mutator) -> str:
        kind, model = mutator.rng.choice(kinds)
        given = mutator.of_model(model)
        return mutator.as_text(mutator.changed(given | {"type": kind} if kind and "type" not in given else given))

    return make


def _of_object(given: Mapping[str, Any]) -> Callable[[Mutator], str]:
    text = json.dumps(given)

    def make(mutator: Mutator) -> str:
        one = json.loads(text)
        for key in list(one):
            if mutator.rng.random() < 0.5 and key not in ("model", "messages", "input"):
                del one[key]
        return mutator.as_text(mutator.changed(one))

    return make


def _binary_unit(mutator: Mutator) -> bytes:
    rng = mutator.rng
    sound, pictures = bytes(2 * rng.choice((0, 1, 160, 1600))), [rng.choice(media.pictures())] * rng.randrange(3)
    header = {"type": "audio_chunk", "audio_bytes": len(sound), "frame_bytes": [len(one) for one in pictures]}
    if rng.random() < 0.5:
        return mutator.damaged(pack_frame({"type": "audio_chunk"}, sound, pictures))
    head = mutator.as_text(mutator.changed(header)).encode("utf-8", "replace")
    return len(head).to_bytes(4, "little") + head + sound + b"".join(pictures)


def _with_media(field: str, files: Callable[[], tuple[bytes, ...]]) -> Callable[[Mutator], str]:
    def make(mutator: Mutator) -> str:
        data = mutator.damaged(mutator.rng.choice(files()))
        return json.dumps({field: binascii.b2a_base64(data, newline=False).decode()})

    return make


def _picture(mutator: Mutator) -> bytes:
    return mutator.damaged(mutator.rng.choice(media.pictures()))


def _media_item(mutator: Mutator) -> str:
    files = media.pictures() + media.sounds()
    kind = mutator.rng.choice(("image", "audio", "video"))
    data = binascii.b2a_base64(mutator.damaged(mutator.rng.choice(files)), newline=False).decode()
    item = {"type": kind, "data": data}
    return json.dumps({"messages": [{"role": "user", "content": [item, {"type": "text", "text": "?"}]}]})


def _read_chat_text(text: str) -> object:
    return read_chat(read_object(text))


def _read_realtime(text: str) -> None:
    event = realtime.read_event(text)
    if isinstance(event, realtime.SessionUpdate):
        RealtimeConfig("m").merged(read_patch(event.session)).described()
    elif isinstance(event, realtime.CreateItem):
        json_text(item_of(event.item).described())


def _read_realtime_session(text: str) -> None:
    json_text(RealtimeConfig("m").merged(read_patch(dict(read_object(text)))).described())


def _read_gpt_live(text: str) -> None:
    event = gpt_live.read_event(text)
    if isinstance(event, gpt_live.GptLiveAppendAudio):
        event.sound()


def _read_mode(text: str) -> None:
    message = read_mode_message(text)
    if isinstance(message, ModeInit | ModeUpdate):
        message.prepare()
        voice_sound(message.voice.ref_audio, "ref_audio")
    elif isinstance(message, InputAppend):
        read_unit(message).chunk()


def _mode_unit(mutator: Mutator) -> str:
    given = mutator.of_model(UNITS.classes["input"]) | {"audio": mutator.sound_text()}
    if mutator.rng.random() < 0.7:
        given.pop("frame_base64_list", None)
    return mutator.as_text(mutator.changed({"type": "input.append", "input": given}))


def _read_omni_settings(text: str) -> None:
    json_text(OmniSettings("m").merged(RequestFields(read_object(text))).shown())


def _read_omni_sound(text: str) -> None:
    given = RequestFields(read_object(text))
    rate = given.whole("rate", 8000, 48_000) or 16_000
    OmniInput().decode(
        given.text("audio", ""), given.choice("form", ("pcm16", "pcm_f32le", "g711_ulaw"), "pcm16"), rate
    )


def _read_speech_config(text: str) -> object:
    return order_of(RequestFields.of_body(text.encode("utf-8", "replace")), default_model="tts")


def _read_settings(text: str) -> None:
    given = read_object(text)
    SessionConfig.of(SessionConfig(), given)[0].model_dump_json()
    SessionConfig().adjusted(given)


def _read_conversion(text: str) -> object:
    given = read_object(text)
    return conversion_order({key: one if isinstance(one, str) else json.dumps(one) for key, one in given.items()})


def _read_picture(data: bytes) -> None:
    image = EncodedImage.of(data)
    cut(image, plan(*image.size, 4))
    open_image(image)


def _read_item_picture(data: bytes) -> None:
    url = "data:image/png;base64," + binascii.b2a_base64(data, newline=False).decode()
    found = data_of(url, "image_url")
    n_pixels_of(found, "image_url")
    check_picture(found, "image_url")


def _read_media(text: str) -> object:
    return MediaDecoder().decode(read_chat(read_object(text)).messages, 2000)


def _binary(spec: Spec) -> Callable[[bytes], object]:
    return lambda data: read_binary(data, spec)


WIRE, API, EVENT = (WireError,), (ApiError, WireError), (EventRefusedError, EventError)
TARGETS: dict[str, FuzzTarget] = {
    "duplex": FuzzTarget(_of_reader(CLIENT), CLIENT.read_text, WIRE, 4),
    "duplex_binary": FuzzTarget(_binary_unit, _binary(Spec(sound_in="pcm16")), WIRE, 2),
    "duplex_float": FuzzTarget(_binary_unit, _binary(Spec(sound_in="float32")), WIRE),
    "settings": FuzzTarget(_of_models({"": SessionConfig}), _read_settings, (ModelError, WireError), 2),
    "resume": FuzzTarget(_of_reader(RESUME_CLIENT), RESUME_CLIENT.read_text, WIRE),
    "half_duplex": FuzzTarget(_of_reader(HALF_DUPLEX_CLIENT), HALF_DUPLEX_CLIENT.read_text, WIRE, 2),
    "chat": FuzzTarget(_of_reader(CHAT_REQUESTS), _read_chat_text, WIRE, 2),
    "streaming": FuzzTarget(_of_reader(STREAMING_CLIENT), STREAMING_CLIENT.read_text, WIRE),
    "speak": FuzzTarget(_of_reader(SPEAK_CLIENT), SPEAK_CLIENT.read_text, WIRE),
    "conversion_request": FuzzTarget(_of_reader(CONVERSION_REQUESTS), CONVERSION_REQUESTS.read_text, WIRE),
    "realtime": FuzzTarget(_of_models(realtime.KINDS), _read_realtime, EVENT, 4),
    "realtime_session": FuzzTarget(
        _of_models({"realtime": SessionPatch}), _read_realtime_session, (*EVENT, WireError), 2
    ),
    "gpt_live": FuzzTarget(
        _of_models({model.__name__: model for model in gpt_live.AnyEvent.__args__}), _read_gpt_live, EVENT, 3
    ),
    "minicpm_o": FuzzTarget(_of_reader(MESSAGES), _read_mode, WIRE, 2),
    "minicpm_o_unit": FuzzTarget(_mode_unit, _read_mode, WIRE),
    "vllm_omni_session": FuzzTarget(_of_object(OMNI_SESSION), _read_omni_settings, API, 2),
    "vllm_omni_sound": FuzzTarget(
        _of_object({"audio": "AAAA", "form": "pcm16", "rate": 8000}), _read_omni_sound, API
    ),
    "chat_completions": FuzzTarget(
        lambda mutator: _of_object(CHAT_BODY)(mutator).encode("utf-8", "replace"),
        lambda data: chat_order(data, lambda _: None),
        API,
        3,
    ),
    "speech": FuzzTarget(
        lambda mutator: _of_object(SPEECH_BODY)(mutator).encode("utf-8", "replace"), speech_order, API, 2
    ),
    "speech_config": FuzzTarget(_of_object(SPEECH_BODY | {"type": "session.config"}), _read_speech_config, API),
    "conversion": FuzzTarget(_of_object(CONVERSION_PARTS), _read_conversion, API),
    "picture": FuzzTarget(_picture, _read_picture, (ModelError,), 0.3),
    "item_picture": FuzzTarget(_picture, _read_item_picture, EVENT, 0.3),
    "upload": FuzzTarget(
        _with_media("audio", media.sounds),
        lambda text: decoded_sound(json.loads(text)["audio"]),
        (ModelError,),
        0.002,
    ),
    "chat_media": FuzzTarget(_media_item, _read_media, (ModelError, WireError), 0.005),
}  # fmt: skip
