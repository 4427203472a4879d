"""`python -m models.token2wav`: speech tokens to a sound file on the command line, and one line per error."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from models.checkpoint.embedded import TINY
from models.token2wav import __main__ as cli
from models.token2wav.__main__ import main
from models.token2wav.load.parts import load_token2wav
from models.token2wav.stream.vocoder import Vocoder
from models.token2wav.voice.voice_maker import VoiceMaker
from tests.models.compare import assert_close
from tests.models.token2wav.prompt.prompt_sounds import prompt, write_pcm16

N_SPEECH_TOKENS = 61
SPEECH_TOKENS = np.random.default_rng(3).integers(0, 6561, N_SPEECH_TOKENS).tolist()
FIGURES = (
    r"\[([\d.]+) s of sound: load [\d.]+ s, voice [\d.]+ s, tokens to sound [\d.]+ s, [\d.]+ times real time"
    r"(, first sound after [\d.]+ s)?\]\n"
)

VOCODER = ("--model", str(Path(__file__).parents[3] / TINY / "assets" / "token2wav"))


@pytest.fixture(scope="module", autouse=True)
def _loaded_once() -> Iterator[None]:
    """Load the modules once for all commands of this process: no command changes their weights."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_flow_and_hift", "load_voice_parts"):
            patch.setattr(cli, name, cache(getattr(cli, name)))
        yield


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with speech tokens and a voice."""
    (tmp_path / "tokens.json").write_text(json.dumps(SPEECH_TOKENS))
    (tmp_path / "short.json").write_text(json.dumps({"codes": SPEECH_TOKENS[:2], "text": "hm"}))
    write_pcm16(tmp_path / "voice.wav", prompt(1.1, 44_100, 2), 44_100)
    return tmp_path


def command(files: Path, *args: object, speech_tokens: str = "tokens.json") -> list[str]:
    return [str(files / speech_tokens), "--voice", str(files / "voice.wav"), "--steps", "2", *VOCODER, *map(str, args)]


def run(root: Path, arguments: list[str], stderr: int) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "models.token2wav", *arguments]
    return subprocess.run(
        line, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=120
    )


def read_all(terminal: int) -> str:
    data = b""
    try:
        while piece := os.read(terminal, 10_000):
            data += piece
    except OSError:  # the other end of the terminal is closed
        os.close(terminal)
    return data.decode()


def pcm(path: Path) -> np.ndarray:
    info = soundfile.info(path)
    assert (info.samplerate, info.channels, info.subtype) == (24_000, 1, "PCM_16")
    return soundfile.read(path, dtype="int16")[0]


def test_whole_utterance(files: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(files, "--out", files / "out.wav")) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    figures = re.fullmatch(FIGURES, shown.err)
    assert figures and not figures[2], f"expected one line of figures, got {shown.err}"
    assert figures[1] == f"{N_SPEECH_TOKENS * 0.04:.2f}"
    got = pcm(files / "out.wav")
    assert len(got) == 960 * N_SPEECH_TOKENS
    parts = load_token2wav(tiny / "assets/token2wav")
    voice = VoiceMaker(parts, parts.config).make(prompt_of(files), 44_100)
    expected = Vocoder(parts.flow, parts.hift, steps=(2,)).offline(SPEECH_TOKENS, voice)
    assert_close(torch.from_numpy(got) / 32767, expected.clamp(-1, 1), 1e-4)
    assert got.std() > 300, "expected sound, got silence"


def prompt_of(files: Path) -> np.ndarray:
    return soundfile.read(files / "voice.wav", dtype="float32")[0].T


def test_streamed_to_a_terminal(root: Path, files: Path) -> None:
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    done = run(root, command(files, "--out", files / "out.wav", "--stream", "--cache", files / "cache"), slave)
    os.close(slave)
    shown = read_all(master).replace("\r\n", "\n")
    assert (done.returncode, done.stdout) == (0, ""), shown
    counts = [int(count) for count in re.findall(rf"synthesized:.*?(\d+)/{N_SPEECH_TOKENS + 3} ", shown)]
    assert counts[0] == 0 and {25, 50} <= set(counts), f"expected the bar at each chunk, got {counts} of {shown!r}"
    figures = re.fullmatch(FIGURES, shown.rpartition("\r")[2])
    assert figures and figures[2], f"expected a last line of figures, got {shown!r}"
    assert figures[1] == f"{(N_SPEECH_TOKENS + 3) * 0.04:.2f}"
    assert len(pcm(files / "out.wav")) == 960 * (N_SPEECH_TOKENS + 3)
    assert main(command(files, "--out", files / "again.wav", "--stream", "--cache", files / "cache")) == 0
    assert (files / "again.wav").read_bytes() == (files / "out.wav").read_bytes()


# A chunk has 25 tokens and 3 of lookahead.
@pytest.mark.parametrize(
    ("stream", "n_speech_tokens"), [(True, 1), (True, 24), (True, 25), (True, 26), (True, 50), (False, 1), (False, 26)]
)
def test_number_of_samples(files: Path, stream: bool, n_speech_tokens: int) -> None:
    (files / "tokens.json").write_text(json.dumps((SPEECH_TOKENS * 2)[:n_speech_tokens]))
    assert main(command(files, "--out", files / "out.wav", "--steps", "1", *["--stream"] * stream)) == 0
    assert len(pcm(files / "out.wav")) == 960 * (n_speech_tokens + 3 * stream)


def test_a_turn_starts_with_silence_tokens(files: Path, monkeypatch) -> None:
    given = []
    speak = Vocoder.speak

    def record(self, chunks):
        given.extend((list(chunk.speech_tokens), chunk.last) for chunk in chunks)
        return speak(self, chunks)

    monkeypatch.setattr(Vocoder, "speak", record)
    assert main(command(files, "--out", files / "out.wav", "--stream")) == 0
    speech_tokens = [4218] * 3 + SPEECH_TOKENS
    assert given == [(speech_tokens[:28], False), (speech_tokens[25:53], False), (speech_tokens[50:], True)]


def test_flags_reach_the_vocoder(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def sound(*flags: object) -> bytes:
        assert main(command(files, "--out", files / "out.wav", "--stream", *flags)) == 0
        return (files / "out.wav").read_bytes()

    plain = sound()
    assert sound("--seed", 0) == plain
    others = [("--seed", 1), ("--steps", 3), ("--dtype", "bfloat16"), ("--compat", "reference")]
    made = [sound(*flags) for flags in others]
    assert len({plain, *made}) == 1 + len(others), "expected every flag to change the sound"
    assert {len(data) for data in made} == {len(plain)}


def test_cached_voice_is_not_prepared_again(files: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    loads = []
    load = cli.load_voice_parts
    monkeypatch.setattr(cli, "load_voice_parts", lambda *args, **kwargs: loads.append(args) or load(*args, **kwargs))
    sounds = set()
    for _ in range(3):
        flags = ["--cache", files / "cache"] if loads else []  # the first run has no cache
        assert main(command(files, "--out", files / "out.wav", *flags)) == 0
        sounds.add((files / "out.wav").read_bytes())
    assert len(loads) == 2 and len(sounds) == 1
    assert len(list((files / "cache").glob("*.safetensors"))) == 1
    assert "not cached" not in capsys.readouterr().err


def test_unusable_cache_is_reported_and_has_no_other_effect(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(files, "--out", files / "out.wav", "--cache", files / "tokens.json")) == 0
    message, figures = capsys.readouterr().err.splitlines(keepends=True)
    assert message == f"voice not cached: {files / 'tokens.json'}: File exists\n"
    assert re.fullmatch(FIGURES, figures)
    assert json.loads((files / "tokens.json").read_text()) == SPEECH_TOKENS


BAD_TOKENS = {
    "broken": ("[1, 2", r"expected JSON, got .+"),
    "empty": ("", r"expected JSON, got .+"),
    "binary": ("\x00\x01", r"expected JSON, got .+"),
    "deep": ("[" * 200_000, r"expected JSON, got .+"),
    "digits": ("[" + "9" * 5000 + "]", r"expected JSON, got .+"),
    "text": ('"codes"', r"expected a list of speech tokens, or \{\"codes\": \[\.\.\.\]\}, got str"),
    "other": ('{"tokens": [1]}', r"expected a list of speech tokens, .+, got NoneType"),
    "none": ("[]", r"speech tokens: expected at least one, got none"),
    "nested": ("[[1, 2]]", r"speech tokens: expected whole numbers, got \[1, 2\]"),
    "float": ("[1, 2.0]", r"speech tokens: expected whole numbers, got 2\.0"),
    "bool": ("[1, true]", r"speech tokens: expected whole numbers, got True"),
    "string": ('["1"]', r"speech tokens: expected whole numbers, got '1'"),
    "beyond": ("[6560, 6561]", r"speech tokens: expected 0 to 6560, got 6561"),
    "negative": ("[5, -1]", r"speech tokens: expected 0 to 6560, got -1"),
    "huge": ("[99999999999999999999]", r"speech tokens: expected 0 to 6560, got 9{20}"),
}


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_refuses_invalid_tokens(files: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    content, expected = BAD_TOKENS[name]
    (files / "bad.json").write_text(content)
    assert main(command(files, "--out", files / "out.wav", speech_tokens="bad.json")) == 2
    got = capsys.readouterr().err
    assert re.fullmatch(rf"error: .+/bad\.json: {expected}\n", got), f"expected {expected}, got {got}"
    assert not (files / "out.wav").exists()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--out", "absent/out.wav"], r"absent/out\.wav: expected a path that can be written, got no such folder"),
        (["--out", "."], r"\.: expected a path that can be written, got something other than a regular file"),
        (
            ["--out", "/dev/null"],
            r"/dev/null: expected a path that can be written, got something other than a regular file",
        ),
        (["--voice", "absent.wav"], r"absent\.wav: expected a readable file, got No such file or directory"),
        (["--voice", "short.json"], r"short\.json: expected a sound file, got .+"),
        (["--voice", "brief.wav"], r"brief\.wav: duration: expected 0\.5 to 30 s, got 0\.300 s"),
        (["--voice", "nan.wav"], r"prompt sound: expected finite samples, got 1 of 9600 NaN or infinite"),
        (["--model", "absent"], r"absent: expected the files flow\.yaml, .+, got no flow\.yaml, .+"),
        (["--steps", "0"], r"--steps: expected 1 to 100, got 0"),
        (["--steps", "1000000000"], r"--steps: expected 1 to 100, got 1000000000"),
        (["--seed", "-1"], r"--seed: expected 0 to \d+, got -1"),
        (["--seed", str(2**63)], rf"--seed: expected 0 to {2**63 - 1}, got {2**63}"),
    ],
)
def test_errors_are_one_line(files: Path, capsys, monkeypatch, flags: list[str], expected: str) -> None:
    monkeypatch.chdir(files)
    write_pcm16(files / "brief.wav", prompt(0.3), 16_000)
    sound = prompt(0.6)[0]
    sound[7] = np.nan
    soundfile.write(files / "nan.wav", sound, 16_000, subtype="FLOAT")
    assert main(command(files, "--out", files / "out.wav", *flags)) == 2
    got = capsys.readouterr()
    assert got.out == ""
    assert re.fullmatch(f"error: {expected}\n", got.err), f"expected {expected}, got {got.err}"
    assert not (files / "out.wav").exists()


def test_refuses_a_missing_token_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(files, "--out", files / "out.wav", speech_tokens="absent.json")) == 2
    assert capsys.readouterr().err.endswith("absent.json: expected a readable file, got No such file or directory\n")


def test_failed_write_keeps_the_old_file(files: Path, capsys, monkeypatch) -> None:
    (files / "out.wav").write_bytes(b"old")

    def full(path: object, wave: torch.Tensor) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "write_sound", full)
    assert main(command(files, "--out", files / "out.wav", speech_tokens="short.json")) == 2
    assert capsys.readouterr().err.endswith("expected a path that can be written, got No space left on device\n")
    assert (files / "out.wav").read_bytes() == b"old"


def test_refuses_an_unavailable_device(files: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(command(files, "--out", files / "out.wav", "--device", "cuda")) == 2
    assert capsys.readouterr().err == "error: --device cuda: expected a CUDA device, got none that PyTorch can use\n"
