"""One call of the mind's training: its files, how it continues, and the checkpoint that is made of them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.load import load_model
from training import run_mind
from training.mind import export, measure, produce
from training.mind.examples import Examples
from training.mind.learner import Learner, LearnPlan
from training.mind.moments import AUXILIARY
from training.mind.produce import ProducerPlan, make_shard
from training.mind.records import Record
from training.mind.words.written import WRITTEN


class OneShard:
    """In place of processes: a shard for training, and one that is held out."""

    n_alive = 1

    def __init__(self, plan: ProducerPlan, n: int):
        self._shards = [make_shard(plan.examples, [("text", 4)], plan.first, 0)]
        self._held_out = [make_shard(replace(plan.examples, split="held_out"), [("text", 2)], 0, 0)]

    def take(self) -> Iterator[list[Record]]:
        while self._shards:
            yield self._shards.pop()

    def take_held_out(self) -> Iterator[list[Record]]:
        while self._held_out:
            yield self._held_out.pop()

    def stop(self) -> None:
        self._shards.clear()


def test_a_call_continues_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_mind, "Producers", OneShard)
    monkeypatch.setattr(measure, "MAX_ANSWER", 4)
    monkeypatch.setattr(run_mind, "WAIT_S", 0.01)
    work, out, moved = (tmp_path / name for name in ("work", "out", "moved"))
    common = ["--seconds", "60", "--rows", "128", "--max-steps", "1", "--device", "cpu", "--pool-bytes", "1e7"]
    assert run_mind.main(["--work", str(work), "--out", str(out), *common]) == 0
    assert sorted(one.name for one in out.iterdir()) == [
        "log.jsonl",
        "mind_moments.pt",
        "mind_weights.pt",
        "report.json",
    ]
    assert all(one.stat().st_size < 20 * 2**20 for one in out.iterdir())
    report = json.loads((out / "report.json").read_text())["mind"]
    assert report["step"] == 1 and report["held_out"] == 2 and 0 <= report["text_answers"] <= 1
    assert 0 < report["progress"] < 0.5, f"expected a small part of the plan, got {report['progress']}"

    # Where WORK is lost, a call continues from OUT.
    assert run_mind.main(["--work", str(tmp_path / "new"), "--out", str(moved), "--initial", str(out), *common]) == 0
    log = [json.loads(line) for line in (moved / "log.jsonl").read_text().splitlines()]
    assert log[0]["continues"] == str(moved)
    assert json.loads((moved / "report.json").read_text())["mind"]["step"] == 2

    export.main(["--weights", str(moved), "--out", str(tmp_path / "talker")])
    exported = load_model(tmp_path / "talker", device="cpu").state_dict()
    for name, weight in torch.load(moved / "mind_weights.pt", weights_only=True).items():
        if not name.startswith(AUXILIARY):
            assert torch.allclose(exported[name].float(), weight.float(), atol=1e-2, rtol=1e-2), name


def test_a_call_that_is_stopped_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopping(OneShard):
        def take_held_out(self) -> Iterator[list[Record]]:
            raise run_mind.Stopped

    monkeypatch.setattr(run_mind, "Producers", Stopping)
    common = ["--seconds", "60", "--rows", "64", "--device", "cpu", "--pool-bytes", "1e7"]
    assert run_mind.main(["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), *common]) == 0
    assert (tmp_path / "out" / "mind_weights.pt").exists() and (tmp_path / "work" / "mind.pt").exists()


def test_arguments_say_how_the_model_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[tuple[LearnPlan, ProducerPlan]] = []

    class Planned(OneShard):
        def __init__(self, plan: ProducerPlan, n: int):
            super().__init__(plan, n)
            self.plan = plan

    def train(_: object, learner: Learner, producers: Planned, *__: object) -> int:
        plans.append((learner.plan, producers.plan))
        return 1

    monkeypatch.setattr(run_mind, "Producers", Planned)
    monkeypatch.setattr(run_mind, "_train", train)
    monkeypatch.setattr(run_mind, "_measure", lambda *_: {})
    common = ["--work", str(tmp_path), "--out", str(tmp_path), "--device", "cpu", "--pool-bytes", "1e7"]
    for more in ([], ["--dropout", "0", "--written", "0", "--no-stock"], ["--restart", "--dropout", "0.2"]):
        assert run_mind.main([*common, *more]) == 0
    (usual, made), (bare, bare_made), (other, _) = plans
    assert (usual.dropout, usual.written, usual.restarts, made.stock) == (0.1, 0.25, False, True)
    assert (bare.dropout, bare.written, bare_made.stock) == (0, 0, False)
    assert set(dict(made.shard)) - set(dict(bare_made.shard)) == {WRITTEN}
    assert (other.dropout, other.restarts) == (0.2, True)


def test_speech_needs_a_mind(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected a trained mind"):
        run_mind.main(["--work", str(tmp_path), "--out", str(tmp_path / "out"), "--stage", "speech", "--device", "cpu"])


def test_shards_wait_in_a_folder_until_they_are_taken(tmp_path: Path) -> None:
    producers = produce.Producers(ProducerPlan(Examples(tmp_path), tmp_path), 0)
    produce.write_records(tmp_path / "00000001.shard", [])
    produce.write_records(tmp_path / "00000000.held", [])
    assert list(producers.take()) == [[]] and list(producers.take_held_out()) == [[]]
    assert not list(producers.take())
    produce.write_records(tmp_path / "00000002.shard", [])
    producers.stop()
    assert not list(tmp_path.iterdir())
