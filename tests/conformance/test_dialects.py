"""The dialects at the path of Realtime sessions, with a real worker."""

import base64
import io

import websockets
from PIL import Image

from tests.conformance.servers import Servers
from tests.server.doors.dialects.minicpm_o.mode_client import connect, samples_of, wav_text
from tests.server.doors.dialects.vllm_omni.omni_client import SOUND, TRANSCRIPT, OmniClient
from tests.server.live_gateway import run


def picture() -> str:
    """A JPEG picture in base64."""
    file = io.BytesIO()
    Image.new("RGB", (64, 48), (200, 30, 30)).save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


def test_mode_sessions_hear_see_and_speak(servers: Servers) -> None:
    async def scenario() -> None:
        client = await connect(servers.gateway, "mode=video")
        voice = {"ref_audio": wav_text(1.0)}
        await client.created(system_prompt="Be brief.", config={"force_listen_count": 0}, voice=voice)
        listened = await client.unit(video_frames=[picture()], force_listen=True, max_slice_nums=1)
        assert listened["kind"] == "listen" and listened["metrics"]["vision_slices"] == 1
        assert listened["chunk_usage"]["image_rows"] > 0 and listened["usage"]["context_tokens"] > 0
        spoken = await client.unit(force_speak=True)
        assert spoken["kind"] in ("text", "audio") and spoken["response_id"] == listened["response_id"]
        await client.socket.close()

        client = await connect(servers.gateway, "mode=chat")
        await client.created(system_prompt="Be brief.")
        messages = [{"role": "user", "content": "Hello"}]
        given = {"messages": messages, "streaming": False, "tts": {"enabled": True}}
        await client.send("input.append", input={**given, "generation": {"max_new_tokens": 4}})
        done = await client.receive("response.done")
        assert done["text"] and done["metrics"]["input_tokens"] > 0
        assert done["metrics"]["n_tts_tokens"] and len(samples_of(done["audio"]))
        await client.send("session.close")
        assert await client.closed() == ("stopped", 1000)

    run(scenario)


def test_duplex_sessions_see_and_speak(servers: Servers) -> None:
    async def scenario() -> None:
        url = f"ws://127.0.0.1:{servers.gateway}/v1/realtime?duplex=1&autostart=0"
        async with websockets.connect(url, compression=None, proxy=None, max_size=None) as socket:
            client = OmniClient(socket)
            ref_audio = f"data:audio/wav;base64,{wav_text(1.0)}"
            await client.begin(instructions="Be brief.", ref_audio=ref_audio, temperature=0.5)
            await client.append(video_frames=[f"data:image/jpeg;base64,{picture()}"])
            await client.send("response.create", response={})
            await client.until(SOUND)
            await client.send("response.cancel")
            done = (await client.until("response.done"))["response"]
            assert done["status"] in ("cancelled", "completed") and TRANSCRIPT in client.kinds()
            await client.until("response.listen")
            assert "error" not in client.kinds()
            await client.send("session.close")
            await client.until("session.closed")

    run(scenario)
