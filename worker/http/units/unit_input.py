"""Sound and pictures of one unit, from the client's messages to the engine, and their limits."""

import logging
import re
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from models.errors import ImageError, SettingsError
from models.inputs.image import EncodedImage
from worker.decoding import DecodingThreads
from worker.early.trial import EarlyTrial
from worker.http.inbox import AheadPicture, WaitingFrames, WaitingPicture
from worker.http.units.unsent_sound import UnsentSound
from worker.loop.audio_buffer import checked
from worker.loop.results import DecidedUnit, UnitResult
from worker.loop.session_handle import CutImage, SessionHandle
from worker.protocol.codes import ErrorCode
from worker.protocol.gateway_messages import Decided
from worker.protocol.half_duplex_messages import SpeechChunk
from worker.protocol.messages import MAX_UNIT_PICTURES, MAX_UNIT_PIXELS, AudioChunk, ClientMessage
from worker.protocol.wire import WireError

LOG = logging.getLogger(__name__)
DECIDED_FIRST = re.compile(r'\s*\{\s*"type"\s*:\s*"decided"')
LONG_SOUND = 2**18  # samples; longer sound is checked on a thread
SHORT_BYTES = 2**16  # of encoded sound, which is decoded in less time than a thread takes to begin


async def send_unit(
    decoders: DecodingThreads,
    handle: SessionHandle,
    unsent: UnsentSound,
    chunk: AudioChunk,
    frames: Sequence[WaitingPicture],
    early: EarlyTrial | None,
    decided: DecidedUnit | None = None,
    *,
    may_hold: bool,
) -> "Future[None] | UnitResult":
    """Send a unit, or a piece of one, to the engine; a piece that fills no unit may be held and answered instead.

    The caller then calls `unsent.sent`, or `unsent.refused` after an exception, also one of the future.

    Args:
        decoders: threads that decode long sound, and pictures one after the other.
        handle: the session.
        unsent: pieces of the unit that are held; changed.
        chunk: the unit, or a piece of one.
        frames: pictures that came before the chunk.
        early: the permission to run the unit early; None: it runs when it is full.
        decided: the unit's decisions, which are replayed; None: the model decides.
        may_hold: no earlier unit of the session is in flight.
    Returns: the result of a piece that is held, or a future that is done when the engine has the unit.
    Raises: as `unpacked_unit` and `SessionHandle.send`.
    """
    is_short = not (frames or chunk.frame_base64_list) and len(chunk.audio_base64.data) <= SHORT_BYTES
    unpacked = unpacked_unit(chunk, frames) if is_short else await decoders.run(unpacked_unit, chunk, frames)
    samples, pictures = unpacked
    limits = _slice_limits(handle, chunk, frames, len(pictures))
    cut: list[CutImage] = []
    for number, (picture, limit) in enumerate(zip(pictures, limits, strict=True)):
        ahead = frames[number].ahead if number < len(frames) else None
        if ahead is not None and ahead.limit == limit:
            cut.append(ahead.slices)
        else:
            cut.append(await decoders.run_sized(picture.n_pixels, partial(handle.cut, picture, limit)))
    if may_hold and not (early or decided or chunk.close_early):
        result = unsent.hold(handle, samples, cut)
        if result is not None:
            return result
    send = partial(
        handle.send,
        samples,
        cut,
        force_listen=chunk.force_listen,
        force_speak=chunk.force_speak,
        close_early=chunk.close_early or (decided is not None and decided.close_early),
        early=early if decided is None else None,
        decided=decided,
        earlier=unsent.take(),
    )
    return await decoders.run(send) if len(samples) > LONG_SOUND else send()


def decided_message(unit: DecidedUnit) -> Decided:
    """The message from which `decided_unit` reads a unit's decisions."""
    fields = unit._asdict()
    lists = {name: list(fields[name]) for name in ("sampled", "remembered", "spoken", "unvoiced")}
    return Decided(**{**fields, **lists})


