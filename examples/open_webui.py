"""Open WebUI with this server as its model and its voice.

    pip install open-webui
    python examples/open_webui.py --port 8080           # then open http://localhost:8080
    python examples/open_webui.py --port 8080 --check   # a question and a spoken text through Open WebUI, then exit

The settings are environment variables that Open WebUI reads at its first start with a data folder; later they are in
*Admin Panel > Settings*. It asks for no sign-in here, so it listens on this machine only.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

READY_S = 300.0
ANSWER_S = 120.0


def settings(options: argparse.Namespace) -> dict[str, str]:
    """Open WebUI's environment."""
    return {
        "DATA_DIR": str(Path(options.data).resolve()),
        "WEBUI_AUTH": "False",
        "OFFLINE_MODE": "true",  # no models from a hub: embeddings and speech recognition are not used
        "RAG_EMBEDDING_ENGINE": "openai",
        "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": options.base_url,
        "OPENAI_API_KEY": options.api_key,
        "AUDIO_TTS_ENGINE": "openai",
        "AUDIO_TTS_OPENAI_API_BASE_URL": options.base_url,
        "AUDIO_TTS_OPENAI_API_KEY": options.api_key,
        "AUDIO_TTS_MODEL": "tts-1",
        "AUDIO_TTS_VOICE": "alloy",
        "AUDIO_STT_ENGINE": "web",  # the browser's
    }


def check(url: str, *, process: subprocess.Popen[bytes]) -> None:
    """Ask a question and have a text spoken as the page does. Raises: httpx.HTTPError, SystemExit."""
    with httpx.Client(base_url=url, timeout=ANSWER_S) as client:
        deadline = time.monotonic() + READY_S
        while not _is_ready(client):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Open WebUI: expected it to answer within {READY_S:g} s")
            time.sleep(1)
        token = _answer(client.post("/api/v1/auths/signin", json={"email": "", "password": ""}))["token"]
        client.headers["Authorization"] = f"Bearer {token}"
        model = _answer(client.get("/api/models"))["data"][0]["id"]
        question = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}
        answer = _answer(client.post("/api/chat/completions", json=question))
        print(f"{model}: {answer['choices'][0]['message']['content']}")
        spoken = client.post("/api/v1/audio/speech", json={"model": "tts-1", "voice": "alloy", "input": "Hello."})
        spoken.raise_for_status()
        print(f"{len(spoken.content)} bytes of {spoken.headers['content-type']}")


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.TransportError:
        return False


def _answer(response: httpx.Response) -> Any:
    response.raise_for_status()
    return response.json()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8080, help="where Open WebUI listens")
    parser.add_argument("--data", default="open-webui-data", help="folder of its database")
    parser.add_argument("--check", action="store_true", help="use it once, then exit")
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://localhost:8006/v1"))
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
    options = parser.parse_args(arguments)
    program = Path(sys.executable).with_name("open-webui")
    command = [str(program), "serve", "--host", "127.0.0.1", "--port", str(options.port)]
    Path(options.data).mkdir(parents=True, exist_ok=True)
    # It keeps the key of its sign-ins in the working directory.
    process = subprocess.Popen(command, env=os.environ | settings(options), cwd=options.data)
    try:
        if options.check:
            check(f"http://127.0.0.1:{options.port}", process=process)
        else:
            process.wait()
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
