"""WebRTC calls per core: CPU time of the processes that hold the connections, and of the gateway, for each call.

`python -m benchmarks.doors.calls --help` lists the options. The worker has no model. Clients run in processes of their
own, which need more CPU time than the server: on a machine with few cores, packets are missing because of the clients.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import report
from benchmarks.doors.call_load import LOOPBACK, CallLoad
from benchmarks.doors.client_processes import client_processes, speech_pcm16
from benchmarks.serve.processes import ROOT, ServedProgram, free_port

PEERS = "server.peers.main"
QUIET_S = 4.0  # of silence after the speech that clients repeat
PACKET_MS = 20
MIN_RECEIVED = 0.95  # of the packets; with fewer the server was not under this load
Json = dict[str, Any]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doors.calls", description="Times WebRTC calls.")
    parser.add_argument("--calls", default="1,8,16,32", help="numbers of calls at once, separated by commas")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each row")
    parser.add_argument("--processes", type=int, default=1, help="processes of the server that hold connections")
    parser.add_argument("--client-processes", type=int, default=4, help="processes that share the calls")
    parser.add_argument("--fps", type=int, default=0, help="frames a second of video, 640 x 480; 0: no video")
    parser.add_argument("--speech", type=Path, default=ROOT / "tests/data/question.wav", help="sound file to speak")
    parser.add_argument("--json", type=Path, help="result file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[Json]:
    """Run the command. Returns: its rows."""
    options = parse(arguments)
    environment = {**report.environment(torch.device("cpu")), "load_average": os.getloadavg()[0]}
    result: Json = {"environment": environment, "fps": options.fps, "rows": []}
    for calls in map(int, options.calls.split(",")):
        row = _row(options, calls)
        result["rows"].append(row)
        print(
            f"{calls} calls: {row['peer_cpu_ms']:.1f} ms CPU a call and second in the processes of connections, "
            f"{row['gateway_cpu_ms']:.1f} ms in the gateway: {row['calls_per_core']:.0f} calls per core; clients got "
            f"{100 * row['received']:.1f} % of the packets, longest gap {row['gap_ms']:.0f} ms, "
            f"{row['n_failed']} attempts to connect failed"
            + ("" if row["received"] >= MIN_RECEIVED else "; packets are missing: no measurement of this load")
        )
        if options.json:
            report.write_json(options.json, result)
    rows: list[Json] = result["rows"]
    return rows


def _row(options: argparse.Namespace, calls: int) -> Json:
    worker = ServedProgram(
        "benchmarks.serve.fake_worker", "--port", "0", "--slots", str(calls), "--listen", "1", "--speak", "3"
    )
    with tempfile.TemporaryDirectory() as folder, worker:
        worker.wait_ready(state="IDLE")
        webrtc = {"addresses": [LOOPBACK], "processes": options.processes, "max_calls": 2 * calls, "preload": True}
        service = {"data_dir": folder, "webrtc": webrtc}
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({"service": service}), encoding="utf-8")
        arguments = ("--config", str(config), "--port", str(free_port()), "--workers", f"{LOOPBACK}:{worker.port}")
        with ServedProgram("server.main", *arguments) as gateway:
            gateway.wait_log("is ready")
            speech = Path(folder) / "speech.pcm"
            speech.write_bytes(speech_pcm16(options.speech, QUIET_S))
            return _measured(options, gateway, calls, speech)


def _measured(options: argparse.Namespace, gateway: ServedProgram, calls: int, speech: Path) -> Json:
    n = min(calls, options.client_processes)
    counts = [calls // n + (number < calls % n) for number in range(n)]
    loads = [CallLoad(gateway.port, count, options.seconds, str(speech), options.fps) for count in counts]
    with client_processes(sys.executable, "benchmarks.doors.call_load", loads) as clients:
        peers = [one for one in gateway.process.children(recursive=True) if PEERS in " ".join(one.cmdline())]
        for client in clients:
            client.expect("warm")
        before, begun = (_cpu_s(peers), gateway.cpu_s()), time.perf_counter()
        for client in clients:
            client.expect("end")
        wall_s = time.perf_counter() - begun
        peer_s, gateway_s = _cpu_s(peers) - before[0], gateway.cpu_s() - before[1]
        received = [one for client in clients for one in client.result()]
    per_call = 1000 / wall_s / calls
    return {
        "calls": calls,
        "processes": len(peers),
        "wall_s": wall_s,
        "peer_cpu_ms": peer_s * per_call,
        "gateway_cpu_ms": gateway_s * per_call,
        "calls_per_core": 1000 / (peer_s * per_call),
        "received": sum(one["packets"] for one in received) * PACKET_MS / 1000 / options.seconds / calls,
        "gap_ms": max(one["gap_ms"] for one in received),
        "n_started": sum(one["started"] for one in received),
        "n_failed": sum(one["n_failed"] for one in received),
    }


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (one.cpu_times() for one in processes))


if __name__ == "__main__":
    main()
