"""The file of a traced session: one JSON object a line, arrays as compressed base64.

The first line is the header. Each further line is a command of the session or an outcome, in the order in which the
engine executed or emitted them. Contains no engine.
"""

import base64
import hashlib
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.errors import ModelError
from models.inputs.image import ImagePatches
from models.token2wav.voice.voice import Voice
from worker.early.trial import EarlyEnd
from worker.loop.prompt.system_prompt import SystemPrompt

FORMAT, VERSION = "duologue-trace", 1
OUTCOMES = ("result", "failure", "inserted")
CONTENT = ("decided", "sound", "frames", "prompt", "voice", "ids", "text", "texts", "error", "rows", "top")
DTYPES = ("float32", "int64", "uint8", "pcm16")
MAX_ARRAY_BYTES = 1 << 28
LEVEL_SAMPLES = 240  # 10 ms
SHOWN_LOGITS = 4

Record = dict[str, Any]
# Receives functions that make a record, so that packing happens on another thread than the engine's; None at the end.
Sink = Callable[[Callable[[], Record] | None], None]


class TraceError(ModelError, ValueError):
    """A trace file that cannot be used."""


@dataclass(frozen=True)
class Trace:
    """A traced session.

    Attributes:
        header: format, model, device, versions and the engine's settings.
        commands: in the order of execution; `at`: progress of the session, see `TraceRecorder`.
        outcomes: one for each unit and inserted text.
    """

    header: Record
    commands: list[Record]
    outcomes: list[Record]

    @classmethod
    def of(cls, records: list[Record]) -> "Trace":
        """A trace of its lines. Raises: TraceError."""
        header = records[0] if records else {}
        if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
            got = f"{header.get('format')} {header.get('version')}"
            raise TraceError("trace", expected=f"a first line with {FORMAT} {VERSION}", got=got)
        if header.get("stripped"):
            raise TraceError("trace", expected="one with content", got="a copy without content, which cannot run")
        commands: list[Record] = []
        outcomes: list[Record] = []
        waiting: deque[Record] = deque()
        for record in records[1:]:
            if record["kind"] not in OUTCOMES:
                commands.append(dict(record))
                if record["kind"] in ("unit", "text"):
                    waiting.append(commands[-1])
                continue
            outcomes.append(record)
            ended = waiting.popleft() if waiting else {}
            if record.get("early") == EarlyEnd.COMMITTED:
                ended["close_early"] = True  # as its early run did
        return cls(header, commands, outcomes)


def read_records(path: Path) -> list[Record]:
    """The lines of a trace file. A last line that a crash has cut is left out. Raises: TraceError; OSError."""
    lines, records = path.read_bytes().split(b"\n"), []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise TraceError(f"{path}: line {number}", expected="a JSON object", got=repr(line[:40])) from None
        if not isinstance(record, dict) or (number > 1 and not isinstance(record.get("kind"), str)):
            raise TraceError(f"{path}: line {number}", expected="an object with a kind", got=repr(line[:40]))
        records.append(record)
    return records


def stripped(records: list[Record]) -> Iterator[Record]:
    """The same lines without sound, pictures, voices, texts and ids: settings, sizes, times and decisions stay."""
    for number, record in enumerate(records):
        kept = {name: value for name, value in record.items() if name not in CONTENT}
        yield {**kept, "stripped": True} if number == 0 else kept


def to_line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"


# --- arrays ---------------------------------------------------------------------------------------


def pack(array: np.ndarray) -> Record:
    """A float32, int64 or uint8 array; sound that 16 bits hold exactly takes 16 bits."""
    dtype, data = str(array.dtype), array
    if dtype == "float32" and array.ndim == 1:
        scaled = array * np.float32(32768)
        if np.array_equal(scaled, np.rint(scaled).clip(-32768, 32767)):
            dtype, data = "pcm16", scaled.astype(np.int16)
    packed = base64.b64encode(zlib.compress(np.ascontiguousarray(data).tobytes())).decode()
    return {"dtype": dtype, "shape": list(array.shape), "data": packed}


def unpack(value: Record) -> np.ndarray:
    """The array. Raises: TraceError."""
    try:
        dtype, shape = value["dtype"], tuple(int(n) for n in value["shape"])
        if dtype not in DTYPES or min(shape, default=0) < 0:
            raise ValueError(dtype)
        kind = np.dtype("int16" if dtype == "pcm16" else dtype)
        size = prod(shape) * kind.itemsize
        if size > MAX_ARRAY_BYTES:
            raise ValueError(shape)
        data = zlib.decompressobj().decompress(base64.b64decode(value["data"]), size + 1)
        array = np.frombuffer(data, kind).reshape(shape)
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise TraceError("array of a trace", expected=f"one of {', '.join(DTYPES)}", got=str(error)) from None
    return array.astype(np.float32) / np.float32(32768) if dtype == "pcm16" else array.copy()


def pack_frames(frames: list[list[ImagePatches]]) -> list[list[Record]]:
    names = ("pixels", "position_ids", "coords")
    return [
        [{"rows": part.rows, "cols": part.cols, **{name: pack(getattr(part, name)) for name in names}} for part in one]
        for one in frames
    ]


def unpack_frames(frames: list[list[Record]]) -> list[list[ImagePatches]]:
    return [
        [
            ImagePatches(
                unpack(part["pixels"]),
                part["rows"],
                part["cols"],
                unpack(part["position_ids"]),
                unpack(part["coords"]),
            )
            for part in one
        ]
        for one in frames
    ]


def pack_voice(voice: Voice | None) -> Record | None:
    names = ("speech_tokens", "mel", "speaker")
    return None if voice is None else {name: pack(getattr(voice, name).numpy()) for name in names}


def unpack_voice(voice: Record | None) -> Voice | None:
    return None if voice is None else Voice(**{name: torch.from_numpy(unpack(part)) for name, part in voice.items()})


def pack_prompt(prompt: SystemPrompt | None) -> Record | None:
    if prompt is None:
        return None
    sound = None if prompt.ref_audio is None else pack(prompt.ref_audio)
    voice = pack_voice(prompt.voice)
    return {"prefix": prompt.prefix, "suffix": prompt.suffix, "ref_audio": sound, "voice": voice}


def unpack_prompt(prompt: Record | None) -> SystemPrompt | None:
    if prompt is None:
        return None
    sound = None if prompt["ref_audio"] is None else unpack(prompt["ref_audio"])
    return SystemPrompt(prompt["prefix"], prompt["suffix"], sound, unpack_voice(prompt["voice"]))


# --- what is compared -------------------------------------------------------------------------------


def digest(*arrays: np.ndarray) -> str:
    """Equal for arrays that are equal to the last bit."""
    data = hashlib.sha256()
    for array in arrays:
        data.update(f"{array.dtype}{array.shape}".encode())
        data.update(np.ascontiguousarray(array).tobytes())
    return data.hexdigest()[:16]


def top_logits(logits: np.ndarray) -> list[list[float]]:
    """The largest logits as [id, value]."""
    largest = np.argsort(-logits, kind="stable")[:SHOWN_LOGITS]
    return [[int(index), round(float(logits[index]), 4)] for index in largest]


def levels(pcm: np.ndarray) -> list[float]:
    """RMS of each 10 ms of a sound."""
    padded = np.pad(pcm, (0, -len(pcm) % LEVEL_SAMPLES)).reshape(-1, LEVEL_SAMPLES)
    return [round(float(level), 5) for level in np.sqrt((padded.astype(np.float64) ** 2).mean(1))]
