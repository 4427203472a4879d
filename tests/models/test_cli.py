"""`python -m models`: one turn from the command line, and one line for every error."""

import re
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models.__main__ import main
from models.inputs.image import open_image
from models.inputs.prompts import PromptOptions
from models.stages.chat import Chat, greedy

PCM = (np.sin(np.arange(16000) / 20) * 9000).astype("<i2")


def write_wav(path: Path, *, rate: int = 16000, channels: int = 1, width: int = 2) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(PCM.tobytes())
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "cat.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cat.png").read_bytes()[:3000])
    (tmp_path / "text.txt").write_text("no picture, no sound")
    (tmp_path / "none.wav").write_bytes(write_wav(tmp_path / "a.wav").read_bytes()[:30])
    write_wav(tmp_path / "fast.wav", rate=44100)
    write_wav(tmp_path / "stereo.wav", channels=2)
    write_wav(tmp_path / "bytes.wav", width=1)
    return {path.name: path for path in tmp_path.iterdir()}


def run(root: Path, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "models", *map(str, args)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, encoding="utf-8")


@pytest.fixture(autouse=True)
def small_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.__main__.MODEL", tiny)


@pytest.fixture(scope="module")
def chat(tiny: Path) -> Chat:
    return Chat.load(tiny)


FIGURES = r"\[(\d+) tokens, load [\d.]+ s, first token [\d.]+ s, [\d.]+ ms a token\]\n"


def test_answers_text_image_and_sound(files: dict[str, Path], chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--image", str(files["cat.png"]), "--sound", str(files["a.wav"])]
    assert main(["What is this?", *given, "--greedy", "--max-new-tokens", "24"]) == 0
    shown = capsys.readouterr()
    parts = [open_image(files["cat.png"].read_bytes()), PCM.astype(np.float32) / 32768, "What is this?"]
    expected = chat.reply([{"role": "user", "content": parts}], sampling=greedy(), max_new_tokens=24)
    assert shown.out == expected.text + "\n"
    figures = re.fullmatch(FIGURES, shown.err)
    assert figures, f"expected one line of figures, got {shown.err}"
    assert int(figures[1]) == len(expected.ids)


def test_an_unreadable_image_ends_the_process_with_one_line(root: Path, files: dict[str, Path]) -> None:
    done = run(root, "Hello", "--image", files["text.txt"])
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"error: image: expected bytes of .+, got .+\n", done.stderr), done.stderr


def test_flags_reach_the_model(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["Hi", "--system", "Be brief.", "--thinking", "--seed", "5", "--max-new-tokens", "20"]) == 0
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ["Hi"]}]
    expected = chat.reply(messages, PromptOptions(enable_thinking=True), seed=5, max_new_tokens=20)
    assert capsys.readouterr().out == expected.text + "\n"


def test_several_files_keep_their_order(
    files: dict[str, Path], chat: Chat, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    received, stream = [], Chat.stream

    def record(self: Chat, messages: list[dict[str, object]], *args: object, **settings: object) -> object:
        received.extend(messages)
        return stream(self, messages, *args, **settings)

    cat, tone = str(files["cat.png"]), str(files["a.wav"])
    with monkeypatch.context() as patch:
        patch.setattr(Chat, "stream", record)
        assert main(["Hi", "--sound", tone, "--image", cat, "--image", cat, "--greedy", "--max-new-tokens", "9"]) == 0
    picture, samples = open_image(files["cat.png"].read_bytes()), PCM.astype(np.float32) / 32768
    *_, got, _ = received[0]["content"]
    assert np.array_equal(got, samples), f"max difference {np.abs(got - samples).max()}: expected {samples}, got {got}"
    parts = [picture, picture, samples, "Hi"]
    expected = chat.reply([{"role": "user", "content": parts}], sampling=greedy(), max_new_tokens=9)
    assert capsys.readouterr().out == expected.text + "\n"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--image", "absent.png"], r"absent\.png: expected a readable file, got No such file or directory"),
        (["--image", "."], r"\.: expected a readable file, got Is a directory"),
        (["--image", "cut.png"], r"image: expected pixels that can be decoded, got .+"),
        (["--sound", "absent.wav"], r"absent\.wav: expected a WAV file, got .+"),
        (["--sound", "text.txt"], r"text\.txt: expected a WAV file, got .+"),
        (["--sound", "none.wav"], r"none\.wav: expected a WAV file, got .*"),
        (["--sound", "fast.wav"], r"fast\.wav: expected 16000 Hz, 1 channel, 2 bytes a sample, got 44100 Hz, 1 .+"),
        (["--sound", "stereo.wav"], r"stereo\.wav: expected .+, got 16000 Hz, 2 channel\(s\), 2 byte\(s\) a sample"),
        (["--sound", "bytes.wav"], r"bytes\.wav: expected .+, got 16000 Hz, 1 channel\(s\), 1 byte\(s\) a sample"),
        (["--model", "absent"], r"absent: expected a JSON file, got no such file"),
        (["--seed", "-1"], r"setting seed: expected .+, got -1"),
        (["--max-new-tokens", "0"], r"max_new_tokens: expected a whole number from 1, got 0"),
    ],
)
def test_errors_are_one_line(
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch,
    args: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["Hello", *args]) == 2
    got = capsys.readouterr()
    assert got.out == ""
    assert re.fullmatch(f"error: {expected}\n", got.err), f"expected {expected}, got {got.err}"


def test_refuses_an_empty_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([""]) == 2
    assert "expected text, an image or sound, got nothing" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["odd", "chunk size"])
def test_a_damaged_wav_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    path = write_wav(tmp_path / "a.wav")
    data = bytearray(path.read_bytes())
    if damage == "odd":
        del data[-1]
    else:
        data[16:20] = (0x010000C8).to_bytes(4, "little")  # the length field of the fmt chunk
    path.write_bytes(data)
    assert main(["Hi", "--sound", str(path), "--max-new-tokens", "1"]) == 2
    assert re.fullmatch(r"error: .+a\.wav: expected .+, got .+\n", capsys.readouterr().err)


def test_a_missing_device_is_one_line(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["Hi", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "error: --device cuda: expected a CUDA device, got none that PyTorch can use\n"
