"""Pixels of pictures in messages of the server's own protocol."""

import asyncio
import json

import pytest

from benchmarks.serve.fake_worker import FakeWorker
from tests.server.live.pictures import paced_pixels, png, png_text
from tests.server.live_gateway import ANSWER_S, CHUNK, connect_to, run, running_gateway
from worker.protocol.wire import json_text, pack_frame


def messages() -> list[tuple[str | bytes, list[int]]]:
    """Messages with the pixels of their pictures. The largest picture takes half a second to make."""
    text, large = png_text(20, 30), png_text(8193, 8192)
    return [
        (json_text({"type": "video_frame", "frame": text}), [600]),
        ('{"type":"video\\u005fframe","frame":"' + text + '"}', [600]),
        (json_text({**CHUNK, "frame_base64_list": [text, "AAAA", text]}), [1200]),
        (json.dumps({**CHUNK, "video_frames": ["data:image/png;base64," + text]}), [600]),
        (pack_frame({"type": "audio_chunk"}, b"", [png(20, 30), png(2, 3)]), [606]),
        (json_text({"type": "video_frame", "frame": large}), [0]),
        (json_text({**CHUNK, "frame_base64_list": []}), []),
        (pack_frame({"type": "audio_chunk"}, bytes(8)), []),
        ("[]", []),
    ]


def test_pictures_are_counted_before_the_worker_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture that the worker refuses without decoding has no pixels."""
    counted, sent = paced_pixels(monkeypatch, "server.live.picture_pace"), messages()

    async def scenario() -> None:
        async with FakeWorker() as worker, running_gateway(worker) as gateway:
            client = await (await connect_to(gateway.port)).prepared()
            for message, _ in sent:
                await client.send(message)
            await client.send({"type": "stop"})
            async with asyncio.timeout(ANSWER_S):
                while json.loads(await client.receive_raw())["type"] != "stopped":
                    pass
            assert counted == [n for _, pixels in sent for n in pixels]

    run(scenario)
