"""Whether what is fast is also right: the same words as eager, the same bits twice, and nothing of the neighbours.

Text is greedy. A word that is fed follows from the one that was chosen, so that one other choice changes everything
after it, as in use; against eager, where one rounding may turn a choice, eager's words are fed, so that all choices are
compared and the first that differs is known. Knows sessions and choices. Does not know regions (`region_errors`).
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from benchmarks import report
from benchmarks.duplex.engine import Running, Weights
from benchmarks.duplex.region_errors import doubled, in_short
from benchmarks.duplex.region_slots import paired_slots
from benchmarks.duplex.sessions_under_test import LISTEN, SPEAK, Scenes, Talker, converse
from worker.assembly.parts import EngineParts
from worker.loop.observer import Observer

WATCHED = "watched"
SPEAKING, PERIOD, WORDS = 3, 5, 8  # units that speak, of so many, and their words
KEPT = 20  # logits of a choice that are kept for comparison
CONTEXT = 300
NEIGHBOURS = 7
COMPARED_SLOTS = 4  # sessions at most whose regions are compared at once
COMPARING_BYTES = 10 * 10**9  # what comparing takes of a GPU besides: copies of slots, differences in float64


@dataclass
class Choice:
    """What the sampler answered. ids, logits: the likeliest tokens, before penalties."""

    unit: int
    step: int
    token: int
    ids: list[int] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)


@dataclass
class Told:
    """All that a session came to. sounds: a digest for each unit, in text."""

    choices: list[Choice] = field(default_factory=list)
    speech_tokens: list[list[int]] = field(default_factory=list)
    sounds: list[str] = field(default_factory=list)


class Choices(Observer):
    """Who speaks when is given, the words are the sampler's. feeds: tokens to go on with instead, by unit and step."""

    def __init__(self) -> None:
        self.told = Told()
        self.feeds: dict[tuple[int, int], int] = {}
        self.own: dict[tuple[int, int], dict[int, float]] = {}  # logits of tokens asked for, by unit and step
        self._logits: dict[int, Any] = {}

    def watch(self, running: Running) -> None:
        """Keep the logits that the loop does not hand on."""
        duplex = running.parts.duplex

        def watched(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(slots: Sequence[int], *arguments: Any, **named: Any) -> Any:
                chosen = method(slots, *arguments, **named)
                self._logits = {slot: one.logits for slot, one in zip(slots, chosen, strict=True)}
                return chosen

            return call

        duplex.feed, duplex.step = watched(duplex.feed), watched(duplex.step)

    def token_sampled(self, session: str, job: Any, token: int) -> int:
        if session.startswith("warm-up"):
            return token
        if session.startswith((LISTEN, SPEAK)):
            return _scripted(job, token, listens=session.startswith(LISTEN))
        unit, step = job.session.n_decided, len(job.decoder.all_ids)
        chosen = token
        if session == WATCHED:
            chosen = self.feeds.get((unit, step), token)
            self._note(job.slot, unit, step, token, chosen)
        return _scripted(job, chosen, listens=unit % PERIOD >= SPEAKING, ends=unit % PERIOD == SPEAKING - 1)

    def _note(self, slot: int, unit: int, step: int, token: int, expected: int) -> None:
        choice = Choice(unit, step, token)
        if (logits := self._logits.get(slot)) is not None:
            best = logits.float().topk(min(KEPT, logits.shape[-1]))
            choice.ids, choice.logits = best.indices.tolist(), best.values.tolist()
            if token != expected:
                self.own[unit, step] = {one: float(logits[one]) for one in (token, expected)}
        self.told.choices.append(choice)

    def speech_call_ended(self, session: str, start: int, rows: Any, least: int, speech_tokens: list[int]) -> None:
        if session == WATCHED:
            self.told.speech_tokens.append(list(speech_tokens))


def _scripted(job: Any, token: int, *, listens: bool, ends: bool = False) -> int:
    """A letter that follows from the token, where words are due: whatever a random model says can be spelled so."""
    ids, n = job.language.control_tokens, len(job.decoder.all_ids)
    if listens:
        return ids.listen
    if n == 0:
        return ids.speak
    if n <= WORDS:
        return ord("a") + token % 26
    return ids.turn_eos if ends and n == WORDS + 1 else ids.chunk_eos


def conversation(
    running: Running,
    choices: Choices,
    n_units: int,
    *,
    neighbours: int = 0,
    feeds: Sequence[Choice] = (),
    n_frames: int = 1,
    speaks: bool = True,
) -> Told:
    """What the watched session comes to.

    Args:
        feeds: of an earlier one, whose tokens are fed. speaks: draw codes and make sound; no word hangs on either.
    """
    report.say(f"{n_units} units{f' beside {neighbours} neighbours' if neighbours else ''}")
    choices.told, choices.own = Told(), {}
    choices.feeds = {(one.unit, one.step): one.token for one in feeds}
    config = running.engine.config.session.model_copy(
        update={"decode_mode": "greedy", "seed": 1, "generate_audio": speaks}
    )
    talkers = [Talker(running, WATCHED, context=CONTEXT, config=config, keeps_sound=True)]
    for number in range(1, neighbours + 1):
        other = config.model_copy(update={"seed": 1 + number})
        talkers.append(Talker(running, f"neighbour {number}", context=CONTEXT + number, config=other, seed=number))
    units = converse(running, talkers, Scenes(n_frames), n_units)
    for talker in talkers:
        talker.close()
    choices.told.sounds = [
        hashlib.blake2b(unit.sound, digest_size=8).hexdigest() for unit in units if unit.session == WATCHED
    ]
    return choices.told


def difference(one: Told, other: Told) -> dict[str, Any]:
    """Whether two conversations are the same, and where each kind of thing first is not."""
    first = {
        "ids": _first([c.token for c in one.choices], [c.token for c in other.choices]),
        "codes": _first(one.speech_tokens, other.speech_tokens),
        "sound": _first(one.sounds, other.sounds),
    }
    at = first["ids"]
    return {
        "same": all(place is None for place in first.values()),
        "first": first,
        "first_unit_of_ids": one.choices[at].unit if at is not None and at < len(one.choices) else None,
        "n_ids": len(one.choices),
        "n_calls_of_codes": len(one.speech_tokens),
        "n_codes": sum(map(len, one.speech_tokens)),
        "n_units": len(one.sounds),
    }


def against(reference: Told, told: Told, own: dict[tuple[int, int], dict[int, float]]) -> dict[str, Any]:
    """Choices that differ from the reference's, each made after the reference's own words.

    gap: by how much the engine's logit of its choice is above that of the reference's; reference_gap: the same turned
    round in the reference. None where it is not known.
    """
    expected = {(one.unit, one.step): one for one in reference.choices}
    differing = []
    for choice in told.choices:
        other = expected.get((choice.unit, choice.step))
        if other is None or other.token == choice.token:
            continue
        here, there = own.get((choice.unit, choice.step), {}), dict(zip(other.ids, other.logits, strict=True))
        differing.append(
            {
                "unit": choice.unit,
                "step": choice.step,
                "token": choice.token,
                "reference": other.token,
                "gap": here[choice.token] - here[other.token] if here else None,
                "reference_gap": there[other.token] - there[choice.token]
                if {other.token, choice.token} <= there.keys()
                else None,
            }
        )
    gaps = [one.logits[0] - one.logits[1] for one in reference.choices if len(one.logits) > 1]
    return {
        "n_units": len(told.sounds),
        "n_choices": len(told.choices),
        "n_not_compared": len(expected.keys() ^ {(one.unit, one.step) for one in told.choices}),
        "n_differ": len(differing),
        "first": differing[0] if differing else None,
        "differing": differing[:50],
        "median_gap_of_best_two": sorted(gaps)[len(gaps) // 2] if gaps else None,
    }


def identity(
    running: Running,
    choices: Choices,
    n_units: int,
    save: Callable[[dict[str, Any]], None],
    done: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The same conversation twice, and once more with neighbours. done: what is known of it."""
    result = dict(done or {})
    if "with_neighbours" in result:
        return result
    alone = conversation(running, choices, n_units)
    if "two_runs" not in result:
        result["two_runs"] = difference(alone, conversation(running, choices, n_units))
        save(result)
    n = min(NEIGHBOURS, running.parts.n_slots - 1)
    beside = conversation(running, choices, n_units, neighbours=n)
    result["with_neighbours"] = {"neighbours": n, **difference(alone, beside)}
    save(result)
    return result


def regions(
    running: Running,
    weights: Weights,
    n_units: int,
    save: Callable[[dict[str, Any]], None] = lambda found: None,
    limit_s: float = float("inf"),
) -> dict[str, Any]:
    """Every region that units call, as it serves, against plain eager float32; one session, then several at once.

    Args:
        save: given all of it after each unit. limit_s: calls that come later are not compared.
    Returns: {regions: errors by number of sessions, table and region, regions_left_out: what was not compared, if
        anything, narrow: of the narrow twin, None where float32 is served: {dtype, error: why there is none}}.
    """
    begun, found, left_out = time.monotonic(), {}, []
    report.say("the twin in float32")
    wide = replace(running.spec, way="eager", dtype="float32", plain=True)
    twin = weights.wide().parts(wide, wide.engine_config())
    assert not (twin.model.kernels or twin.vocoder.regions.kernels), "expected a reference without kernels"
    narrow, of_narrow = _narrow(running, weights, twin)
    counts = sorted({1, min(COMPARED_SLOTS, running.parts.n_slots)})
    for n_sessions in counts:
        with doubled(running.parts, twin, limit_s - (time.monotonic() - begun), narrow) as tables:
            for n_done in _units(running, n_sessions, n_units):
                found[str(n_sessions)] = {
                    table: {name: asdict(one) for name, one in named.items()}
                    for table, named in tables.errors().items()
                }
                whole = n_done == n_units and not tables.n_left_out
                told = f"{n_sessions} at once: {n_done} of {n_units} units, {tables.n_left_out} calls not compared"
                rest = [f"{n} at once" for n in counts if n > n_sessions]
                unfinished = [*left_out, *([] if whole else [told]), *rest]
                save({"regions": found, "regions_left_out": ", ".join(unfinished), "narrow": of_narrow})
        left_out += [] if whole else [told]
    report.say("regions are compared")
    return {"regions": found, "regions_left_out": ", ".join(left_out), "narrow": of_narrow}


def _narrow(running: Running, weights: Weights, twin: EngineParts) -> tuple[EngineParts | None, dict[str, str] | None]:
    """Plain eager in the type that is served. Returns: it, and what `regions` says of it."""
    dtype = weights.model.dtype
    if dtype == torch.float32:
        return None, None
    told = {"dtype": str(dtype).removeprefix("torch."), "error": ""}
    report.say(f"the twin in {told['dtype']}")
    try:
        _check_room(twin)
        spec = replace(running.spec, way="eager", plain=True)
        narrow = weights.copied(dtype).parts(spec, spec.engine_config())
        assert not (narrow.model.kernels or narrow.vocoder.regions.kernels), "expected a twin without kernels"
        paired_slots(running.parts, narrow)
    except Exception as error:  # only its own figures are lost
        told["error"] = in_short(error)
        return None, told
    return narrow, told


def _check_room(twin: EngineParts) -> None:
    """Raises: MemoryError if an engine half as large as this one would leave too little for comparing."""
    device = twin.model.device
    if device.type != "cuda":
        return
    modules = (twin.model, twin.vocoder.parts.flow, twin.vocoder.parts.hift)
    n_bytes = sum(tensor.nbytes for module in modules for tensor in module.state_dict().values())
    expected = (n_bytes + twin.duplex.state.nbytes() + twin.vocoder.n_bytes) // 2 + COMPARING_BYTES
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if free < expected:
        raise MemoryError(f"expected {expected / 1e9:.1f} GB of free memory, got {free / 1e9:.1f}")


def _units(running: Running, n_sessions: int, n_units: int) -> Iterator[int]:
    """Units of so many sessions, every second of which listens. Gives: how many are over, 0 behind the prompts."""
    scenes, talkers = Scenes(1), []
    report.say(f"{n_sessions} at once: prompts")
    for number in range(n_sessions):
        mode = LISTEN if number % 2 else SPEAK
        talkers.append(Talker(running, f"{mode} {number}", context=CONTEXT, seed=number))
    yield 0
    for unit in range(n_units):
        report.say(f"{n_sessions} at once: unit {unit + 1} of {n_units}")
        converse(running, talkers, scenes, 1, first=unit)
        if unit == n_units - 1:
            for talker in talkers:
                talker.close()
        yield unit + 1


def _first(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Index of the first entries that differ; a missing one differs. None if there are none."""
    if len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True)):
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def told_from(data: dict[str, Any]) -> Told:
    """Back from JSON."""
    return Told([Choice(**one) for one in data["choices"]], data["codes"], data["sounds"])
