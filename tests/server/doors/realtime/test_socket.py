"""Realtime sessions over real sockets, with a worker that follows a cycle of listening and speaking."""

import base64
import itertools

from benchmarks.serve.fake_worker import FakeWorker
from tests.server.doors.realtime.realtime_client import RealtimeClient, realtime, silence
from tests.server.live_gateway import run, running_gateway

SPOKEN = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio_transcript.delta",
    "response.output_audio.delta",
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
    "conversation.item.done",
    "response.output_item.done",
    "response.done",
    "rate_limits.updated",
]


def collapsed(kinds: list[str]) -> list[str]:
    """Types without repetitions, and deltas of sound and text in turn as one pair."""
    kinds = [kind for kind, _ in itertools.groupby(kinds)]
    found: list[str] = []
    for kind in kinds:
        if not (kind.endswith(".delta") and kind in found):
            found.append(kind)
    return found


async def spoken_turn(client: RealtimeClient) -> None:
    """Send sound until the model has spoken."""
    await client.append(silence(4.0))
    await client.until("rate_limits.updated")


def test_a_spoken_turn_sends_its_events_in_order() -> None:
    async def scenario() -> None:
        async with FakeWorker(n_listen=1, n_speak=2) as worker, running_gateway(worker) as gateway:
            async with realtime(gateway.port) as client:
                await spoken_turn(client)
                assert collapsed(client.kinds("response.created")) == SPOKEN
                ids = [event["event_id"] for event in client.log]
                assert len(set(ids)) == len(ids)
                spoken = [event for event in client.log if event["type"] == "response.output_audio.delta"]
                sound = [base64.b64decode(event["delta"]) for event in spoken]
                assert sum(map(len, sound)) == 2 * 2 * 24_000 and max(map(len, sound)) <= 12_000
                [done] = [event["response"] for event in client.log if event["type"] == "response.done"]
                text = "".join(
                    event["delta"] for event in client.log if event["type"].endswith("audio_transcript.delta")
                )
                assert done["status"] == "completed" and done["usage"]["input_token_details"]["audio_tokens"] > 0
                assert done["output"][0]["content"] == [{"type": "output_audio", "transcript": text}]
            await gateway.wait_idle()

    run(scenario)
