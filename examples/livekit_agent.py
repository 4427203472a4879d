"""A conversation through the LiveKit Agents plugin for OpenAI, without a room: a sound file in, a sound file out.

    pip install "livekit-agents[openai]" soundfile soxr
    python examples/livekit_agent.py assets/ref_audio/default.wav --save reply.wav

An agent in a room uses the same model: `AgentSession(llm=realtime_model(base_url, api_key))`.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterable, Sequence

import aiohttp
from livekit import rtc
from livekit.agents.llm import GenerationCreatedEvent, RealtimeModelError, RealtimeSession
from livekit.plugins import openai
from openai.types.realtime.realtime_audio_input_turn_detection import SemanticVad
from sound_file import BLOCK_S, RATE, read_blocks, save


def realtime_model(
    base_url: str, api_key: str, http: aiohttp.ClientSession | None = None
) -> openai.realtime.RealtimeModel:
    """The server's model as a LiveKit realtime model, which decides itself when it speaks."""
    return openai.realtime.RealtimeModel(
        model="gpt-realtime",
        base_url=base_url,
        api_key=api_key,
        turn_detection=SemanticVad(type="semantic_vad"),
        http_session=http,
    )


async def push(session: RealtimeSession, blocks: list[bytes]) -> None:
    """Send the sound as fast as a microphone would."""
    for block in blocks:
        session.push_audio(rtc.AudioFrame(block, RATE, 1, len(block) // 2))
        await asyncio.sleep(BLOCK_S)


async def show(texts: AsyncIterable[str]) -> None:
    """Print a reply's text as it comes."""
    async for text in texts:
        print(text, end="", flush=True)


async def converse(options: argparse.Namespace) -> bytes:
    """One answer. Returns: its sound, s16le at 24 kHz."""
    replies: asyncio.Queue[GenerationCreatedEvent | Exception] = asyncio.Queue()
    sound, limit = bytearray(), int(options.limit * RATE) * 2
    async with aiohttp.ClientSession() as http:
        model = realtime_model(options.base_url, options.api_key, http)
        session = model.session()
        session.on("generation_created", replies.put_nowait)
        session.on("error", lambda event: replies.put_nowait(_failure(event)))
        await session.update_instructions(options.instructions)
        pushing = asyncio.create_task(push(session, read_blocks(options.input)))
        if options.ask:
            await pushing
            reply: GenerationCreatedEvent | Exception = await session.generate_reply()
        else:
            reply = await replies.get()
        if isinstance(reply, Exception):
            raise SystemExit(str(reply))
        async for message in reply.message_stream:
            printing = asyncio.create_task(show(message.text_stream))
            async for frame in message.audio_stream:
                is_short = len(sound) < limit
                sound += bytes(frame.data)
                if is_short and len(sound) >= limit:
                    session.interrupt()
            await printing
        print()
        pushing.cancel()
        await session.aclose()
        await model.aclose()
    return bytes(sound)


def _failure(event: RealtimeModelError) -> Exception:
    return event.error


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="sound file")
    parser.add_argument("--save", default="reply.wav", help="where the answer goes")
    parser.add_argument("--limit", type=float, default=20, help="longest answer, in s; then it is cancelled")
    parser.add_argument("--ask", action="store_true", help="ask for an answer instead of waiting for one")
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://localhost:8006/v1"))
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
    parser.add_argument("--instructions", default="You are a helpful assistant.")
    options = parser.parse_args(arguments)
    save(options.save, asyncio.run(converse(options)))


if __name__ == "__main__":
    main()
