"""Speech, chat and models with the openai SDK.

pip install openai
python examples/openai_http.py "Good morning." --save morning.mp3
"""

import argparse
import base64
import os
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAI


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="what to read out and to talk about")
    parser.add_argument("--image", type=Path, help="a picture to talk about")
    parser.add_argument("--save", type=Path, default=Path("speech.mp3"), help="where the speech goes")
    parser.add_argument("--base-url", default=os.environ.get("OPENAI_BASE_URL", "http://localhost:8006/v1"))
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", "none"))
    options = parser.parse_args(arguments)
    client = OpenAI(base_url=options.base_url, api_key=options.api_key)
    model = client.models.list().data[0].id
    print(f"model: {model}")

    with client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input=options.text, response_format=options.save.suffix.lstrip(".") or "mp3"
    ) as speech:
        speech.stream_to_file(options.save)
    print(f"speech: {options.save.stat().st_size} bytes in {options.save}")

    content: list[dict[str, object]] = [{"type": "text", "text": options.text}]
    if options.image is not None:
        picture = base64.b64encode(options.image.read_bytes()).decode()
        content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}})
    print("answer: ", end="")
    for chunk in client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], max_completion_tokens=100, stream=True
    ):
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
