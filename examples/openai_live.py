"""A full-duplex conversation with the openai SDK: both sides share one timeline, and the model decides when it speaks.

    pip install openai soundfile soxr
    python examples/openai_live.py assets/ref_audio/default.wav --save reply.wav

The saved sound has the length of the conversation, silence included. With `--say` the model is given a text to say
after the file.
"""

import argparse
import asyncio
import base64
import os
from collections.abc import Sequence

from openai import AsyncOpenAI
from openai.resources.live.live import AsyncLiveConnection
from sound_file import BLOCK, BLOCK_S, RATE, read_blocks, save

SILENCE = bytes(BLOCK * 2)


async def speak(connection: AsyncLiveConnection, options: argparse.Namespace) -> None:
    """Send the file as fast as a microphone would, then silence, and close the session."""
    for block in read_blocks(options.input):
        await connection.session.input_audio.append(audio=base64.b64encode(block).decode())
        await asyncio.sleep(BLOCK_S)
    if options.say:
        await connection.session.commentary.append(content=options.say, delegation_id=None)
    for _ in range(int(options.limit / BLOCK_S)):
        await connection.session.input_audio.append(audio=base64.b64encode(SILENCE).decode())
        await asyncio.sleep(BLOCK_S)
    await connection.session.close()


async def converse(options: argparse.Namespace) -> bytes:
    """Speak a file and listen. Returns: all sound of the session, s16le at 24 kHz."""
    client = AsyncOpenAI(base_url=options.base_url, api_key=options.api_key)
    sound = bytearray()
    async with client.live.connect() as connection:
        await connection.session.start(
            session={
                "model": options.model,
                "instructions": options.instructions,
                "audio": {"format": {"type": "audio/pcm", "rate": RATE}},
            }
        )
        speaking = None
        async for event in connection:
            match event.type:
                case "session.started":
                    speaking = asyncio.create_task(speak(connection, options))
                case "session.output_audio.delta":
                    sound += base64.b64decode(event.delta)
                case "session.output_transcript.delta":
                    print(event.delta, end="", flush=True)
                case "session.closed":
                    print()
                    break
                case "error":
                    raise SystemExit(event.error.message)
        if speaking is not None:
            await speaking
    return bytes(sound)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="sound file")
    parser.add_argument("--save", default="reply.wav", help="where the session's sound goes")
    parser.add_argument("--say", help="a text that the model says after the file")
    parser.add_argument("--limit", type=float, default=10, help="how long to listen after the file, in s")
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://localhost:8006/v1"))
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
    parser.add_argument("--model", default="gpt-live-1")
    parser.add_argument("--instructions", default="You are a helpful assistant.")
    options = parser.parse_args(arguments)
    save(options.save, asyncio.run(converse(options)))


if __name__ == "__main__":
    main()
