"""One Realtime session: what each event of the client does. Contains no socket and no worker connection."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import ValidationError

from server.access.identity import Identity
from server.access.shares import run_shared
from server.doors.core.chat_turn import ChatTurns
from server.doors.core.picture_urls import PictureUrls
from server.doors.core.transcriber import Transcriber
from server.doors.errors import ApiError
from server.doors.live.event_error import EventError, of_validation
from server.doors.live.sound.unit_buffer import MAX_SAMPLES, UNIT_SAMPLES
from server.doors.live.sound.wire_sound import SoundInput, SoundOutput
from server.doors.live.truncation import SlotWindow
from server.doors.realtime.engine_settings import EngineSettings
from server.doors.realtime.events import client_events as events
from server.doors.realtime.events.server_events import EventSender
from server.doors.realtime.events.session_patch import read_patch
from server.doors.realtime.item_media import ItemMedia, media_of
from server.doors.realtime.item_texts import text_of
from server.doors.realtime.items import Conversation, ConversationItem, item_of, new_id
from server.doors.realtime.lane_duplex import DuplexLane
from server.doors.realtime.lane_turn import MAX_S, MAX_TRACK_S, TurnLane
from server.doors.realtime.playback import SoundTrack, TrackPlayback
from server.doors.realtime.response_options import config_of_response
from server.doors.realtime.responses import CancelReason, RealtimeResponse, ResponseEnd, ResponseShape
from server.doors.realtime.session_config import RealtimeConfig, TurnDetection
from server.doors.realtime.turn_answers import TurnAnswers
from server.doors.realtime.turns.input_transcriptions import InputTranscriptions
from server.doors.realtime.turns.overflow import Overflow
from server.doors.realtime.turns.user_turns import UserTurns
from server.doors.voices import VoiceNames
from worker.protocol.text_messages import InsertText

LOG = logging.getLogger(__name__)
UNITS_S = MAX_SAMPLES // UNIT_SAMPLES  # of sound that may wait for units
LARGE_SOUND = 2**18  # bytes, from which on sound is converted on a thread
Json = dict[str, Any]


@dataclass(frozen=True)
class SessionContext:
    """What a session uses.

    voices: names of voices. turns, transcriber: of all doors. identity: whose session it is. expires_at: Unix s.
    slot: context of the deployment's slots. clock: monotonic s. rate_limits: what is left of the limits of its key.
    picture_urls: fetches pictures from allowed hosts.
    """

    voices: VoiceNames
    turns: ChatTurns
    transcriber: Transcriber
    identity: Identity
    expires_at: int
    clock: Callable[[], float]
    slot: SlotWindow = field(default_factory=SlotWindow)
    rate_limits: Callable[[], list[Json]] = list
    picture_urls: PictureUrls = field(default_factory=PictureUrls)


class RealtimeSession:
    """One session's state.

    Args:
        send: sends events.
        config: settings at the start.
        context: what it uses.
        track: plays the session's sound; None: the client gets it in events.
    """

    def __init__(
        self, send: EventSender, config: RealtimeConfig, context: SessionContext, track: SoundTrack | None = None
    ):
        self.id = new_id("sess")
        self.playback = None if track is None else TrackPlayback(send, track)
        self._transcripts = InputTranscriptions(send, context.transcriber, context.identity, self.id)
        self.config = config = self._transcripts.configure(self._on_track(config))
        self.conversation = Conversation()
        self.response: RealtimeResponse | None = None
        self._last_response_id = ""
        self._send, self._context = send, context
        self._voice: str | None = None  # registered voice for `config.voice`
        self._override: tuple[RealtimeConfig, str | None] | None = None  # of the open response, with its voice
        self._turns = UserTurns(send, self.conversation, self._transcripts)
        self._input, self._output = SoundInput(config.input_format), SoundOutput(config.output_format)
        self._has_spoken = False
        self._overflow = Overflow(context.clock)
        self.lane = DuplexLane(self, self._turns, config.turn_detection or TurnDetection(), context.clock)
        self.lane.detector.keep_in(self._transcripts.heard)
        self._turn_lane = TurnLane(MAX_S if track is None else MAX_TRACK_S)
        self._answers = TurnAnswers(context.turns, context.identity, self._on_answer_end, context.clock)
        self.lane_changed = asyncio.Event()
        self._handlers: dict[type[events.ClientEvent | events.AppendAudio], Callable[[Any], Awaitable[None]]] = {
            events.SessionUpdate: self._on_session_update,
            events.AppendAudio: self._on_append,
            events.CommitAudio: self._on_commit,
            events.ClearAudio: self._on_clear,
            events.ClearOutput: self._on_clear_output,
            events.CreateItem: self._on_create_item,
            events.RetrieveItem: self._on_retrieve_item,
            events.DeleteItem: self._on_delete_item,
            events.TruncateItem: self._on_truncate_item,
            events.CreateResponse: self._on_create_response,
            events.CancelResponse: self._on_cancel_response,
        }

    async def begin(self) -> None:
        """Send `session.created`. Raises: EventError for an unknown voice."""
        self._voice = await self._voice_of(self.config.voice)
        self._send("session.created", session=self.described())

    @property
    def is_duplex(self) -> bool:
        """Whether the session is in the duplex lane, which needs a slot all the time."""
        return self.config.turn_detection is not None

    def stop(self) -> None:
        """The session is over: send nothing any more, and drop what refers to the session."""
        self.lane.stop()
        self._answers.stop()
        self._transcripts.stop()
        del self.lane, self._answers, self._handlers

    def described(self) -> Json:
        """The session object."""
        return {**self.config.described(), "id": self.id, "expires_at": self._context.expires_at}

    async def handle(self, event: events.ClientEvent | events.AppendAudio) -> bool:
        """React to an event; an error that it causes is sent. Returns: whether it caused none."""
        try:
            await self._handlers[type(event)](event)
        except EventError as error:
            self._send.error(error, event.event_id)
            return False
        return True

    def history(self) -> list[InsertText]:
        """The conversation as texts, for a new context."""
        return [text for item in self.conversation if (text := text_of(item)) is not None]

    # --- the session and its input -------------------------------------------------------------

    async def _on_session_update(self, event: events.SessionUpdate) -> None:
        patch = read_patch(event.session)
        config = self._on_track(self.config.merged(patch, has_spoken=self._has_spoken))
        detection, was_duplex = config.turn_detection, self.is_duplex
        voice = await self._voice_of(config.voice)
        if (detection is not None) != was_duplex and self.response is not None:
            message = "session.audio.input.turn_detection: expected no active response, got one"
            raise EventError("conversation_already_has_active_response", message)
        before, self.config, self._voice = self.config, self._transcripts.configure(config), voice
        if config.input_format != before.input_format:
            self._input = SoundInput(config.input_format)
        if detection is not None and detection != before.turn_detection:
            self.lane.configure(detection)
        self.lane.refresh()
        if self.is_duplex != was_duplex:
            self._turns.reset()
            self.lane.detector.forget()
            self._turn_lane.clear()
            self.lane_changed.set()
        self._send("session.updated", session=self.described())

    async def _voice_of(self, name: str, owner: str = "session") -> str | None:
        try:
            return await run_shared(self._context.voices.resolve, name)
        except ApiError as error:
            raise EventError("invalid_value", error.message, f"{owner}.audio.output.voice") from None

    def append_sound(self, samples: np.ndarray) -> None:
        """Add sound of the client's track, [n] float32 at 16 kHz."""
        self._turns.append(len(samples) / 16)
        if self.is_duplex:
            self.lane.append(samples)
        else:
            self._turn_lane.append(samples)

    def add_frame(self, jpeg: bytes) -> None:
        """Add a picture of the client's video track to the unit that is being filled."""
        if self.is_duplex:
            self.lane.add_picture(jpeg, 1)

    async def _on_append(self, event: events.AppendAudio) -> None:
        if self.playback is not None:
            raise EventError("invalid_value", "input_audio_buffer.append: expected sound in the call's track only")
        push, sound = self._input.push, event.sound
        samples = await run_shared(push, sound) if len(sound) > LARGE_SOUND else push(sound)
        self._turns.append(len(samples) / 16)
        if self.is_duplex:
            self.lane.append(samples)
        elif dropped := self._turn_lane.append(samples):
            self.report_overflow(dropped)

    async def _on_commit(self, _: events.CommitAudio) -> None:
        end_ms = round(self.lane.detector.pushed_ms)
        self._turns.commit(None if self.is_duplex else self._turn_lane.take, end_ms)

    async def _on_clear(self, _: events.ClearAudio) -> None:
        self._turns.clear()
        self._input.reset()
        self._turn_lane.clear()
        self._send("input_audio_buffer.cleared")

    async def _on_clear_output(self, _: events.ClearOutput) -> None:
        if self.playback is not None:
            self.playback.cut()
        else:  # sound is sent as it is made: there is nothing to drop
            self._send("output_audio_buffer.cleared", response_id=self._last_response_id)

    # --- items ---------------------------------------------------------------------------------

    async def _on_create_item(self, event: events.CreateItem) -> None:
        item = item_of(event.item)
        self.conversation.check_new(item, event.previous_item_id)
        media = await self._media_of(event.item)
        before = self.conversation.insert(item, event.previous_item_id)
        shown = item.described()
        self._send("conversation.item.added", previous_item_id=before, item=shown)
        self._send("conversation.item.done", previous_item_id=before, item=shown)
        item.parts = [part.model_copy(update={"image_url": None}) for part in item.parts]
        if not self.is_duplex:
            item.pictures, item.sound = [data for data, _ in media.pictures], media.sound
            return
        for data, slices in media.pictures:
            self.lane.add_picture(data, slices)
        if media.sound is not None and item.role == "user":
            self.lane.append(media.sound)
            self._turns.committed_ms = self.lane.detector.pushed_ms
        if (text := text_of(item)) is not None:
            self.lane.add_text(text)

    async def _media_of(self, given: events.GivenItem) -> ItemMedia:
        context = self._context
        return await media_of(given, self.config.input_format, context.slot.max_slices, context.picture_urls)

    async def _on_retrieve_item(self, event: events.RetrieveItem) -> None:
        item = self.conversation.find(event.item_id, "item_retrieve_invalid_item_id")
        self._send("conversation.item.retrieved", item=item.described())

    async def _on_delete_item(self, event: events.DeleteItem) -> None:
        self.conversation.delete(event.item_id)
        self._transcripts.cancel(event.item_id)
        self._send("conversation.item.deleted", item_id=event.item_id)

    async def _on_truncate_item(self, event: events.TruncateItem) -> None:
        item = self.conversation.find(event.item_id, "item_truncate_invalid_item_id")
        if item.role != "assistant" or event.content_index != 0:
            raise EventError("invalid_value", "item_id: expected the first part of an item of the assistant", "item_id")
        if event.audio_end_ms > item.sent_ms + 1:
            message = f"audio_end_ms: expected at most {item.sent_ms:.0f}, got {event.audio_end_ms}"
            raise EventError("invalid_value", message, "audio_end_ms")
        item.cut(event.audio_end_ms)
        fields = {"item_id": item.id, "content_index": 0, "audio_end_ms": event.audio_end_ms}
        self._send("conversation.item.truncated", **fields)

    # --- responses -----------------------------------------------------------------------------

    async def _on_create_response(self, event: events.CreateResponse) -> None:
        options = event.response or events.ResponseOptions()
        config = self._on_track(config_of_response(self.config, options))
        is_aside = options.conversation == "none"
        if self._answers.is_full:
            raise EventError("too_many_responses", "response.create: expected fewer responses at the same time")
        items = None if options.input is None else await self._items_of(options.input)
        voice = self._voice if config.voice == self.config.voice else await self._voice_of(config.voice, "response")
        if not is_aside and self.response is not None:
            message = f"Conversation already has an active response: {self.response.id}"
            raise EventError("conversation_already_has_active_response", message)
        if self.is_duplex and not is_aside and items is None:
            if (refusal := self.lane.refusal) is not None:
                raise refusal
            self._override = (config, voice)
            self._open_response(config, options.metadata, is_asked=True, with_message=not config.tools)
            self.lane.ask(has_options=config != self.config)
            return
        asked = list(self.conversation) if items is None else items
        if is_aside:
            shape = ResponseShape.of(config, options.metadata, in_conversation=False)
            response = self._new_response(shape, is_asked=True)
            response.begin(with_message=not config.tools)
        else:
            response = self._open_response(config, options.metadata, is_asked=True, with_message=not config.tools)
            if self.is_duplex:
                self.lane.step_aside()
        response.is_chat = True
        self._answers.start(response, config, voice, asked)

    async def _items_of(self, given: list[Json]) -> list[ConversationItem]:
        """The items of `response.input`, which may name items of the conversation. Raises: EventError."""
        items = []
        for one in given:
            if one.get("type") == "item_reference":
                items.append(self.conversation.find(str(one.get("id")), "invalid_value", "response.input"))
                continue
            try:
                parsed = events.GivenItem.model_validate(one)
            except ValidationError as error:
                raise of_validation(error, "response.input") from None
            item = item_of(parsed)
            media = await self._media_of(parsed)
            item.pictures, item.sound = [data for data, _ in media.pictures], media.sound
            items.append(item)
        return items

    def _on_track(self, config: RealtimeConfig) -> RealtimeConfig:
        """The settings with the one format that sound has beside a track."""
        return config if self.playback is None else replace(config, input_format="audio/pcm", output_format="audio/pcm")

    async def _on_cancel_response(self, event: events.CancelResponse) -> None:
        response_id = event.response_id or (None if self.response is None else self.response.id)
        if response_id is not None:
            if self._answers.cancel(response_id, "client_cancelled"):
                return
            if self.response is not None and self.response.id == response_id:
                self.lane.cancel("client_cancelled")
                return
        raise EventError("response_cancel_not_active", "Cancellation failed: no active response found")

    def _on_answer_end(self, response: RealtimeResponse, end: ResponseEnd) -> None:
        self._has_spoken = self._has_spoken or response.sent_ms > 0
        if response is self.response:
            self.finish_response(end)
        else:
            self._finish(response, end)

    # --- what the lane asks for ----------------------------------------------------------------

    def engine_settings(self, listen_scale: float, has_side_lane: bool) -> EngineSettings:
        """What the engine must be set to for the next unit, see `LaneHost`."""
        config, voice = self._override or (self.config, self._voice)
        slot = self._context.slot
        return EngineSettings.of(config, voice, listen_scale=listen_scale, slot=slot, has_side_lane=has_side_lane)

    def begin_response(self, *, with_message: bool = True) -> RealtimeResponse:
        """Open a response that the model has begun by itself. with_message: false for a call of a function."""
        return self._open_response(self.config, None, is_asked=False, with_message=with_message)

    def _open_response(
        self, config: RealtimeConfig, metadata: dict[str, str] | None, *, is_asked: bool, with_message: bool = True
    ) -> RealtimeResponse:
        shape = ResponseShape.of(config, metadata)
        self._output = SoundOutput(config.output_format, config.speed)
        self.response = self._new_response(shape, is_asked=is_asked)
        self._last_response_id = self.response.id
        self.response.begin(with_message=with_message)
        return self.response

    def _new_response(self, shape: ResponseShape, *, is_asked: bool) -> RealtimeResponse:
        return RealtimeResponse(self._send, self.conversation, shape, is_asked=is_asked, playback=self.playback)

    @property
    def is_playing(self) -> bool:
        """Whether the server plays sound, which may go on after its response is done."""
        return self.playback is not None and self.playback.is_playing

    def stop_playback(self) -> None:
        """Drop sound that was not played."""
        if self.playback is not None and self.playback.is_playing:
            self.playback.cut()

    def add_sound(self, response: RealtimeResponse, pcm16: bytes) -> None:
        """Send sound of the engine."""
        self._has_spoken = True
        response.add_sound(self._output.push(pcm16))

    def cancel_response(self, reason: CancelReason) -> None:
        """End the open response now, if there is one."""
        if self.response is not None and not self._answers.cancel(self.response.id, reason):
            self.lane.cancel(reason)

    def finish_response(self, end: ResponseEnd) -> None:
        """Close the open response."""
        response, self.response, self._override = self.response, None, None
        if response is not None:
            if end.is_whole:
                response.add_sound(self._output.finish())
            self._finish(response, end)

    def _finish(self, response: RealtimeResponse, end: ResponseEnd) -> None:
        response.finish(end)
        self._send("rate_limits.updated", rate_limits=self._context.rate_limits())

    def report(self, error: EventError) -> None:
        """Send an error that no event of the client has caused alone."""
        self._send.error(error)

    def report_overflow(self, n_samples: int) -> None:
        """Sound was dropped, because too much waits."""
        max_s = UNITS_S if self.is_duplex else MAX_S
        if (error := self._overflow.add(n_samples, max_s)) is not None:
            self._send.error(error)
