"""A Pipecat pipeline with the server as its speech-to-speech model: a sound file in, a sound file out.

    pip install "pipecat-ai[openai]" soundfile soxr
    python examples/pipecat_agent.py assets/ref_audio/default.wav --save reply.wav

A pipeline with a transport places `transport.input()` and `transport.output()` where this one has the file.
"""

import argparse
import asyncio
import os
from collections.abc import Sequence

from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    Frame,
    InputAudioRawFrame,
    LLMRunFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.realtime.events import (
    AudioConfiguration,
    AudioInput,
    SemanticTurnDetection,
    SessionProperties,
)
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner
from sound_file import BLOCK_S, RATE, read_blocks, save


class ReplySound(FrameProcessor):
    """Keeps the sound of the first reply.

    Args:
        limit: longest reply in s; then it is interrupted.

    Attributes:
        sound: s16le at 24 kHz.
        done: set when the reply ends.
    """

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = int(limit * RATE) * 2
        self.sound, self.done, self.error = bytearray(), asyncio.Event(), ""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        match frame:
            case TTSAudioRawFrame() if not self.done.is_set():
                is_short = len(self.sound) < self._limit
                self.sound += frame.audio
                if is_short and len(self.sound) >= self._limit:
                    await self.broadcast_interruption()
                    self.done.set()
            case TTSTextFrame():
                print(frame.text, end="", flush=True)
            case TTSStoppedFrame():
                self.done.set()
            case ErrorFrame():
                self.error = frame.error
                self.done.set()
        await self.push_frame(frame, direction)


def realtime_service(base_url: str, api_key: str, instructions: str) -> OpenAIRealtimeLLMService:
    """The server as a Pipecat service, which decides itself when it speaks. base_url: ws://host:port/v1/realtime."""
    return OpenAIRealtimeLLMService(
        api_key=api_key,
        base_url=base_url,
        settings=OpenAIRealtimeLLMService.Settings(
            system_instruction=instructions,
            session_properties=SessionProperties(
                audio=AudioConfiguration(input=AudioInput(turn_detection=SemanticTurnDetection()))
            ),
        ),
    )


async def converse(options: argparse.Namespace) -> bytes:
    """One answer. Returns: its sound, s16le at 24 kHz."""
    reply = ReplySound(options.limit)
    pair = LLMContextAggregatorPair(LLMContext())
    service = realtime_service(options.base_url, options.api_key, options.instructions)
    worker = PipelineWorker(
        Pipeline([pair.user(), service, reply, pair.assistant()]),
        params=PipelineParams(audio_in_sample_rate=RATE, audio_out_sample_rate=RATE),
    )
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    for block in read_blocks(options.input):
        await worker.queue_frame(InputAudioRawFrame(audio=block, sample_rate=RATE, num_channels=1))
        await asyncio.sleep(BLOCK_S)
    if options.ask:
        await worker.queue_frame(LLMRunFrame())
    await asyncio.wait_for(reply.done.wait(), options.timeout)
    print()
    await worker.queue_frame(EndFrame())
    await running
    if reply.error:
        raise SystemExit(reply.error)
    return bytes(reply.sound)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="sound file")
    parser.add_argument("--save", default="reply.wav", help="where the answer goes")
    parser.add_argument("--ask", action="store_true", help="ask for an answer instead of waiting for one")
    parser.add_argument("--base-url", default="ws://localhost:8006/v1/realtime")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
    parser.add_argument("--instructions", default="You are a helpful assistant.")
    parser.add_argument("--limit", type=float, default=20, help="longest answer, in s; then it is interrupted")
    parser.add_argument("--timeout", type=float, default=60, help="longest wait for the end of the reply, in s")
    options = parser.parse_args(arguments)
    save(options.save, asyncio.run(converse(options)))


if __name__ == "__main__":
    main()
