"""The launcher's command-line flags, and the configuration that results from them.

Does not detect devices and starts nothing.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from worker.config.service import Config, load_config

# Flag -> the setting that it overrides.
FLAGS = {
    "port": "service.gateway_port",
    "worker_base_port": "service.worker_base_port",
    "model_path": "model.model_path",
    "max_sessions": "duplex.max_sessions",
    "compile": "service.compile.enabled",
}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="start_all.sh", description="Starts the gateway and one worker for each GPU, and keeps them running."
    )
    scheme = parser.add_mutually_exclusive_group()
    scheme.add_argument("--http", action="store_true", help="use plain HTTP, even if certificates are configured")
    scheme.add_argument(
        "--https", action="store_true", help="use service.ssl_certfile; default if that setting has a value"
    )
    parser.add_argument("--remote", action="store_true", help="listen on all addresses; default: this machine only")
    parser.add_argument(
        "--insecure", action="store_true", help="with --remote: no key is needed, although none is configured"
    )
    parser.add_argument("--host", metavar="ADDR", help="address the gateway listens on")
    parser.add_argument("--port", type=int, metavar="N", help="port of the gateway; default: service.gateway_port")
    parser.add_argument(
        "--worker-base-port",
        type=int,
        metavar="N",
        help="port of the first worker, the others follow; default: service.worker_base_port",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file; default: config.json at the root")
    parser.add_argument(
        "--num-workers",
        type=_positive,
        metavar="N",
        help="on GPUs: maximum number of workers, default one for each GPU; on the CPU: number of workers, default 1",
    )
    parser.add_argument("--model-path", metavar="DIR", help="checkpoint folder, or a model id of the Hugging Face hub")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the model at start, or not; default: service.compile",
    )
    parser.add_argument(
        "--max-sessions", type=int, metavar="N", help="slots of each worker; default: as many as memory allows"
    )
    parser.add_argument("--lang", choices=["zh", "en"], help="language of the pages; default: the browser's")
    parser.add_argument("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR")
    parser.add_argument(
        "--log-dir", type=Path, default=Path("tmp"), metavar="DIR", help="folder for logs and pid files; default: tmp"
    )
    return parser


def settings(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Config, list[str]]:
    """The configuration, and notes about settings without effect. Raises: ConfigError, SettingsError."""
    flags = {key: getattr(args, name) for name, key in FLAGS.items()}
    return load_config(args.config, flags=flags, environ=environ)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number
