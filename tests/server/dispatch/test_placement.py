"""The choice of a session's worker: labels, headroom, affinity, and the same choice in a gateway and in a cluster."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import QueryParams

from models.checkpoint.precision import PRESETS
from models.errors import SettingsError
from server.cluster.authority import Authority
from server.cluster.messages import Claim, Finish, Granted, Hello, Submit
from server.dispatch.dispatcher import Dispatcher
from server.dispatch.eta import Eta, EtaConfig
from server.dispatch.placement import AFFINITY_SHARE, MAX_VOICES, Affinity, choose, labels_of, needs_of, voice_of
from server.dispatch.queue import Needs, Queue
from server.dispatch.workers import Worker, WorkerAddress, Workers
from tests.server.dispatch.test_queue import body

MODELS, PRECISIONS, VOICES, SESSIONS = ("/weights/a", "/weights/b"), ("bf16", "fp8"), ("", "v", "w"), ("s", "t", "u")
NEEDS = st.builds(
    Needs, st.frozensets(st.sampled_from(["model:a", "model:b", "precision:fp8"]), max_size=2), st.sampled_from(VOICES)
)


def health(model: str, precision: str, total: int, free: int, memory_share: float = 0.5) -> dict[str, Any]:
    described = {"model": {"path": model, "precision_label": precision}, "memory_share": memory_share}
    return {**body("BUSY", total, free), **described}


@st.composite
def fleets(draw: st.DrawFn) -> Workers:
    """Workers with any free slots, labels, memory and history."""
    n = draw(st.integers(1, 5))
    workers = Workers([WorkerAddress("w", index) for index in range(n)], packs=draw(st.booleans()))
    for worker in workers.all:
        total = draw(st.integers(1, 8))
        free, memory = draw(st.integers(0, total)), draw(st.sampled_from([0.5, 0.5, 0.95]))
        of_model = draw(st.sampled_from(MODELS)), draw(st.sampled_from(PRECISIONS))
        workers.record_health(worker, health(*of_model, total, free, memory))
        for session, voice in draw(st.lists(st.tuples(st.sampled_from(SESSIONS), st.sampled_from(VOICES)), max_size=2)):
            worker.affinity.record(session, voice)
    return workers


def share(worker: Worker) -> float:
    return worker.n_free / worker.n_slots


@settings(max_examples=300)
@given(workers=fleets(), needs=NEEDS, session=st.sampled_from([*SESSIONS, "new"]), packs=st.booleans())
def test_choice(workers: Workers, needs: Needs, session: str, packs: bool) -> None:
    able = [one for one in workers.all if one.n_free and needs.labels <= labels_of(one.health)]
    able = [one for one in able if not one.is_short_of_memory] or able
    got = choose(workers.all, "omni", session, needs, packs=packs)
    if not able:
        assert got is None, f"expected no worker, got {got}"
        return
    assert got in able, f"expected one with a free slot, the labels and memory, got {got}"
    best = (min if packs else max)(share(one) for one in able)
    near = [one for one in able if abs(share(one) - best) <= AFFINITY_SHARE]
    ranks = [one.affinity.rank(session, needs.voice) for one in near]
    assert got in near, f"expected a free share within {AFFINITY_SHARE} of {best}, got {share(got)}"
    assert got.affinity.rank(session, needs.voice) == max(ranks), f"expected the nearest of {ranks}, got {got}"
    if not max(ranks):
        assert share(got) == best, f"expected the free share {best}, got {share(got)}"


SUBMIT = st.tuples(st.just("submit"), st.sampled_from(SESSIONS), NEEDS)
FINISH = st.tuples(st.just("finish"), st.integers(0, 9), st.just(Needs()))


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 3), min_size=2, max_size=4), events=st.lists(SUBMIT | FINISH, max_size=25))
def test_a_gateway_and_an_authority_choose_the_same_workers(sizes: list[int], events: list[Any]) -> None:
    addresses = [WorkerAddress("w", index + 1) for index in range(len(sizes))]
    dispatcher = Dispatcher(Workers(addresses), Queue(100), Eta(EtaConfig()))
    authority = Authority(Workers(()), Queue(100), Eta(EtaConfig()))
    told: list[Any] = []
    gateway = authority.connect(Hello(gateway="g"), told.append)
    for index, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
        report = health(MODELS[index % 2], PRECISIONS[index // 2 % 2], size, size)
        for workers, worker in ((dispatcher.workers, dispatcher.workers.all[index]), (authority.workers, None)):
            workers.record_health(worker or authority.add_worker(address), report)
    own = []
    for what, which, needs in events:
        if what == "submit":
            pending = dispatcher.submit("omni_duplex", which, needs=needs)
            own.append(pending)
            named = {"ticket": pending.ticket.ticket_id, "session": which, "labels": sorted(needs.labels)}
            claim = Claim(number=0, request_type="omni_duplex", owner="", voice=needs.voice, **named)
            authority.submit(gateway, Submit(claim=claim))
        elif own:
            pending = own.pop(which % len(own))
            dispatcher.finish(pending)
            authority.finish(gateway, Finish(ticket=pending.ticket.ticket_id))
        granted = {one.ticket: one.worker for one in told if isinstance(one, Granted)}
        got = [granted.get(one.ticket.ticket_id, "") for one in own]
        expected = ["" if one.lease is None else str(one.lease.worker.address) for one in own]
        assert got == expected, f"expected the gateway's choices {expected}, got {got}"


def test_session_with_labels_does_not_hold_up_the_others() -> None:
    dispatcher = Dispatcher(Workers([WorkerAddress("w", 1), WorkerAddress("w", 2)]), Queue(9), Eta(EtaConfig()))
    for worker, precision in zip(dispatcher.workers.all, PRECISIONS, strict=True):
        dispatcher.workers.record_health(worker, health("/weights/a", precision, 1, 1))
    needs = Needs(frozenset({"precision:fp8"}))
    first, second = (dispatcher.submit("omni_duplex", name, needs=needs) for name in "ab")
    other = dispatcher.submit("omni_duplex", "c")
    third = dispatcher.submit("omni_duplex", "d")
    assert first.lease is not None and first.lease.worker is dispatcher.workers.all[1], f"expected fp8, got {first}"
    assert other.lease is not None and second.lease is None, "expected the slot that the waiting session cannot use"
    positions = [dispatcher.position_of(one).position for one in (second, third)]  # type: ignore[union-attr]
    assert positions == [1, 1], f"expected the first place of each line, got {positions}"
    dispatcher.finish(first)
    assert second.lease is not None and third.lease is None, "expected the order of arrival where both may be served"


def test_labels_and_voices_of_requests() -> None:
    mixed = replace(PRESETS["fp8"], flow="int8")
    expected = "llm-int8-fp8_tts-bf16_vpm-bf16_apm-int8_flow-int8"
    for precision, label in (*((one, name) for name, one in PRESETS.items()), (mixed, expected)):
        got = labels_of({"model": {"path": "/w/MiniCPM-o-4_5", "precision_label": precision.label}})
        assert got == {"model:MiniCPM-o-4_5", f"precision:{label}"}, f"{precision}: got {got}"
        query = QueryParams(f"labels=precision:{precision.label}")  # decoded as that of an address: + is a blank
        assert needs_of(query).labels <= got, f"{precision}: expected one label, got {needs_of(query).labels}"
    assert labels_of({"model": {"precision": "int8"}}) == {"precision:int8"}, "expected it as without a label"
    assert labels_of({}) == labels_of({"model": {"path": 3}}) == frozenset()
    assert needs_of({"labels": "precision:fp8,model:a"}).labels == {"precision:fp8", "model:a"}
    assert needs_of({}) == Needs()
    with pytest.raises(SettingsError, match="labels: expected at most 8 labels of 200 characters, got 9"):
        needs_of({"labels": ",".join("abcdefghi")})
    assert voice_of({"ref_audio_path": "a"}) == voice_of({"ref_audio_path": "a"}) != voice_of({"ref_audio_path": "b"})
    assert voice_of({}) == voice_of({"ref_audio_path": None}) == ""


def test_affinity_lasts_as_long_as_the_worker_keeps_its_voices() -> None:
    affinity = Affinity()
    for number in range(MAX_VOICES + 1):
        affinity.record(f"s{number}", f"v{number}")
    assert [affinity.rank("new", voice) for voice in ("v0", "v1", f"v{MAX_VOICES}", "")] == [0, 1, 1, 0]
    assert affinity.rank("s0", "") == 2
    workers = Workers([WorkerAddress("w", 1)])
    workers.record_health(workers.all[0], body("IDLE", 1, 1))
    assert workers.acquire("chat", "s") is not None
    workers.record_loss(workers.all[0])
    assert workers.all[0].affinity.rank("s", "") == 0, "expected nothing of a process that has ended"
