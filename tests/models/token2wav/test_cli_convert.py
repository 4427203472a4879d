"""`python -m models.token2wav convert`: a sound in another voice, by the vocoder and by S3Gen."""

import json
import re
from pathlib import Path

import pytest
import soundfile
import torch
from safetensors.torch import save_file

from models.checkpoint.embedded import TINY
from models.token2wav.__main__ import main
from models.token2wav.load.parts import load_voice_parts
from models.token2wav.prompt.source_tokens import speech_tokens_of
from models.token2wav.s3gen.load import load_s3gen
from tests.models.compare import assert_close
from tests.models.token2wav.prompt.prompt_sounds import prompt, write_pcm16
from tests.models.token2wav.s3gen import tiny_s3gen

SECONDS = 0.9

VOCODER = ("--model", Path(__file__).parents[3] / TINY / "assets" / "token2wav")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a sound to convert and two voices."""
    write_pcm16(tmp_path / "in.wav", prompt(SECONDS, 16_000), 16_000)
    write_pcm16(tmp_path / "voice.wav", prompt(1.1, 44_100, 2), 44_100)
    write_pcm16(tmp_path / "other.wav", prompt(0.7, 24_000, 1), 24_000)
    return tmp_path


@pytest.fixture
def s3gen(tmp_path: Path) -> Path:
    """A checkpoint with all tokens of the tokenizer."""
    settings = tiny_s3gen.config()
    flow = settings.flow.model_copy(update={"vocab_size": 6561})
    tensors = tiny_s3gen.as_trained(tiny_s3gen.random_tensors(settings.model_copy(update={"flow": flow})))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "s3gen.safetensors")
    return tmp_path / "s3gen.safetensors"


def convert(files: Path, *flags: object, voice: str = "voice.wav") -> int:
    line = ["convert", files / "in.wav", "--voice", files / voice, "--out", files / "out.wav", *VOCODER, *flags]
    return main([str(part) for part in line])


def test_vocoder_speaks_the_tokens_of_the_sound(files: Path, tiny: Path, capsys) -> None:
    flags = ["--steps", 1, "--stream"]
    assert convert(files, *flags) == 0
    assert re.fullmatch(r"\[.* s of sound: load .*\]\n", capsys.readouterr().err)
    tokenizer = load_voice_parts(tiny / "assets/token2wav").speech_tokenizer
    sound, rate = soundfile.read(files / "in.wav", dtype="float32")
    tokens = speech_tokens_of(tokenizer, sound if sound.ndim == 1 else sound[:, 0], rate).tolist()
    (files / "tokens.json").write_text(json.dumps(tokens))
    line = [files / "tokens.json", "--voice", files / "voice.wav", "--out", files / "same.wav", *VOCODER, *flags]
    assert main([str(part) for part in line]) == 0
    assert (files / "same.wav").read_bytes() == (files / "out.wav").read_bytes()
    assert soundfile.info(files / "out.wav").frames == 960 * (len(tokens) + 3)
    assert abs(len(tokens) * 0.04 - SECONDS) < 0.05


def test_s3gen_speaks_the_tokens_of_the_sound(files: Path, s3gen: Path) -> None:
    def converted(voice: str, *flags: object) -> torch.Tensor:
        assert convert(files, "--model", s3gen, *flags, voice=voice) == 0
        wave, rate = soundfile.read(files / "out.wav")
        assert rate == 24_000 and abs(len(wave) / rate - SECONDS) < 0.05
        return torch.from_numpy(wave)

    first = converted("voice.wav", "--steps", 2)
    model = load_s3gen(s3gen)
    voice, rate = soundfile.read(files / "voice.wav", dtype="float32")
    source = torch.from_numpy(soundfile.read(files / "in.wav", dtype="float32")[0])
    with torch.no_grad():
        prepared = model.prepare_voice(torch.from_numpy(voice[:, 0].copy()), rate)
        expected = model.sound(speech_tokens_of(model.tokenizer, source, 16_000), prepared, n_steps=2)
    assert_close(first, expected.double(), 1e-4)
    assert first.std() > 1e-3, "expected sound, got silence"
    assert (converted("other.wav", "--steps", 1) != first).any(), "expected voice and steps to change the sound"


def test_s3gen_speaks_given_tokens(files: Path, s3gen: Path) -> None:
    (files / "tokens.json").write_text("[5, 6560, 17]")
    line = ["--model", s3gen, "--voice", files / "voice.wav", "--out", files / "out.wav", "--steps", "1"]
    assert main([str(files / "tokens.json"), *map(str, line)]) == 0
    assert soundfile.info(files / "out.wav").frames in (960 * 3, 960 * 3 - 480)  # a prompt of odd length takes a frame
    (files / "tokens.json").write_text("[6561]")
    assert main([str(files / "tokens.json"), *map(str, line)]) == 2


def test_errors_are_one_line(files: Path, s3gen: Path, capsys) -> None:
    write_pcm16(files / "brief.wav", prompt(0.3), 16_000)
    (files / "broken.safetensors").write_bytes(b"none")
    cases = (
        (
            ["--model", s3gen, "--stream"],
            r"--stream: expected a vocoder folder in --model, got .*s3gen\.safetensors, a file",
        ),
        (["--model", s3gen, "--cache", files], r"--cache: expected a vocoder folder in --model, got .*"),
        (["--model", files / "broken.safetensors"], r".*: expected a complete safetensors or \.pt file, got .*"),
        (["--model", files / "absent"], r".*absent: expected the files .*"),
        (["--steps", 0], r"--steps: expected 1 to 100, got 0"),
        (["--voice", files / "brief.wav"], r".*brief\.wav: duration: expected 0\.5 to 30 s, got 0\.300 s"),
    )
    for flags, expected in cases:
        assert convert(files, *flags) == 2
        got = capsys.readouterr().err
        assert re.fullmatch(f"error: {expected}\n", got), f"expected {expected}, got {got}"
    (files / "brief.wav").rename(files / "in.wav")
    assert convert(files) == 2
    assert capsys.readouterr().err.endswith("in.wav: duration: expected 0.5 to 600 s, got 0.300 s\n")
    assert not (files / "out.wav").exists()
