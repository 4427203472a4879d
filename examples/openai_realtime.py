"""A voice conversation with the openai SDK: speak a sound file to the server, save what it answers.

    pip install openai soundfile soxr
    python examples/openai_realtime.py assets/ref_audio/default.wav --save reply.wav

The model decides when it answers; with `--ask` the program asks for an answer after the file.
"""

import argparse
import asyncio
import base64
import os
from collections.abc import Sequence

from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from sound_file import BLOCK_S, RATE, read_blocks, save


async def speak(connection: AsyncRealtimeConnection, blocks: list[bytes], ask: bool) -> None:
    """Send the sound as fast as a microphone would."""
    for block in blocks:
        await connection.input_audio_buffer.append(audio=base64.b64encode(block).decode())
        await asyncio.sleep(BLOCK_S)
    if ask:
        await connection.response.create()


async def converse(options: argparse.Namespace) -> bytes:
    """One question, one answer. Returns: the answer's sound, s16le at 24 kHz."""
    client = AsyncOpenAI(base_url=options.base_url, api_key=options.api_key)
    sound, limit = bytearray(), int(options.limit * RATE) * 2
    async with client.realtime.connect(model=options.model) as connection:
        turns = {"type": "semantic_vad", "create_response": not options.ask}
        await connection.session.update(
            session={
                "type": "realtime",
                "instructions": options.instructions,
                "audio": {"input": {"turn_detection": turns}},
            }
        )
        speaking = asyncio.create_task(speak(connection, read_blocks(options.input), options.ask))
        async for event in connection:
            match event.type:
                case "response.output_audio.delta":
                    is_short = len(sound) < limit
                    sound += base64.b64decode(event.delta)
                    if is_short and len(sound) >= limit:
                        await connection.response.cancel()
                case "response.output_audio_transcript.delta":
                    print(event.delta, end="", flush=True)
                case "response.done":
                    print()
                    break
                case "error":
                    raise SystemExit(event.error.message)
        speaking.cancel()
    return bytes(sound)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="sound file")
    parser.add_argument("--save", default="reply.wav", help="where the answer goes")
    parser.add_argument("--limit", type=float, default=20, help="longest answer, in s; then it is cancelled")
    parser.add_argument("--ask", action="store_true", help="ask for an answer instead of waiting for one")
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://localhost:8006/v1"))
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
    parser.add_argument("--model", default="gpt-realtime")
    parser.add_argument("--instructions", default="You are a helpful assistant.")
    options = parser.parse_args(arguments)
    save(options.save, asyncio.run(converse(options)))


if __name__ == "__main__":
    main()
