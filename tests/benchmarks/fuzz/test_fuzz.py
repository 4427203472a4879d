"""Nearly valid messages at every reader of clients' input; `python -m benchmarks.fuzz` sends millions."""

import json

import pytest

from benchmarks.fuzz import readers
from benchmarks.fuzz.corpus import found_by, read_corpus, shrunk
from benchmarks.fuzz.readers import TARGETS, FoundError, FuzzTarget

SEED, N = 4, 60
CPU_S = 60.0  # of one message; the benchmark bounds it closer, on a machine that nothing else uses
CHEAP = [name for name, target in TARGETS.items() if target.weight >= 0.1]


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_CPU_S", CPU_S)


@pytest.mark.parametrize("name", CHEAP)
def test_reader_accepts_or_refuses(name: str) -> None:
    target, n_accepted = TARGETS[name], 0
    for number in range(N):
        data = target.case(name, SEED, number)
        try:
            n_accepted += target.check(data)
        except FoundError as error:
            pytest.fail(f"{name}, seed {SEED}, message {number}: {error.kind}: {error}: {data[:500]!r}")
    assert 0 < n_accepted < N, f"{name}: expected accepted and refused messages, got {n_accepted} of {N} accepted"


def test_messages_repeat_with_their_seed() -> None:
    target = TARGETS["duplex"]
    assert target.case("duplex", 1, 2) == target.case("duplex", 1, 2) != target.case("duplex", 2, 2)


@pytest.mark.parametrize(("name", "data", "found"), read_corpus())
def test_earlier_finds_stay_mended(name: str, data: str | bytes, found: str) -> None:
    try:
        TARGETS[name].check(data)
    except FoundError as error:
        pytest.fail(f"{name}: {found} was mended, got {error.kind}: {error}: {data[:500]!r}")


def test_finds_are_made_small() -> None:
    """A reader that fails for one field inside a list."""

    def read(text: str) -> None:
        json.loads(text)["items"][-1]["bad"]

    target = FuzzTarget(lambda mutator: "", read, (KeyError, IndexError, TypeError, ValueError))
    broken = FuzzTarget(lambda mutator: "", lambda text: read(text) or 1 // 0, target.refusals)
    message = json.dumps({"a": 1, "items": [{"x": 2}, {"bad": "long text", "y": [1, 2]}], "z": {}})
    kind = found_by(broken, message)
    assert kind is not None and found_by(target, message) is None
    small = shrunk(message, lambda one: found_by(broken, one) == kind)
    assert json.loads(small) == {"items": [{"bad": json.loads(small)["items"][0]["bad"]}]}, small
    assert len(small) < 25, f"expected a small message, got {small}"
