"""`python -m worker.offline`: deterministic outputs, failures, refused arguments, interrupts."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from models.checkpoint.embedded import TINY
from models.stages.context_mover import ContextMover
from models.stages.unit_steps import UnitSteps
from worker import media
from worker.engine import Engine
from worker.loop.duplex_job import DuplexJob
from worker.loop.unit_loop import UnitLoop
from worker.offline import __main__ as offline
from worker.offline.__main__ import main
from worker.offline.options import DEFAULT_SOUND, engine_config, parser, session_config
from worker.offline.reply import starts
from worker.start import voices

pytestmark = pytest.mark.usefixtures("loaded_once")
RATE = 24_000
# Speech takes most of the time: few tokens per unit and few solver steps.
FAST = ["--model", str(TINY), "--euler-steps", "1", "--set", "max_new_speak_tokens_per_chunk=4"]
QUIET = ["--model", str(TINY), "--force-listen", "1000"]
LISTEN_ROWS, PICTURE_ROWS = 13, 66


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with media files: sound only, pictures only, both."""
    folder = tmp_path_factory.mktemp("media")
    sound, video = ["-f", "lavfi", "-i", "sine=f=300:d=3"], ["-f", "lavfi", "-i", "testsrc2=s=160x120:r=5:d=3"]
    encode = [media.ffmpeg_program(), "-nostdin", "-loglevel", "error"]
    for name, inputs in (("sound.wav", sound), ("video.mp4", video), ("both.mp4", [*sound, *video])):
        subprocess.run([*encode, *inputs, str(folder / name)], check=True, timeout=60)
    (folder / "broken.mp4").write_bytes(bytes(10_000))
    return folder


