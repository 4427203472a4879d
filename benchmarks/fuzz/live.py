"""Nearly valid messages at every door of a running gateway, and at the sockets of its worker.

`python -m benchmarks.fuzz.live --messages 100000 --seed 3`. One client, the neighbour, repeats a conversation. Its
decisions, texts and numbers of samples must be those without other clients; samples may differ by rounding, since the
vocoder pads windows of a batch. Found are also: errors `internal` and `engine`, HTTP status 500, connections that the
server ends without a close frame, errors in the logs, a process that ends, and slots that stay in use. Messages repeat
with the seed, their order at the server does not.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import websockets

from benchmarks.fuzz import media
from benchmarks.fuzz.mutations import Mutator
from benchmarks.fuzz.readers import TARGETS, Data
from benchmarks.serve.processes import ServedProgram, free_port
from clients.duplex import connect
from worker.config.access import ClientLimits
from worker.protocol.messages import Partial, Result, Spec

SLOTS = 16
SOUND_TOLERANCE = 1e-4
BURST, QUIET_S, ANSWER_S, CLOSE_S, SETTLE_S = 30, 0.3, 4.0, 30.0, 60.0
LOG_LINES = 40  # of a found error
NEIGHBOUR_UNITS = 8
BROKEN = re.compile(r'"(code|type)": ?"(internal|internal_error|engine)"')
ABNORMAL, INTERNAL = 1006, 1011
PREPARE = {"type": "prepare", "config": {"max_new_speak_tokens_per_chunk": 4, "force_listen_count": 0}}


@dataclass(frozen=True)
class FuzzDoor:
    """A WebSocket. targets: whose messages it gets. opening: a valid first message; None: there is none."""

    path: str
    targets: tuple[str, ...]
    opening: dict[str, Any] | None = None
    of_worker: bool = False


DOORS = {
    "duplex": FuzzDoor("/ws/duplex/fuzz", ("duplex", "duplex_binary", "resume"), PREPARE),
    "half_duplex": FuzzDoor("/ws/half_duplex/fuzz", ("half_duplex",), {"type": "prepare"}),
    "chat": FuzzDoor("/ws/chat", ("chat", "chat_media")),
    "streaming": FuzzDoor("/ws/streaming", ("streaming",)),
    "resumed": FuzzDoor("/ws/duplex/fuzz?resume=1", ("resume", "duplex")),
    "realtime": FuzzDoor("/v1/realtime", ("realtime",)),
    "gpt_live": FuzzDoor("/v1/live/sessions", ("gpt_live",), {"type": "session.start", "session": {"model": "MODEL"}}),
    "minicpm_o": FuzzDoor("/v1/realtime?mode=video", ("minicpm_o", "minicpm_o_unit"), {"type": "session.init"}),
    "vllm_omni": FuzzDoor("/v1/duplex", ("realtime", "vllm_omni_session"), {"type": "session.update", "session": {}}),
    "speech_text": FuzzDoor("/v1/audio/speech/stream", ("speech_config", "speak")),
    "worker_duplex": FuzzDoor("/ws/duplex", ("duplex", "duplex_binary"), PREPARE, True),
    "worker_half_duplex": FuzzDoor("/ws/half_duplex", ("half_duplex",), {"type": "prepare"}, True),
    "worker_chat": FuzzDoor("/ws/chat", ("chat",), None, True),
}
NeighbourUnit = tuple[bool, str, np.ndarray]  # whether it listens, its text, its samples
# Method, path, target of the body, content type.
ROUTES = (
    ("POST", "/v1/chat/completions", "chat_completions", "application/json"),
    ("POST", "/v1/audio/speech", "speech", "application/json"),
    ("POST", "/v1/audio/conversions", "picture", "multipart/form-data; boundary=b"),
    ("POST", "/v1/realtime/client_secrets", "realtime_session", "application/json"),
    ("POST", "/v1/realtime/sessions", "realtime_session", "application/json"),
    ("POST", "/v1/realtime/calls", "sdp", "application/sdp"),
    ("POST", "/v1/live/sessions", "gpt_live", "application/json"),
    ("POST", "/api/chat", "chat", "application/json"),
    ("POST", "/api/assets/ref_audio", "voice", "application/json"),
    ("POST", "/api/streaming/stop", "duplex", "application/json"),
    ("POST", "/api/half_duplex/stop", "duplex", "application/json"),
    ("PUT", "/api/config/eta", "settings", "application/json"),
    ("POST", "/api/sessions/fuzz/comment", "duplex", "application/json"),
    ("POST", "/api/sessions/fuzz/upload-recording", "picture", "multipart/form-data; boundary=b"),
    ("GET", "/api/queue/", "", ""),
    ("GET", "/api/presets/", "", ""),
    ("GET", "/api/sessions/", "", ""),
    ("DELETE", "/api/assets/ref_audio/", "", ""),
    ("GET", "/v1/models/", "", ""),
)
SDP = (
    "v=0\r\no=- 1 2 IN IP4 127.0.0.1\r\ns=-\r\nt=0 0\r\na=group:BUNDLE 0\r\nm=audio 9 UDP/TLS/RTP/SAVPF 111\r\n"
    "c=IN IP4 0.0.0.0\r\na=rtcp:9 IN IP4 0.0.0.0\r\na=ice-ufrag:abcd\r\na=ice-pwd:abcdefghijklmnopqrstuv\r\n"
    "a=fingerprint:sha-256 " + ":".join(["AB"] * 32) + "\r\na=setup:actpass\r\na=mid:0\r\na=sendrecv\r\na=rtcp-mux\r\n"
    "a=rtpmap:111 opus/48000/2\r\n"
)


class LiveFuzz:
    """One run.

    Args:
        gateway, worker: the processes.
        n_messages: messages and requests of all doors together.
        seed: of the messages.

    Attributes:
        counts: messages by door.
        ends: how connections ended, as `door code reason`, and statuses of requests.
        found: what must not be, in words.
    """

    def __init__(self, gateway: ServedProgram, worker: ServedProgram, n_messages: int, seed: int):
        self._gateway, self._worker, self._n, self._seed = gateway, worker, n_messages, seed
        self.counts, self.ends, self._numbers = Counter[str](), Counter[str](), Counter[str]()
        self.found: list[str] = []
        self._worst = 0.0
        self._model = httpx.get(f"{self._http(gateway)}/v1/models", trust_env=False).json()["data"][0]["id"]

    async def run(self) -> dict[str, Any]:
        expected = await self._neighbour()
        self._compare(expected, await self._neighbour())
        n_same = 0
        fuzzing = [asyncio.create_task(self._socket(name, door)) for name, door in DOORS.items()]
        fuzzing += [asyncio.create_task(self._requests())]
        waiting = asyncio.gather(*fuzzing)
        while not waiting.done():
            self._compare(expected, await self._neighbour())
            n_same += 1
            print(
                f"{sum(self.counts.values())} messages, {n_same} conversations beside them", file=sys.stderr, flush=True
            )
        await waiting
        await self._settle()
        return {
            "messages": dict(self.counts),
            "neighbour": {"conversations": n_same, "units": len(expected), "worst_sample": self._worst},
            "ends": dict(self.ends.most_common()),
            "found": self.found,
        }

    @property
    def _has_more(self) -> bool:
        return sum(self.counts.values()) < self._n and len(self.found) < 20

    @staticmethod
    def _http(program: ServedProgram) -> str:
        return f"http://127.0.0.1:{program.port}"

    def _compare(self, expected: list[NeighbourUnit], got: list[NeighbourUnit]) -> None:
        for number, (one, other) in enumerate(zip(expected, got, strict=True)):
            if one[:2] != other[:2] or len(one[2]) != len(other[2]):
                self.found.append(f"neighbour, unit {number}: expected {one}, got {other}")
            self._worst = max(self._worst, float(np.abs(one[2] - other[2]).max(initial=0)))
        if self._worst > SOUND_TOLERANCE:
            self.found.append(f"neighbour: expected samples within {SOUND_TOLERANCE}, got {self._worst:.3g}")

    async def _neighbour(self) -> list[NeighbourUnit]:
        """The units of one conversation."""
        rng, units = np.random.default_rng(5), []
        config = {"force_listen_count": 0, "seed": 7, "window": {"high_tokens": 150, "low_tokens": 100}}
        async with connect(f"ws://127.0.0.1:{self._gateway.port}", "adx_neighbour") as client:
            await client.prepare(config=config, spec=Spec(sound_in="pcm16", sound_out="pcm16"))
            for number in range(NEIGHBOUR_UNITS):
                await client.send_unit(
                    (0.1 * rng.standard_normal(16_000)).astype(np.float32), force_speak=number % 3 > 0
                )
                sound = [np.zeros(0, np.float32)]
                async for message in client:
                    if isinstance(message, Partial | Result) and message.audio_data:
                        sound.append(message.audio_data.samples("sound"))
                    if isinstance(message, Result):
                        units.append((message.is_listen, message.text, np.concatenate(sound)))
                        break
            await client.stop()
        if len(units) != NEIGHBOUR_UNITS:
            self.found.append(f"neighbour: expected {NEIGHBOUR_UNITS} results, got {len(units)}")
        return units

    # --- sockets ------------------------------------------------------------------------------

    def _next(self, target: str) -> tuple[int, Data]:
        number = self._numbers[target]
        self._numbers[target] += 1
        if target == "sdp":
            return number, Mutator(random.Random(f"sdp/{self._seed}/{number}")).damaged(SDP.encode())
        if target == "voice":
            data = TARGETS["upload"].case("upload", self._seed, number)
            return number, json.dumps({"name": f"v{number}", "audio_base64": json.loads(data)["audio"]})
        return number, TARGETS[target].case(target, self._seed, number)

    async def _socket(self, name: str, door: FuzzDoor) -> None:
        """Connections to one door, one after another."""
        program = self._worker if door.of_worker else self._gateway
        url = f"ws://127.0.0.1:{program.port}{door.path}".replace("/fuzz", f"/{name}")
        connection = 0
        while self._has_more:
            connection += 1
            last: deque[str] = deque(maxlen=5)
            try:
                async with websockets.connect(
                    url, compression=None, max_size=None, proxy=None, close_timeout=2
                ) as socket:
                    await self._burst(socket, name, door, last, is_open=connection % 4 > 0)
                    ended = socket.close_code  # by the server: the client has not closed yet
                    if connection % 3 == 0:
                        socket.transport.abort()
            except (OSError, websockets.InvalidHandshake) as error:
                self.ends[f"{name} {type(error).__name__} {str(error)[:60]}"] += 1
                await asyncio.sleep(0.2)
                continue
            self.ends[f"{name} {socket.close_code} {socket.close_reason}"] += 1
            if ended == ABNORMAL or socket.close_code == INTERNAL:
                got = f"{socket.close_code} {socket.close_reason!r}"
                self.found.append(f"{name}: expected another close code, got {got} after {list(last)}")

    async def _burst(
        self, socket: websockets.ClientConnection, name: str, door: FuzzDoor, last: deque[str], *, is_open: bool
    ) -> None:
        heard_at = time.monotonic()

        async def hear() -> None:
            nonlocal heard_at
            with suppress(websockets.ConnectionClosed):
                async for message in socket:
                    heard_at = time.monotonic()
                    if isinstance(message, str) and BROKEN.search(message):
                        self.found.append(f"{name}: got {message[:500]} after {list(last)}")

        hearing = asyncio.create_task(hear())
        try:
            if door.opening is not None and is_open:
                await socket.send(json.dumps(door.opening).replace("MODEL", self._model))
            for i in range(BURST):
                target = door.targets[i % len(door.targets)]
                number, data = self._next(target)
                last.append(f"{target} {number}: {data[:200]!r}")
                await socket.send(data if isinstance(data, bytes) else data.encode("utf-8", "replace").decode())
                self.counts[name] += 1
            end = time.monotonic() + ANSWER_S
            while time.monotonic() < min(end, heard_at + QUIET_S) and not hearing.done():
                await asyncio.sleep(QUIET_S / 3)
        except websockets.ConnectionClosed:
            pass
        finally:
            hearing.cancel()

    # --- requests -----------------------------------------------------------------------------

    async def _requests(self) -> None:
        """Requests to the routes, one after another."""
        number = 0
        async with httpx.AsyncClient(base_url=self._http(self._gateway), trust_env=False, timeout=60) as http:
            while self._has_more:
                method, path, target, kind = ROUTES[number % len(ROUTES)]
                number += 1
                which, data = self._next(target or "duplex")
                body = data if isinstance(data, bytes) else data.encode("utf-8", "replace")
                if not target:
                    path, body = path + quote(body[:60]), b""
                if kind.startswith("multipart"):
                    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
                    body = head + body + (b"\r\n--b--\r\n" if number % 3 else b"")
                try:
                    answer = await http.request(
                        method, path, content=body, headers={"content-type": kind} if kind else {}
                    )
                except httpx.HTTPError as error:
                    self.found.append(f"{method} {path}: expected an answer to {target} {which}, got {error!r}")
                    continue
                self.counts["http"] += 1
                self.ends[f"{method} {path if target else path.rpartition('/')[0]} {answer.status_code}"] += 1
                if answer.status_code >= 500 and answer.status_code != 503:
                    self.found.append(
                        f"{method} {path}: {target} {which}: got {answer.status_code} {answer.text[:300]}"
                    )

    # --- the end ------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Look for slots in use, errors in the logs and ended processes."""
        end = time.monotonic() + SETTLE_S
        async with httpx.AsyncClient(base_url=self._http(self._gateway), trust_env=False) as http:
            while True:
                ready = (await http.get("/readyz")).json()
                if ready["free_slots"] == ready["total_slots"] and not ready["queue_length"]:
                    break
                if time.monotonic() > end:
                    self.found.append(f"at the end: expected all slots to be free, got {ready}")
                    break
                await asyncio.sleep(1)
        for program in (self._gateway, self._worker):
            if not program.process.is_running():
                self.found.append(f"{program.name}: expected it to run, got its end")
            lines = program.log.splitlines()
            errors = [number for number, line in enumerate(lines) if " ERROR " in line or "Traceback" in line]
            for number in errors[:10]:
                text = "\n".join(line[:300] for line in lines[max(0, number - 2) : number + LOG_LINES])
                self.found.append(f"log of {program.name}:\n{text}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz.live", description=__doc__.split("\n")[0])
    parser.add_argument("--messages", type=int, default=10_000, help="messages and requests of all doors together")
    parser.add_argument("--seed", type=int, default=0, help="repeats the same messages")
    parser.add_argument("--json", help="result file")
    options = parser.parse_args(arguments)
    media.pictures(), media.sounds()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        environ = {
            "DUOLOGUE_SERVICE_DATA_DIR": folder,
            "DUOLOGUE_SERVICE_RESUME_GRACE_S": "2",
            **{
                f"DUOLOGUE_SERVICE_LIMITS_{name.upper()}": "100000"
                for name in ClientLimits.model_fields
                if name.endswith("_per_s")
            },
        }
        flags = ("--port", "0", "--max-sessions", str(SLOTS), "--no-compile", "--device", "cpu")
        worker = stack.enter_context(ServedProgram("worker.main", *flags, environ=environ))
        worker.wait_ready(state="IDLE")
        flags = ("--port", str(free_port()), "--workers", f"127.0.0.1:{worker.port}", "--log-dir", folder)
        gateway = stack.enter_context(ServedProgram("server.main", *flags, environ=environ))
        gateway.wait_ready("/readyz", ready=True)
        result = asyncio.run(LiveFuzz(gateway, worker, options.messages, options.seed).run())
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    sys.exit(1 if result["found"] else 0)


if __name__ == "__main__":
    main()
