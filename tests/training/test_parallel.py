"""Training in several processes: what they exchange, and that they take the same steps."""

import multiprocessing
import os
import socket
from pathlib import Path

import torch

from tests.training.batches import SIZES, tiny_model
from tests.worker.loop.engines import TINY
from training.mind.examples import Examples
from training.mind.learner import Learner, LearnPlan
from training.mind.parallel import Group
from training.mind.pool import Pool
from training.mind.produce import make_shard

CPU = torch.device("cpu")
SIZE = 2


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def take_steps(rank: int, port: int, folder: Path) -> None:
    """What one process does: weights, gradients and numbers of its own, then two steps on records of its own."""
    os.environ |= {"WORLD_SIZE": str(SIZE), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    group, device = Group.of_environment(CPU)
    weights = {name: torch.full((2,), 10.0 + rank) for name in ("both", "one", "none")}
    weights["both"].grad = torch.tensor([1.0, 3.0 + 4 * rank])
    if rank == 1:
        weights["one"].grad = torch.ones(2)
    group.mean_gradients(weights)
    gradients = {name: one.grad for name, one in weights.items()}
    numbers = group.agreed(rank + 0.5, rank)
    group.share_weights(weights)

    examples = Examples(TINY, seconds=8.0, lesson_s=7.0)
    pool = Pool(SIZES, CPU)
    pool.add(make_shard(examples, [("text", 4)], 100 * rank, 0))
    mind = Learner(tiny_model(), examples.tokenizer.special, LearnPlan(folder, device, 1000, rows=64, group=group))
    tasks = []
    for _ in range(2):
        tasks.append(sorted(mind._next_tasks(pool)))
        (mind.seconds,) = group.agreed(mind.seconds)
        mind.step(pool)
    sums = torch.stack([one.detach().double().sum() for one in mind.weights.values()])
    seen = {"rank": group.rank, "gradients": gradients, "weights": weights, "numbers": numbers, "tasks": tasks}
    torch.save(seen | {"sums": sums, "loss": mind.take_log()["text_loss"]}, folder / f"{rank}.pt")
    group.leave()


def test_processes_take_the_same_steps(tmp_path: Path) -> None:
    context, port = multiprocessing.get_context("spawn"), free_port()
    processes = [context.Process(target=take_steps, args=(rank, port, tmp_path)) for rank in range(SIZE)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(120)
    assert [one.exitcode for one in processes] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(SIZE))
    for rank, seen in enumerate((first, second)):
        assert seen["rank"] == rank
        assert seen["gradients"]["both"].tolist() == [1.0, 5.0], "expected the mean"
        assert seen["gradients"]["one"].tolist() == [0.5, 0.5], "expected zero from the process without a gradient"
        assert seen["gradients"]["none"] is None
        assert seen["numbers"] == (0.5, 0.0)
        assert all(one.tolist() == [10.0, 10.0] for one in seen["weights"].values())
        assert seen["tasks"] == [["text"], ["text"]], "expected one task a step of each process"
    assert first["loss"] != second["loss"], "expected batches of their own"
    difference = float((first["sums"] - second["sums"]).abs().max())
    assert difference == 0, f"expected the same weights, got a difference of {difference}"


def test_a_process_alone_exchanges_nothing() -> None:
    group, device = Group.of_environment(CPU)
    weights = {"one": torch.ones(2)}
    group.mean_gradients(weights)
    group.share_weights(weights)
    group.leave()
    assert (group.size, group.is_first, device) == (1, True, CPU)
    assert group.agreed(2.5, 1) == (2.5, 1) and weights["one"].grad is None
