"""`python -m worker.main`: one worker process, from its command line to its exit status.

It reads the settings and sets the compilers' environment variables before it imports torch. Exit status: 0 after a
drain; 1 if the worker could not start; 2 for invalid settings or arguments.
"""

import argparse
import gc
import ipaddress
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from models.errors import ModelError, SettingsError
from worker import log
from worker.config.service import INDUCTOR_VARIABLE, Config, load_config
from worker.key_text import WORKER_SECRET_VARIABLE
from worker.protocol.connection import listen
from worker.start.priority import StartPriority

if TYPE_CHECKING:
    from worker.loop.observer import Observer

LOG = logging.getLogger("worker.main")
USAGE = 2
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker.main", description="Starts one worker.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings; default: config.json at the root")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help=f"address to listen on; any but a loopback address needs a secret in {WORKER_SECRET_VARIABLE}; "
        "default: %(default)s",
    )
    parser.add_argument("--port", type=int, metavar="N", help="default: service.worker_base_port + index; 0: any")
    parser.add_argument("--worker-index", type=int, default=0, metavar="N", help="number among the workers")
    parser.add_argument(
        "--gpu-id", type=int, metavar="N", help="GPU, unless CUDA_VISIBLE_DEVICES is set; reported in /health"
    )
    parser.add_argument("--model-path", metavar="DIR", help="checkpoint folder, or a model id of the Hugging Face hub")
    parser.add_argument("--pt-path", metavar="FILE", help="weights that replace those of the checkpoint")
    parser.add_argument("--ref-audio-path", metavar="FILE", help="the default voice")
    parser.add_argument("--warmup-video", metavar="FILE", help="input of the warm-up")
    parser.add_argument("--max-warmup-chunks", type=int, metavar="N", help="maximum seconds of it")
    parser.add_argument("--device", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--max-sessions", type=int, metavar="N", help="slots; default: as many as fit into memory")
    parser.add_argument("--duplex-pause-timeout", type=float, metavar="S", help="seconds until a paused session ends")
    parser.add_argument("--drain-timeout", type=float, metavar="S", help="seconds for sessions to end at a stop")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the model at start, or not; default: service.compile",
    )
    parser.add_argument(
        "--record-trace", metavar="DIR", help="write a trace of each duplex session; default: service.trace_dir"
    )
    parser.add_argument(
        "--low-priority-start", action="store_true", help="leave the CPU to other programs until the worker is ready"
    )
    parser.add_argument("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR")
    return parser


FLAGS = {
    "model_path": "model.model_path",
    "pt_path": "model.pt_path",
    "device": "model.device",
    "ref_audio_path": "audio.ref_audio_path",
    "warmup_video": "service.warmup_video",
    "max_warmup_chunks": "service.max_warmup_chunks",
    "drain_timeout": "service.drain_timeout_s",
    "max_sessions": "duplex.max_sessions",
    "duplex_pause_timeout": "duplex.pause_timeout",
    "compile": "service.compile.enabled",
    "record_trace": "service.trace_dir",
}


def main(argv: list[str] | None = None, observer: "Callable[[], Observer] | None" = None) -> int:
    """Run a worker. observer: makes the engine's observer once torch may be imported; for measurements."""
    args = parser().parse_args(argv)
    try:
        log.set_up(log.level_of(args.log_level, os.environ))
        config, notes = _config(args)
        listening = listen(_host(args.host, os.environ.get(WORKER_SECRET_VARIABLE)), _port(args, config))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    for note in notes:
        LOG.warning("%s", note)
    os.environ[INDUCTOR_VARIABLE] = str(config.service.cache_dir)
    if args.gpu_id is not None and config.model.device in ("auto", "cuda"):
        os.environ.setdefault(GPU_VARIABLE, str(args.gpu_id))  # a given list of visible GPUs takes precedence
    priority = StartPriority() if args.low_priority_start else None
    with listening:
        # Imports block all threads, so they come before the first request. Without garbage collection they take a tenth
        # less time; none of their objects is garbage.
        gc.disable()
        from worker.serving import serve, worker_settings

        gc.enable()
        gpu_id = args.worker_index if args.gpu_id is None else args.gpu_id
        secret = os.environ.pop(WORKER_SECRET_VARIABLE, None)
        settings = worker_settings(config, gpu_id=gpu_id, secret=secret)
        return serve(settings, listening, None if observer is None else observer(), priority)


def _config(args: argparse.Namespace) -> tuple[Config, list[str]]:
    flags = {key: getattr(args, name) for name, key in FLAGS.items()}
    return load_config(args.config, flags=flags, environ=os.environ)


def _host(given: str, secret: str | None) -> str:
    """The address to listen on. Raises: SettingsError for one that other machines reach, without a secret."""
    try:
        is_loopback = given == "localhost" or ipaddress.ip_address(given).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback and not secret:
        expected = f"a loopback address, or the secret of the gateway in {WORKER_SECRET_VARIABLE}"
        raise SettingsError("--host", expected=expected, got=given)
    return given


def _port(args: argparse.Namespace, config: Config) -> int:
    port: int = config.service.worker_base_port + args.worker_index if args.port is None else args.port
    if not 0 <= port <= 65_535:
        raise SettingsError("--port", expected="0 to 65535", got=port)
    return port


if __name__ == "__main__":
    sys.exit(main())