def start(*arguments: object, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "worker.offline", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(offline.__file__).parents[2]
    # A background job of a shell ignores SIGINT, and its children inherit that.
    return subprocess.Popen(
        line,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def read_all(terminal: int) -> str:
    data = b""
    try:
        while piece := os.read(terminal, 10_000):
            data += piece
    except OSError:  # raised by a terminal whose other end is closed
        os.close(terminal)
    return data.decode()


def talk(folder: Path, file: Path, *flags: object, status: int = 0) -> dict:
    """Run in this process. Returns: the transcript."""
    out = ["--out", folder / "r.wav", "--transcript", folder / "r.json"]
    got = main([str(word) for word in (file, *out, *FAST, *flags)])
    assert got == status, f"expected status {status}, got {got}"
    return json.loads((folder / "r.json").read_bytes())


def rows(out: str) -> list[list[str]]:
    """The cells of the table; the text is one cell."""
    cells = [line.split("|") for line in out.splitlines()]
    return [[*left.split(), *middle.split(), text.strip()] for left, middle, text in cells]


def test_runs_are_deterministic(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In two processes: a new one with a terminal, and this one."""
    outs = [[tmp_path / f"{n}.wav", tmp_path / f"{n}.json"] for n in (1, 2)]
    flags = [
        [files / "both.mp4", "--out", out, "--transcript", transcript, "--force-listen", 1, "--tail", 1, *FAST[:2]]
        for out, transcript in outs
    ]
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    second = start(*flags[1], stderr=slave)
    os.close(slave)
    shown = read_all(master)
    table_2, _ = second.communicate(timeout=120)
    status = main([str(word) for word in flags[0]])
    table, text = capsys.readouterr()
    assert (status, second.returncode) == (0, 0), text + shown
    for one, other in zip(*outs, strict=True):
        assert one.read_bytes() == other.read_bytes(), f"{one.suffix}: expected the same bytes, got others"

    document = json.loads(outs[0][1].read_bytes())
    units = document["units"]
    assert document["session"]["seed"] == 0 and document["file"] == "both.mp4" and "timings" not in document
    assert document["versions"].keys() == {"python", "torch", "numpy"}
    assert [unit["index"] for unit in units] == list(range(len(units)))
    assert [unit["decision"] for unit in units[:2]] == ["LISTEN", "SPEAK"], "expected another seed for this test"
    assert document["turns"][0]["start"] == 1
    assert document["turns"][0]["text"].startswith(units[1]["text"])

    info = soundfile.info(outs[0][0])
    assert (info.samplerate, info.channels, info.subtype) == (RATE, 1, "PCM_16")
    pcm, _ = soundfile.read(outs[0][0], dtype="int16")
    lengths = [unit["n_samples"] for unit in units]
    assert [unit["sound_start"] for unit in units if unit["n_samples"]] == [
        begin for begin, n in zip(starts(lengths, 200), lengths, strict=True) if n
    ]
    assert len(pcm) == units[-1]["sound_start"] + lengths[-1]
    begin = units[1]["sound_start"]
    assert not pcm[:begin].any(), "expected silence before the first unit that speaks"
    assert pcm[begin:].std() > 100, "expected sound, got silence"

    for out in (table, table_2):
        header, *cells = rows(out)
        assert header[:3] == ["unit", "decision", "tokens"] and header[-1] == "text"
        expected = []
        for one in units:
            counts = one["n_tokens"], one["n_codes"], round(one["n_samples"] / 24), one["llm_rows"]
            expected.append([str(one["index"]), one["decision"], *map(str, counts)])
        assert [row[:6] for row in cells] == expected
        assert [row[-1] for row in cells] == [repr(unit["text"]) for unit in units]
        assert all(float(row[6]) > 0 for row in cells), "expected times in ms"
    figures = rf"\[{len(units)} units, 1 turns, 0 failed: load [\d.]+ s, prepare .*, [\d.]+ times real time\]\n"
    assert re.fullmatch(figures, text), f"expected figures and no bar off a terminal, got {text!r}"
    counts = [int(count) for count in re.findall(r"units:.*?(\d+)/3 ", shown)]
    assert counts and counts[0] == 0, f"expected a bar with the number of units, got {shown!r}"


def test_files_with_sound_or_pictures_only(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, n_rows in (
        ("sound.wav", LISTEN_ROWS),
        ("video.mp4", LISTEN_ROWS + PICTURE_ROWS),
        ("both.mp4", LISTEN_ROWS + PICTURE_ROWS),
    ):
        document = talk(tmp_path, files / name, *QUIET, "--tail", 0, "--set", 'early_unit="auto"')
        assert "note: early_unit has no effect" in capsys.readouterr().err
        got = np.diff([unit["llm_rows"] for unit in document["units"]]).tolist()
        assert got == [n_rows] * 2, f"{name}: expected {n_rows} rows a unit, got {got}"
        assert document["turns"] == []
        pcm, _ = soundfile.read(tmp_path / "r.wav", dtype="int16")
        assert len(pcm) == 3 * RATE and not pcm.any(), f"{name}: expected three seconds of silence"


def test_silent_units_finish_the_turn(files: Path, tmp_path: Path) -> None:
    def n_units(*flags: object) -> int:
        return len(talk(tmp_path, files / "sound.wav", "--set", "generate_audio=false", *flags)["units"])

    speaking, listening = ["--force-listen", 0], QUIET
    assert n_units(*speaking, "--tail", 0) == 3
    assert n_units(*speaking, "--tail", 2) == 5
    assert n_units(*speaking) == 8
    assert n_units(*listening, "--tail", 9) == 3, "expected no silent units after a session without an open turn"
    assert n_units(*speaking, "--max-units", 1, "--tail", 1) == 2


def test_silent_units_end_with_the_turn(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth token ends the turn's text; silent units continue until its sound ends."""
    on_token = DuplexJob.on_token

    def steer(job: DuplexJob, token: int) -> None:
        ids = job.language.special
        steered = [ids.speak, token, ids.turn_eos, ids.listen] if job.index == 3 else [ids.listen]
        on_token(job, steered[min(len(job.decoder.all_ids), len(steered) - 1)])

    monkeypatch.setattr(DuplexJob, "on_token", steer)
    document = talk(tmp_path, files / "sound.wav", "--force-listen", 0, "--tail", 50, "--set", "drain_s=2")
    decisions = [unit["decision"] for unit in document["units"]]
    assert decisions == ["LISTEN", "LISTEN", "SPEAK", *["SPEAK"] * (len(decisions) - 3)]
    assert 1 <= len(decisions) - 3 <= 2, f"expected a second or two of speech without text, got {decisions}"
    assert [unit["end_of_turn"] for unit in document["units"]] == [False] * (len(decisions) - 1) + [True]
    assert [(turn["start"], turn["end"]) for turn in document["turns"]] == [(2, len(decisions) - 1)]


def test_timings_are_separate_in_the_transcript(files: Path, tmp_path: Path) -> None:
    plain = talk(tmp_path, files / "sound.wav", *QUIET)
    timed = talk(tmp_path, files / "sound.wav", *QUIET, "--timings")
    timings = timed.pop("timings")
    assert timed == plain
    assert [unit["index"] for unit in timings["units_ms"]] == [0, 1, 2]
    assert all(unit["total"] >= unit["hear"] > 0 for unit in timings["units_ms"])


# --- failures -----------------------------------------------------------------------------------


def failing(method: Callable, on_call: int) -> Callable:
    calls = []

    def wrapper(*args: object, **kwargs: object) -> object:
        calls.append(args)
        if len(calls) == on_call:
            raise RuntimeError("out of order")
        return method(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("owner", "method", "on_call", "flags"),
    [
        (UnitSteps, "encode_audio", 2, []),
        # The window moves after the result is sent; a failure then evicts all units, and the session is prepared again.
        (ContextMover, "drop", 2, ["--set", 'window={"mode":"basic","high_tokens":1,"low_tokens":0}']),
    ],
    ids=["before its result", "after its result"],
)
def test_failed_unit_is_an_outcome(
    owner: type, method: str, on_call: int, flags: list[str], files: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(owner, method, failing(getattr(owner, method), on_call))
    document = talk(tmp_path, files / "sound.wav", *QUIET, *flags, status=1)
    assert [unit["decision"] for unit in document["units"]] == ["LISTEN", "FAILED", "LISTEN"]
    expected = document["units"][0]["llm_rows"] + (LISTEN_ROWS if method == "encode_audio" else 0)
    assert document["units"][2]["llm_rows"] == expected
    assert document["units"][1] == {"index": 1, "decision": "FAILED", "error": "RuntimeError: out of order"}
    out, err = capsys.readouterr()
    assert rows(out)[2] == ["1", "FAILED", "RuntimeError: out of order"]
    assert "3 units, 0 turns, 1 failed" in err
    assert (tmp_path / "r.wav").exists()


def test_reports_unit_with_invalid_sound(tmp_path: Path) -> None:
    samples = np.zeros(48_000, np.float32)
    samples[20_000] = np.nan
    soundfile.write(tmp_path / "nan.wav", samples, 16_000, subtype="FLOAT")
    document = talk(tmp_path, tmp_path / "nan.wav", *QUIET, status=1)
    assert [unit["decision"] for unit in document["units"]] == ["LISTEN", "FAILED", "LISTEN"]
    assert "AudioError: sound: expected finite samples" in document["units"][1]["error"]


def test_engine_failure_ends_the_run(
    files: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(UnitLoop, "run", failing(UnitLoop.run, 3))
    assert main([str(files / "sound.wav"), "--out", str(tmp_path / "r.wav"), *QUIET]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "error: engine: expected a running thread, got one that failed: out of order"
    )
    assert list(tmp_path.iterdir()) == []


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The error for arguments that are refused before anything is loaded."""
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, f"expected one line, got {out + err!r}"
    return err.removeprefix("error: ").rstrip("\n")


def test_refuses_unusable_files(files: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Engine, "build", None)
    sound = files / "sound.wav"
    assert refused(capsys, tmp_path / "no.mp4").endswith("no.mp4: expected a media file, got no such file")
    assert "broken.mp4: expected" in refused(capsys, files / "broken.mp4")
    assert "got a folder" in refused(capsys, files)
    assert "no.wav: expected a readable file" in refused(capsys, sound, "--ref-audio", tmp_path / "no.wav")
    assert "expected a place for a file" in refused(capsys, sound, "--out", tmp_path / "no" / "r.wav")
    assert "expected a place for a file" in refused(capsys, sound, "--transcript", tmp_path)
    kept = sound.read_bytes()
    for flags in (["--out", sound], ["--transcript", DEFAULT_SOUND], ["--out", "r", "--transcript", "./r"]):
        assert "expected a file of its own, got the same as" in refused(capsys, sound, *flags)
    assert sound.read_bytes() == kept


def test_refuses_invalid_settings(files: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Engine, "build", None)
    sound = files / "sound.wav"
    for flags, text in {
        ("--set", "top_kk=5"): "setting top_kk: expected a setting that exists, such as top_k, got 5",
        ("--set", "window.mod=5"): "setting window.mod: expected a setting that exists, such as mode, got 5",
        ("--set", 'window={"modes":1}'): "setting window.modes: expected a setting that exists, such as mode, got 1",
        ("--set", "top_k"): "--set: expected KEY=VALUE, got 'top_k'",
        ("--set", "top_k=many"): "--set top_k: expected a value in JSON, such as 5, true, null or \"text\", got 'many'",
        ("--set", "top_k=1.5"): "setting top_k: expected a whole number from 0 to 2147483647, got 1.5",
        ("--set", "top_p=NaN"): "setting top_p: expected a number from 0 to 1, got nan",
        ("--force-listen", "-1"): "setting force_listen_count: expected a whole number from 0 to 1000, got -1",
        ("--euler-steps", "0"): "setting euler_steps: expected null or a whole number from 1 to 50, got 0",
        ("--tail", "-1"): "setting --tail: expected a whole number at least 0 and at most 600, got -1",
        ("--max-units", "0"): "setting max_units: expected a whole number at least 1, got 0",
        ("--device", "gpu"): 'setting device: expected text like "auto", "cpu", "cuda", "cuda:0", got \'gpu\'',
    }.items():
        assert refused(capsys, sound, *flags) == text


def test_options_set_the_settings() -> None:
    words = "talk.mp4 --seed 5 --greedy --window context --max-slice-nums 3 --compat reference --force-listen 7"
    words += " --euler-steps 4 --model m --token2wav t --device cpu --dtype bfloat16 --compile --cuda-graphs off"
    more = ["temperature=0.5", "window.max_units=9", 'window={"marker":"; "}', "top_k=1", "top_k=2", "drain_s=0"]
    args = parser().parse_args([*words.split(), *(word for pair in more for word in ("--set", pair))])
    session = session_config(args)
    assert (session.seed, session.decode_mode, session.max_slice_nums) == (5, "greedy", 3)
    assert (session.compat, session.force_listen_count, session.euler_steps) == ("reference", 7, 4)
    assert (session.window.mode, session.window.max_units, session.window.marker) == ("context", 9, "; ")
    assert (session.temperature, session.top_k, session.drain_s) == (0.5, 2, 0)
    config = engine_config(args, session)
    assert (str(config.model_path), str(config.token2wav_path), config.max_sessions) == ("m", "t", 1)
    assert (config.device, config.dtype) == ("cpu", "bfloat16")
    assert (config.compile.enabled, config.compile.cuda_graphs) == (True, "off")
    assert (config.euler_steps, config.seed) == (4, 5)
    plain = parser().parse_args(["talk.mp4", "--set", "seed=9", "--set", "euler_steps=3"])
    assert session_config(plain).seed == 9, "expected --set above the options"
    assert engine_config(plain, session_config(plain)).euler_steps == 3


@pytest.mark.parametrize("compat", ["fixed", "reference"])
def test_session_uses_the_settings(compat: str, files: Path, tmp_path: Path) -> None:
    flags = [files / "sound.wav", "--force-listen", 0, "--compat", compat, "--max-units", 1, "--tail", 0]
    flags += ["--set", "generate_audio=false"]

    def tokens(*more: object) -> list[int]:
        return talk(tmp_path, *flags, *more)["units"][0]["tokens"]

    assert tokens("--greedy", "--seed", 0) == tokens("--greedy", "--seed", 1), "expected no draws of text"
    assert len({tuple(tokens("--seed", seed)) for seed in range(3)}) > 1, "expected the seed to matter"


# --- voices -------------------------------------------------------------------------------------


def test_caches_voices(files: Path, tmp_path: Path, monkeypatch) -> None:
    flags = [files / "sound.wav", "--force-listen", 0, "--max-units", 1, "--tail", 0]
    talk(tmp_path, *flags)
    expected = (tmp_path / "r.wav").read_bytes()
    cache = tmp_path / "voices"
    talk(tmp_path, *flags, "--voice-cache", cache)
    assert (tmp_path / "r.wav").read_bytes() == expected
    assert len(list(cache.glob("*.safetensors"))) == 1
    monkeypatch.setattr(voices, "load_voice_parts", None)
    talk(tmp_path, *flags, "--voice-cache", cache)
    assert (tmp_path / "r.wav").read_bytes() == expected, "expected the voice that was kept"


def test_uses_the_reference_voice(files: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.flac"
    soundfile.write(other, 0.1 * np.random.default_rng(1).standard_normal((44_100, 2)), 44_100)
    flags = [files / "sound.wav", "--force-listen", 0, "--max-units", 1, "--tail", 0, "--greedy"]
    transcripts, sounds = [], []
    for more in ([], ["--ref-audio", other], ["--system", "Streaming Omni Conversation. Be kind."]):
        transcripts.append(talk(tmp_path, *flags, *more))
        sounds.append((tmp_path / "r.wav").read_bytes())
    assert len(set(sounds)) == 3
    assert [one["ref_audio"] for one in transcripts] == ["default.wav", "other.flac", "default.wav"]
    # Before the first token, the context holds the prompt and the unit.
    default, shorter, longer = (one["units"][0]["llm_rows"] - len(one["units"][0]["tokens"]) for one in transcripts)
    assert shorter == default - 10, "expected ten rows for each second of sound"
    assert longer > default, f"expected more rows for more text, got {default} and {longer}"


# --- interruption -------------------------------------------------------------------------------


def test_interrupt_writes_nothing(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "long.wav", np.zeros(16_000 * 900), 16_000)
    (tmp_path / "r.wav").write_text("older")
    flags = ["--out", tmp_path / "r.wav", "--transcript", tmp_path / "r.json", *QUIET]
    process = start(tmp_path / "long.wav", *flags)
    lines = [process.stdout.readline() for _ in range(3)]
    assert lines[2].split()[:2] == ["1", "LISTEN"], f"expected a row as soon as its unit is out, got {lines}"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long.wav", "r.wav"]
    assert (tmp_path / "r.wav").read_text() == "older"


@pytest.mark.parametrize("flag", ["--out", "--transcript"])
def test_interrupt_during_writing_leaves_no_partial_file(flag: str, files: Path, tmp_path: Path, monkeypatch) -> None:
    def interrupted(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    (tmp_path / "reply").write_text("older")
    got = main([str(files / "sound.wav"), flag, str(tmp_path / "reply"), *QUIET])
    assert got == offline.INTERRUPTED
    assert [path.name for path in tmp_path.iterdir()] == ["reply"], "expected nothing half-written to stay"
    assert (tmp_path / "reply").read_text() == "older"
