"""Groups of workers of several kinds under one controller: their numbers, their load and their options."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cluster.groups import ClusterReport, Group, loads_of
from launcher.cluster.members import GroupPlan
from launcher.cluster.options import make_plan, parser
from launcher.cluster.program_host import ProgramSpec
from launcher.cluster.ray_placement import bundles_of, nodes_apart
from launcher.cluster.scaling import GroupLoad, ScalingPolicy, SlotLoad
from launcher.plan import RunSecrets
from models.errors import ModelError
from tests.launcher.cluster.test_controller import PlayedProgram, controlled, poll
from worker.config.service import default_config

SPEECH = ("speech", "max=3", "gpus=0", "resource=speech", "set=model.omni=false", "set=model.speech_path=/models/qwen")


def line(model: str, length: int, *labels: str) -> dict[str, Any]:
    return {"model": model, "labels": list(labels), "length": length, "longest_wait_s": 5.0}


def test_each_group_follows_its_own_model() -> None:
    played, controller, clock = controlled(ScalingPolicy(1, 2), speech=ScalingPolicy(1, 3, idle_s=10.0))
    poll(controller, clock)

    def names() -> list[str]:
        return sorted(one.spec.name for one in played.running("worker") if not one.is_asked)

    assert names() == ["speech-1", "worker-1"]
    by_name: dict[str, PlayedProgram] = {one.spec.name: one for one in played.programs}
    played.use(by_name["speech-1"].address, 2)
    played.queues = [line("speech", 9)]
    poll(controller, clock)
    assert names() == ["speech-1", "speech-2", "speech-3", "worker-1"], "expected more workers of the speech model only"
    assert played.requested[-1] == {"worker": 1, "speech": 3}, f"expected one request for both, got {played.requested}"

    played.queues = []
    played.use(by_name["speech-1"].address, 1)
    poll(controller, clock, 40)
    assert names() == ["speech-1", "worker-1"], f"expected workers without sessions to be stopped, got {names()}"
    groups = {one["name"]: one["group"] for one in controller.describe()["workers"]}
    assert groups["speech-1"] == "speech" and groups["worker-1"] == "worker"


def test_new_controller_finds_the_workers_of_each_group() -> None:
    played, controller, clock = controlled(ScalingPolicy(1, 1), speech=ScalingPolicy(1, 1))
    controller.adopt(["authority", "speech-4", "gateway-0", "worker-2"])
    poll(controller, clock)
    assert sorted(one.spec.name for one in played.running("worker")) == ["speech-4", "worker-2"]


def test_tickets_count_with_groups_that_can_serve_them() -> None:
    groups = [
        Group(GroupPlan(ProgramSpec("worker", name, ("w",)), ScalingPolicy(1, n_max)))
        for name, n_max in (("full", 2), ("small", 4), ("speech", 2), ("starting", 2))
    ]
    report = ClusterReport(
        {
            name: {
                **{"is_ready": name != "starting", "labels": [f"precision:{name}"], "leases": 0},
                "models": {"speech" if name == "speech" else "omni": {"slots": 4, "free": 1}, "conversion": {}},
            }
            for name in ("full", "small", "speech", "starting")
        },
        [line("omni", 9), line("omni", 1, "precision:small"), line("speech", 2), line("omni", 7, "precision:fp8")],
    )
    for group in groups:
        group.add().address = group.plan.worker.name
    full, small, speech, starting = loads_of(groups, report)
    # Two workers of the first group have room for five of the nine; the others need the second group.
    assert full == GroupLoad(1, 0, (SlotLoad(4, 1, 5, 5.0),)), f"got {full}"
    assert small == GroupLoad(1, 0, (SlotLoad(4, 1, 5, 5.0),)), f"got {small}"
    assert speech == GroupLoad(1, 0, (SlotLoad(4, 1, 2, 5.0),)), f"got {speech}"
    assert starting == GroupLoad(1, 1), f"got {starting}"


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 60), max_size=3),
)
def test_every_ticket_counts_once_and_with_the_first_group_that_has_room(
    sizes: list[tuple[int, int, int]], lengths: list[int]
) -> None:
    """sizes: of each group: largest number of workers, slots of its one worker, used ones. lengths: of queues."""
    groups, workers = [], {}
    for number, (n_max, slots, used) in enumerate(sizes):
        group = Group(GroupPlan(ProgramSpec("worker", f"g{number}", ("w",)), ScalingPolicy(1, n_max)))
        group.add().address = f"g{number}"
        free = max(0, slots - used)
        workers[f"g{number}"] = {"is_ready": True, "labels": [], "models": {"omni": {"slots": slots, "free": free}}}
        groups.append(group)
    loads = loads_of(groups, ClusterReport(workers, [line("omni", n) for n in lengths]))
    rooms = [n_max * slots - min(slots, used) for n_max, slots, used in sizes]
    left = sum(lengths)
    for load, room in zip(loads, rooms, strict=True):
        (model,) = load.models
        assert model.queue_length == min(left, room), f"expected {min(left, room)} tickets, got {load}"
        left -= model.queue_length


def test_request_for_nodes_has_the_resources_of_all_groups() -> None:
    omni = ProgramSpec("worker", "omni", ("w",), n_gpus=1)
    speech = ProgramSpec("worker", "speech", ("w",), n_gpus=0.5, resources=(("speech", 1.0),))
    assert bundles_of([(omni, 2), (speech, 1)]) == [{"GPU": 1}, {"GPU": 1}, {"speech": 1.0, "GPU": 0.5}]
    assert bundles_of([(ProgramSpec("worker", "cpu", ("w",)), 3), (omni, 0)]) == []


def test_options_of_groups() -> None:
    groups = ("--group", "omni", "min=2", "model-path=/models/omni", "--group", *SPEECH)
    args = parser().parse_args(["up", "--max-sessions", "8", *groups])
    omni, speech = make_plan(default_config(), args, RunSecrets("secret")).groups
    assert omni.worker.name == "omni" and omni.worker.n_gpus == 1 and omni.scaling.min_workers == 2
    assert omni.scaling.max_workers == 2 and "/models/omni" in omni.worker.command
    assert speech.worker.resources == (("speech", 1.0),) and speech.worker.n_gpus == 0
    assert (speech.scaling.min_workers, speech.scaling.max_workers) == (1, 3)
    environ = dict(speech.worker.environ)
    assert environ["DUOLOGUE_MODEL_OMNI"] == "false" and environ["DUOLOGUE_MODEL_SPEECH_PATH"] == "/models/qwen"
    assert "DUOLOGUE_MODEL_OMNI" not in dict(omni.worker.environ)
    for group in (omni, speech):
        assert group.worker.command[-3:-1] == ("--max-sessions", "8"), f"got {group.worker.command}"


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (("gateway",), "--group"),
        (("speech-1",), "--group"),
        (("speech", "min"), "KEY=VALUE"),
        (("speech", "size=1"), "KEY=VALUE"),
        (("speech", "min=0"), "speech min: expected a number from 1"),
        (("speech", "gpus=many"), "speech gpus: expected a number from 0"),
        (("speech", "min=3", "max=2"), "at least min, 3"),
        (("speech", "set=omni"), "SECTION.KEY=VALUE"),
        (("speech", "set=model.omni=perhaps"), "omni"),
        (("speech", "--group", "speech"), "the same name twice"),
    ],
)
def test_invalid_groups_are_refused(group: tuple[str, ...], message: str) -> None:
    args = parser().parse_args(["up", "--group", *group])
    with pytest.raises(ModelError, match=message):
        make_plan(default_config(), args, RunSecrets())


def test_gateways_run_on_nodes_that_workers_do_not_need() -> None:
    common = {"CPU": 4.0, "memory": 1e9, "object_store_memory": 1e8}
    resources = {
        "head": {"node:10.0.0.1": 1.0, "node:__internal_head__": 1.0},
        "gpu": {"GPU": 1.0, "accelerator_type:H200": 1.0},
        "speech": {"speech": 1.0},
        "plain": {"node:10.0.0.2": 1.0},
        "dead": {},
    }
    nodes = [
        {"NodeID": name, "Alive": name != "dead", "Resources": {**common, **more}} for name, more in resources.items()
    ]
    assert nodes_apart(nodes) == ["head", "plain"]
    assert nodes_apart(nodes[1:3]) == []
