"""A text as speech, with the text-to-speech parts of three stock clients.

    pip install openai soundfile                              # --client openai
    pip install livekit-agents livekit-plugins-openai         # --client livekit
    pip install "pipecat-ai[openai]"                          # --client pipecat
    python examples/speech.py "Good morning." --client livekit --save speech.wav

An agent of LiveKit or Pipecat takes the same object as its `tts`.
"""

import argparse
import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence

from sound_file import save

Speak = Callable[[argparse.Namespace], Coroutine[object, object, bytes]]


async def by_openai(options: argparse.Namespace) -> bytes:
    """The sound by the openai SDK, s16le at 24 kHz."""
    from openai import AsyncOpenAI

    sound = bytearray()
    async with (
        AsyncOpenAI(base_url=options.base_url, api_key=options.api_key) as client,
        client.audio.speech.with_streaming_response.create(
            model=options.model, voice=options.voice, input=options.text, response_format="pcm"
        ) as speech,
    ):
        async for part in speech.iter_bytes():
            sound += part
    return bytes(sound)


async def by_livekit(options: argparse.Namespace) -> bytes:
    """The sound by LiveKit's plugin."""
    from livekit.agents.utils import http_context
    from livekit.plugins import openai

    async with http_context.open():
        tts = openai.TTS(model=options.model, voice=options.voice, base_url=options.base_url, api_key=options.api_key)
        async with tts.synthesize(options.text) as parts:
            sound = [bytes(part.frame.data) async for part in parts]
        await tts.aclose()
    return b"".join(sound)


async def by_pipecat(options: argparse.Namespace) -> bytes:
    """The sound by Pipecat's service in a pipeline."""
    from pipecat.frames.frames import EndFrame, ErrorFrame, Frame, TTSAudioRawFrame, TTSSpeakFrame
    from pipecat.pipeline.pipeline import Pipeline
    from pipecat.pipeline.worker import PipelineParams, PipelineWorker
    from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
    from pipecat.services.openai.tts import OpenAITTSService
    from pipecat.workers.runner import WorkerRunner

    sound, errors = bytearray(), []

    class Sink(FrameProcessor):
        async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
            await super().process_frame(frame, direction)
            if isinstance(frame, TTSAudioRawFrame):
                sound.extend(frame.audio)
            elif isinstance(frame, ErrorFrame):
                errors.append(frame.error)
            await self.push_frame(frame, direction)

    tts = OpenAITTSService(
        api_key=options.api_key,
        base_url=options.base_url,
        settings=OpenAITTSService.Settings(model=options.model, voice=options.voice),
    )
    worker = PipelineWorker(Pipeline([tts, Sink()]), params=PipelineParams(audio_out_sample_rate=24_000))
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    await worker.queue_frames([TTSSpeakFrame(options.text), EndFrame()])
    await runner.run()
    if errors:
        raise SystemExit(errors[0])
    return bytes(sound)


CLIENTS: dict[str, Speak] = {"openai": by_openai, "livekit": by_livekit, "pipecat": by_pipecat}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="what is spoken")
    parser.add_argument("--client", choices=CLIENTS, default="openai")
    parser.add_argument(
        "--model", default="gpt-4o-mini-tts", help="default: %(default)s, an alias of the server's model"
    )
    parser.add_argument("--voice", default="alloy", help="default: %(default)s; Pipecat takes the API's names only")
    parser.add_argument("--save", default="speech.wav", help="where the speech goes; default: %(default)s")
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://localhost:8006/v1"))
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
    options = parser.parse_args(arguments)
    save(options.save, asyncio.run(CLIENTS[options.client](options)))


if __name__ == "__main__":
    main()