def check_decided(message: ClientMessage, data: str | bytes) -> None:
    """Raises: WireError unknown_type for decisions that are not written as the gateway writes them.

    The gateway refuses a client's by the type at the start of the text; other fields or another type must not hide it.
    """
    if isinstance(message, Decided) and (isinstance(data, bytes) or not DECIDED_FIRST.match(data)):
        raise WireError(ErrorCode.UNKNOWN_TYPE, "message.type", expected="a message of clients", got=message.type)


def decided_unit(message: Decided) -> DecidedUnit:
    """The decisions of a unit that is to be rebuilt."""
    return DecidedUnit(**message.model_dump(exclude={"type"}))


async def decode_ahead(
    decoders: DecodingThreads, handle: SessionHandle, frames: WaitingFrames, frame: WaitingPicture
) -> None:
    """Decode a picture that waits for its chunk and let the engine encode it, within the limits of a unit.

    A picture that cannot be decoded is refused with its chunk.
    """
    done = frames.ahead
    if sum(len(one.slices) for one in done) >= handle.max_early_slices:
        return
    try:
        limit = handle.slice_limits(1, frame.message.max_slice_nums)[0]
        opened = await decoders.run(lambda: EncodedImage.of(frame.message.picture()))
        if opened.n_pixels + sum(one.opened.n_pixels for one in done) <= MAX_UNIT_PIXELS:
            slices = await decoders.run_sized(opened.n_pixels, partial(handle.send_ahead, opened, limit))
            frame.ahead = AheadPicture(opened, limit, slices)
    except (WireError, ImageError, SettingsError) as error:
        LOG.debug("a picture is not decoded before its unit: %s", error)


def _slice_limits(
    handle: SessionHandle, chunk: AudioChunk, frames: Sequence[WaitingPicture], n_pictures: int
) -> list[int]:
    """Most slices of each picture of a unit: its own, or what the chunk says. Raises: SettingsError."""
    own = [one.message.max_slice_nums for one in frames] + [None] * (n_pictures - len(frames))
    of_chunk = iter(handle.slice_limits(own.count(None), chunk.max_slice_nums))
    return [next(of_chunk) if limit is None else handle.slice_limits(1, limit)[0] for limit in own]


def unpacked_unit(chunk: AudioChunk, frames: Sequence[WaitingPicture]) -> tuple[np.ndarray, list[EncodedImage]]:
    """The sound, [n] float32 at 16 kHz, and the pictures, whose headers are valid and whose pixels are not decoded.

    Slow with pictures or long sound: call on a thread then. Arguments as in `send_unit`.
    Raises: WireError bad_base64, bad_audio, bad_image, too_large; AudioError; ImageError.
    """
    _check_number(len(frames) + len(chunk.frame_base64_list))
    encoded = [one.message.picture() if one.ahead is None else one.ahead.opened for one in frames]
    encoded += chunk.pictures()
    return checked(chunk.samples()), _opened(encoded)


def unpacked_pictures(chunk: SpeechChunk) -> list[EncodedImage]:
    """The pictures of a half-duplex message, whose headers are valid and whose pixels are not decoded.

    Slow: call on a thread. Raises: WireError bad_base64, bad_image, too_large; ImageError.
    """
    _check_number(len(chunk.frame_base64_list))
    return _opened(chunk.pictures())


def _check_number(n_pictures: int) -> None:
    if n_pictures > MAX_UNIT_PICTURES:
        raise _too_large(f"at most {MAX_UNIT_PICTURES} pictures in a unit", n_pictures)


def _opened(encoded: Sequence[bytes | EncodedImage]) -> list[EncodedImage]:
    pictures = [one if isinstance(one, EncodedImage) else EncodedImage.of(one) for one in encoded]
    n_pixels = sum(picture.n_pixels for picture in pictures)
    if n_pixels > MAX_UNIT_PIXELS:
        raise _too_large(f"at most {MAX_UNIT_PIXELS} pixels in the pictures of a unit", n_pixels)
    return pictures


def _too_large(expected: str, got: int) -> WireError:
    return WireError(ErrorCode.TOO_LARGE, "audio_chunk.frame_base64_list", expected=expected, got=got)
