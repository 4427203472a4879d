"""Training in several processes: what they exchange, and that they take the same steps."""

import json
import multiprocessing
import os
import signal
import socket
from pathlib import Path

import torch
from torch import Tensor

from tests.training.test_run_mind import OneShard
from training import run_mind
from training.mind import measure
from training.mind.examples import Task
from training.mind.learner import Learner
from training.mind.parallel import Group
from training.mind.pool import Pool

CPU = torch.device("cpu")
SIZE = 2


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def take_part(rank: int, ports: list[int], folder: Path) -> None:
    """What one process does: exchanges of its own numbers, a call of two steps, and a call that is stopped."""
    os.environ |= {"WORLD_SIZE": str(SIZE), "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    os.environ["MASTER_PORT"] = str(ports[0])
    group, _ = Group.of_environment(CPU)
    weights = {name: torch.full((2,), 10.0 + rank) for name in ("both", "one", "none")}
    weights["both"].grad = torch.tensor([1.0, 3.0 + 4 * rank])
    if rank == 1:
        weights["one"].grad = torch.ones(2)
    group.mean_gradients(weights)
    gradients = {name: one.grad for name, one in weights.items()}
    numbers = group.agreed(rank + 0.5, rank)
    group.share_weights(weights)
    group.leave()

    sums, tasks = list[Tensor](), list[list[str]]()
    step, draw = Learner.step, Learner._next_tasks

    def kept_step(self: Learner, pool: Pool) -> None:
        step(self, pool)
        sums.append(torch.stack([one.detach().double().sum() for one in self.weights.values()]))
        if len(sums) == 3 and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def kept_tasks(self: Learner, pool: Pool) -> dict[Task, float]:
        tasks.append(list(drawn := draw(self, pool)))
        return drawn

    Learner.step, Learner._next_tasks = kept_step, kept_tasks  # type: ignore[method-assign]
    run_mind.Producers = OneShard  # type: ignore[assignment,misc]
    measure.MAX_ANSWER, run_mind.WAIT_S = 4, 0.01
    common = ["--work", str(folder / "work"), "--rows", "256", "--device", "cpu", "--pool-bytes", "1e7"]
    os.environ["MASTER_PORT"] = str(ports[1])
    assert run_mind.main([*common, "--out", str(folder / "out"), "--max-steps", "2", "--until-end"]) == 0
    os.environ["MASTER_PORT"] = str(ports[2])
    assert run_mind.main([*common, "--out", str(folder / "stopped"), "--seconds", "600"]) == 0
    seen = {"rank": group.rank, "gradients": gradients, "weights": weights, "numbers": numbers}
    torch.save(seen | {"sums": torch.stack(sums), "tasks": tasks}, folder / f"{rank}.pt")


def test_processes_take_the_same_steps(tmp_path: Path) -> None:
    context, ports = multiprocessing.get_context("forkserver"), [free_port() for _ in range(3)]
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # by a process that stays until pytest ends
    processes = [context.Process(target=take_part, args=(rank, ports, tmp_path), daemon=True) for rank in range(SIZE)]
    try:
        for one in processes:
            one.start()
        for one in processes:
            one.join(180)
        assert [one.exitcode for one in processes] == [0, 0]
    finally:
        for one in processes:
            one.kill()
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(SIZE))
    for rank, seen in enumerate((first, second)):
        assert seen["rank"] == rank
        assert seen["gradients"]["both"].tolist() == [1.0, 5.0], "expected the mean"
        assert seen["gradients"]["one"].tolist() == [0.5, 0.5], "expected zero from the process without a gradient"
        assert seen["gradients"]["none"] is None
        assert seen["numbers"] == (0.5, 0.0)
        assert all(one.tolist() == [10.0, 10.0] for one in seen["weights"].values())
        assert seen["tasks"] == [["text"]] * 3, "expected one task a step of each process"
    difference = float((first["sums"] - second["sums"]).abs().max())
    assert difference == 0, f"expected the same weights, got a difference of {difference}"
    assert not torch.equal(first["sums"][0], first["sums"][1]), "expected steps that change weights"

    report = json.loads((tmp_path / "out" / "report.json").read_text())["mind"]
    assert report["step"] == 2 and report["held_out"] == 2 and 0 < report["progress"] <= 1
    assert (tmp_path / "work" / "log1.jsonl").exists()
    # A stopped call saves and measures nothing.
    assert sorted(one.name for one in (tmp_path / "stopped").iterdir()) == [
        "log.jsonl",
        "mind_moments.pt",
        "mind_weights.pt",
    ]
    moments = torch.load(tmp_path / "stopped" / "mind_moments.pt", weights_only=True)
    assert moments["counters"]["step"] == 3


def test_a_process_alone_exchanges_nothing() -> None:
    group, device = Group.of_environment(CPU)
    weights = {"one": torch.ones(2)}
    group.mean_gradients(weights)
    group.share_weights(weights)
    group.leave()
    assert (group.size, group.is_first, device) == (1, True, CPU)
    assert group.agreed(2.5, 1) == (2.5, 1) and weights["one"].grad is None
