"""The doors for stock clients: waits of one session, CPU time of a unit, many sessions in one gateway, sound quality.

`python -m benchmarks.doors --help` lists the options; README.md explains the tables. Each part starts its own gateway
and worker. Arguments after `--` go to a real worker, which then takes the place of the one without a model.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import report
from benchmarks.doors import calls
from benchmarks.doors.adapter import adapter_ms
from benchmarks.doors.client_processes import speech_pcm16
from benchmarks.doors.load import STALL_MS, client_python, stock_row
from benchmarks.doors.probes import answered_ms, asked_waits_ms, barge_in_ms, engine_first_sound_ms
from benchmarks.doors.resampling import snr_rows
from benchmarks.serve.processes import ROOT, ServedProgram, free_port

FAKE, WORKER, GATEWAY = "benchmarks.serve.fake_worker", "worker.main", "benchmarks.doors.timed_gateway"
QUIET_S = 4.0  # of silence after the speech that clients of a load repeat
SPEAK_UNITS = 8  # of an asked response, so that it is open while it is cancelled
Json = dict[str, Any]


class Bound(NamedTuple):
    """The target of a figure."""

    at_most: float | None = None
    at_least: float | None = None

    def holds(self, value: float) -> bool:
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    def __str__(self) -> str:
        return f"at least {self.at_least:g}" if self.at_most is None else f"at most {self.at_most:g}"


BOUNDS = {
    "first sound above the engine's, ms": Bound(at_most=60),
    "cancel to response.done, ms": Bound(at_most=100),
    "speech confirmed to response.done, ms": Bound(at_most=100),
    "adapter of a unit, CPU ms": Bound(at_most=1),
    "longest callback, ms": Bound(at_most=STALL_MS),
    "longest callback, CPU ms": Bound(at_most=STALL_MS),
    "24 to 16 to 24 kHz, dB": Bound(at_least=60),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doors", description="Times the doors.")
    parser.add_argument("--parts", default=USUAL, help=f"of {','.join(PARTS)}; default: all but calls")
    parser.add_argument("--rounds", type=int, default=20, help="responses of `asked`, `barge_in` and `answered`")
    parser.add_argument("--units", type=int, default=700, help="units of `adapter`")
    parser.add_argument("--think-ms", type=float, default=40.0, help="duration of a unit of the worker without a model")
    parser.add_argument("--sessions", default="64", help="numbers of stock sessions, separated by commas")
    parser.add_argument("--seconds", type=float, default=60.0, help="sound of each stock session")
    parser.add_argument("--chunk-ms", default="20,100", help="lengths of appends, each a row")
    parser.add_argument("--client-processes", type=int, default=4, help="processes that share the stock sessions")
    parser.add_argument("--calls", default="1,8,16,32", help="numbers of WebRTC calls, separated by commas")
    parser.add_argument("--client-python", type=Path, help="interpreter with the openai SDK; default: .venv/clients")
    parser.add_argument(
        "--speech", type=Path, default=ROOT / "tests/data/question.wav", help="sound file that begins with speech"
    )
    parser.add_argument("--json", type=Path, help="result file")
    parser.add_argument("worker", nargs="*", help="after `--`: arguments of a real worker")
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts.split(",") if part not in PARTS]
    if unknown:
        parser.error(f"--parts: expected some of {','.join(PARTS)}, got {','.join(unknown)}")
    return options


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    result: Json = {
        "command": ["python", "-m", "benchmarks.doors", *arguments],
        # Load average before the run.
        "environment": {**report.environment(torch.device("cpu")), "load_average": os.getloadavg()[0]},
        "verdicts": {},
    }
    for part in options.parts.split(","):
        PARTS[part](options, result)
        if options.json:
            report.write_json(options.json, result)
    for name, verdict in result["verdicts"].items():
        word = "met" if verdict["met"] else "MISSED"
        print(f"{word:>6}  {name}: {verdict['value']:.2f}, expected {verdict['expected']}")


# --- servers --------------------------------------------------------------------------------------


class _Servers(NamedTuple):
    worker: ServedProgram
    gateway: ServedProgram
    times: Path


@contextmanager
def _servers(options: argparse.Namespace, slots: int, *fake: str) -> Iterator[_Servers]:
    """A worker and a gateway. fake: arguments of a worker without a model."""
    shared = ("--port", "0")
    if options.worker:
        worker = ServedProgram(WORKER, *shared, *options.worker)
    else:
        think = ("--think-ms", str(options.think_ms))
        worker = ServedProgram(FAKE, *shared, "--slots", str(slots), *think, *fake)
    with tempfile.TemporaryDirectory() as folder, worker:
        worker.wait_ready(state="IDLE")
        times = Path(folder) / "callbacks.json"
        arguments = ("--port", str(free_port()), "--workers", f"127.0.0.1:{worker.port}", "--log-level", "INFO")
        environ = {"DUOLOGUE_SERVICE_DATA_DIR": folder}
        with ServedProgram(GATEWAY, str(times), *arguments, environ=environ) as gateway:
            gateway.wait_log("is ready")
            yield _Servers(worker, gateway, times)


# --- parts ----------------------------------------------------------------------------------------


def _asked(options: argparse.Namespace, result: Json) -> None:
    with _servers(options, 1, "--listen", "1", "--speak", str(SPEAK_UNITS)) as servers:
        engine = asyncio.run(engine_first_sound_ms(servers.worker.port, options.rounds))
        first, cancel = asyncio.run(asked_waits_ms(servers.gateway.port, options.rounds))
    row = {
        "n": len(first),
        "engine_first_sound_ms": _percentiles(engine),
        "first_sound_ms": _percentiles(first),
        "cancel_ms": _percentiles(cancel),
    }
    result["asked"] = row
    print(_line("first sound of the engine, of a unit that must speak", row["engine_first_sound_ms"]))
    print(_line("response.create to first sound", row["first_sound_ms"]))
    print(_line("response.cancel to response.done", row["cancel_ms"]))
    above = row["first_sound_ms"]["p95"] - row["engine_first_sound_ms"]["p50"]
    _judge(result, "first sound above the engine's, ms", above)
    _judge(result, "cancel to response.done, ms", row["cancel_ms"]["p95"])


def _barge_in(options: argparse.Namespace, result: Json) -> None:
    speech = speech_pcm16(options.speech)
    with _servers(options, 1, "--listen", "1", "--speak", str(SPEAK_UNITS)) as servers:
        from_sound, from_event = asyncio.run(barge_in_ms(servers.gateway.port, options.rounds, speech))
    row = {
        "n": len(from_sound),
        "from_sound_ms": _percentiles(from_sound),
        "from_speech_started_ms": _percentiles(from_event),
    }
    result["barge_in"] = row
    print(_line("200 ms of speech sent to response.done", row["from_sound_ms"]))
    print(_line("speech_started to response.done", row["from_speech_started_ms"]))
    _judge(result, "speech confirmed to response.done, ms", row["from_sound_ms"]["p95"])


def _answered(options: argparse.Namespace, result: Json) -> None:
    speech = speech_pcm16(options.speech)
    with _servers(options, 1, "--listen", str(10**6), "--speak", str(SPEAK_UNITS)) as servers:
        found = asyncio.run(answered_ms(servers.gateway.port, options.rounds, speech))
    result["answered"] = {"n": len(found), "first_sound_ms": _percentiles(found)}
    print(_line("end of the pause after a turn to first sound", result["answered"]["first_sound_ms"]))


def _adapter(options: argparse.Namespace, result: Json) -> None:
    rows, worst = [], 0.0
    for chunk_ms in _numbers(options.chunk_ms):
        for decision, spent in asyncio.run(adapter_ms(options.units, chunk_ms)).items():
            row = {"chunk_ms": chunk_ms, "decision": decision, "n": len(spent), "cpu_ms": _percentiles(spent)}
            rows.append(row)
            worst = max(worst, row["cpu_ms"]["p95"])
            print(_line(f"adapter, {decision} unit in appends of {chunk_ms} ms, CPU", row["cpu_ms"]))
    result["adapter"] = rows
    _judge(result, "adapter of a unit, CPU ms", worst)


def _sessions(options: argparse.Namespace, result: Json) -> None:
    sound = speech_pcm16(options.speech, QUIET_S)
    result["sessions"], worst_ms, worst_cpu_ms = [], 0.0, 0.0
    for sessions in _numbers(options.sessions):
        for chunk_ms in _numbers(options.chunk_ms):
            with _servers(options, sessions, "--listen", "1", "--speak", "3") as servers:
                row = stock_row(
                    servers.gateway,
                    servers.times,
                    sessions=sessions,
                    processes=min(sessions, options.client_processes),
                    seconds=options.seconds,
                    chunk_ms=chunk_ms,
                    sound=sound,
                    python=client_python(options.client_python),
                )
            row["reply_ms"] = _percentiles(row["reply_ms"])
            result["sessions"].append(row)
            longest = row["callbacks"]["longest"]
            worst_ms = max(worst_ms, row["callbacks"]["longest_wall_ms"])
            worst_cpu_ms = max([worst_cpu_ms, *(one["cpu_ms"] for one in longest)])
            above = ", ".join(f"{n} above {edge} ms" for edge, n in row["callbacks"]["n_above_ms"].items() if n)
            print(_line(f"{sessions} sessions ({row['client']}), appends of {chunk_ms} ms: reply", row["reply_ms"]))
            print(
                f"{'':8}{row['n_late']:.0f} late; loop delays: {row['n_stalls']:.0f} above {STALL_MS:g} ms, all below "
                f"{row['delay_below_ms']:.1f} ms; CPU {100 * row['cpu_share']:.0f} % of a core, "
                f"{row['cpu_ms_per_session_s']:.2f} ms a session and second"
            )
            print(
                f"{'':8}{row['callbacks']['n']} callbacks, the longest {row['callbacks']['longest_wall_ms']:.1f} ms; "
                f"CPU time: {above or 'all below 1.0 ms'}"
            )
            for one in longest[:5]:
                print(f"{'':16}{one['cpu_ms']:.1f} ms (wall {one['wall_ms']:.1f}) {one['callback'][:120]}")
    _judge(result, "longest callback, ms", worst_ms)
    _judge(result, "longest callback, CPU ms", worst_cpu_ms)


def _calls(options: argparse.Namespace, result: Json) -> None:
    shared = ("--client-processes", str(options.client_processes), "--speech", str(options.speech))
    result["calls"] = calls.main(["--calls", options.calls, *shared])


def _resampling(_: argparse.Namespace, result: Json) -> None:
    rows = result["resampling"] = snr_rows()
    worst: dict[str, float] = {}
    for row in rows:
        worst[row["way"]] = min(worst.get(row["way"], np.inf), row["snr_db"])
    for way, snr in worst.items():
        print(f"{way}: at least {snr:.1f} dB over {sum(row['way'] == way for row in rows)} tones")
    _judge(result, "24 to 16 to 24 kHz, dB", worst["24 kHz, 16 kHz, 24 kHz"])


PARTS: dict[str, Callable[[argparse.Namespace, Json], None]] = {
    "asked": _asked,
    "barge_in": _barge_in,
    "answered": _answered,
    "adapter": _adapter,
    "sessions": _sessions,
    "resampling": _resampling,
    "calls": _calls,
}
USUAL = ",".join(part for part in PARTS if part != "calls")  # which needs the extra `webrtc`


# --- results --------------------------------------------------------------------------------------


def _judge(result: Json, name: str, value: float) -> None:
    bound = BOUNDS[name]
    result["verdicts"][name] = {"value": value, "expected": str(bound), "met": bound.holds(value)}


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "max": float(max(values))}


def _line(name: str, times: dict[str, float]) -> str:
    return f"{name}: " + ", ".join(f"{key} {ms:.2f}" for key, ms in times.items()) + " ms"


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
