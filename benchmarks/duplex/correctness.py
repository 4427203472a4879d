"""Correctness of the measured engine: tokens as in eager, identical repeated runs, no influence between sessions.

Text is decoded greedily. Each fed token depends on the token chosen before, so one different choice changes everything
after it. Rounding may flip a choice between the engine and eager; in that comparison eager's tokens are fed, so that
all choices are compared. Contains sessions and choices; `region_errors` compares the regions' tensors.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.duplex.bench_sessions import LISTEN, SPEAK, BenchSession, SyntheticMedia, run_units
from benchmarks.duplex.engine import RunningEngine, Weights
from benchmarks.duplex.region_errors import compare_calls, short_error
from benchmarks.duplex.region_slots import paired_slots
from worker.assembly.parts import EngineParts
from worker.loop.duplex_job import DuplexJob
from worker.loop.observer import Observer

WATCHED = "watched"
N_SPEAKING, PERIOD, N_TEXT = 3, 5, 8  # speaking units of each period, and their text tokens
TOP_LOGITS = 20  # largest logits of a choice that are recorded
CONTEXT = 300
NEIGHBOURS = 7
COMPARED_SLOTS = 4  # maximum sessions in a comparison of regions
COMPARING_BYTES = 10 * 10**9  # GPU memory of the comparison: copies of slots, differences in float64


@dataclass
class Choice:
    """A token that the sampler chose. ids, logits: the tokens with the largest logits, before penalties."""

    unit: int
    step: int
    token: int
    ids: list[int] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)


@dataclass
class Transcript:
    """Output of one session.

    speech_tokens: of each speech call. sounds: hex digest of each unit's PCM.
    """

    choices: list[Choice] = field(default_factory=list)
    speech_tokens: list[list[int]] = field(default_factory=list)
    sounds: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "choices": [asdict(choice) for choice in self.choices],
            "codes": self.speech_tokens,
            "sounds": self.sounds,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Transcript":
        return cls([Choice(**choice) for choice in data["choices"]], data["codes"], data["sounds"])


class ChoiceRecorder(Observer):
    """Records the sampler's choices of the watched session, while a script decides which units speak.

    Attributes:
        transcript: output of the watched session.
        forced_tokens: tokens to feed instead of the choices, by unit and step.
        own_logits: logits of the chosen and the forced token where they differ, by unit and step.
    """

    def __init__(self) -> None:
        self.transcript = Transcript()
        self.forced_tokens: dict[tuple[int, int], int] = {}
        self.own_logits: dict[tuple[int, int], dict[int, float]] = {}
        self._logits: dict[int, Tensor | None] = {}

    def record_logits(self, running: RunningEngine) -> None:
        """Record the logits, which the loop does not pass to observers."""
        unit_steps = running.parts.unit_steps

        def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(slots: Sequence[int], *arguments: Any, **named: Any) -> Any:
                chosen = method(slots, *arguments, **named)
                self._logits = {slot: one.logits for slot, one in zip(slots, chosen, strict=True)}
                return chosen

            return call

        unit_steps.feed, unit_steps.step = recorded(unit_steps.feed), recorded(unit_steps.step)

    def token_sampled(self, session: str, job: DuplexJob, token: int) -> int:
        if session.startswith("warm-up"):
            return token
        if session.startswith((LISTEN, SPEAK)):
            return _scripted(job, token, listens=session.startswith(LISTEN))
        unit, step = job.session.n_decided, len(job.decoder.all_ids)
        chosen = token
        if session == WATCHED:
            chosen = self.forced_tokens.get((unit, step), token)
            self._record(job.slot, unit, step, token, chosen)
        return _scripted(job, chosen, listens=unit % PERIOD >= N_SPEAKING, ends=unit % PERIOD == N_SPEAKING - 1)

    def _record(self, slot: int, unit: int, step: int, token: int, expected: int) -> None:
        choice = Choice(unit, step, token)
        if (logits := self._logits.get(slot)) is not None:
            best = logits.float().topk(min(TOP_LOGITS, logits.shape[-1]))
            choice.ids, choice.logits = best.indices.tolist(), best.values.tolist()
            if token != expected:
                self.own_logits[unit, step] = {one: float(logits[one]) for one in (token, expected)}
        self.transcript.choices.append(choice)

    def speech_call_ended(
        self, session: str, start: int, rows: Tensor, min_tokens: int, speech_tokens: list[int]
    ) -> None:
        if session == WATCHED:
            self.transcript.speech_tokens.append(list(speech_tokens))


def _scripted(job: DuplexJob, token: int, *, listens: bool, ends: bool = False) -> int:
    """The control token that the script requires, or a letter derived from `token`, which every vocabulary contains."""
    ids, n = job.language.control_tokens, len(job.decoder.all_ids)
    if listens:
        return ids.listen
    if n == 0:
        return ids.speak
    if n <= N_TEXT:
        return ord("a") + token % 26
    return ids.turn_eos if ends and n == N_TEXT + 1 else ids.chunk_eos


def run_conversation(
    running: RunningEngine,
    choices: ChoiceRecorder,
    n_units: int,
    *,
    neighbours: int = 0,
    forced: Sequence[Choice] = (),
    n_frames: int = 1,
    speaks: bool = True,
) -> Transcript:
    """Run a conversation and return the watched session's transcript.

    Args:
        n_units: units of each session.
        neighbours: further sessions that run beside it.
        forced: choices of an earlier run, whose tokens are fed.
        n_frames: images in each unit.
        speaks: draw speech tokens and make sound; text does not depend on either.
    """
    report.say(f"{n_units} units{f' beside {neighbours} neighbours' if neighbours else ''}")
    choices.transcript, choices.own_logits = Transcript(), {}
    choices.forced_tokens = {(one.unit, one.step): one.token for one in forced}
    config = running.engine.config.session.model_copy(
        update={"decode_mode": "greedy", "seed": 1, "generate_audio": speaks}
    )
    sessions = [BenchSession(running, WATCHED, context=CONTEXT, config=config, keeps_sound=True)]
    for number in range(1, neighbours + 1):
        other = config.model_copy(update={"seed": 1 + number})
        sessions.append(
            BenchSession(running, f"neighbour {number}", context=CONTEXT + number, config=other, seed=number)
        )
    units = run_units(running, sessions, SyntheticMedia(n_frames), n_units)
    for session in sessions:
        session.close()
    choices.transcript.sounds = [
        hashlib.blake2b(unit.sound, digest_size=8).hexdigest() for unit in units if unit.session == WATCHED
    ]
    return choices.transcript


def compare_runs(one: Transcript, other: Transcript) -> dict[str, Any]:
    """Whether two transcripts are equal, and the index of the first difference by kind."""
    first = {
        "ids": _first_difference([c.token for c in one.choices], [c.token for c in other.choices]),
        "codes": _first_difference(one.speech_tokens, other.speech_tokens),
        "sound": _first_difference(one.sounds, other.sounds),
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


def compare_with_reference(
    reference: Transcript, measured: Transcript, own_logits: dict[tuple[int, int], dict[int, float]]
) -> dict[str, Any]:
    """Find the choices that differ from the reference's; both engines were fed the reference's tokens.

    Returns: counts, and the differing choices. gap: the engine's logit of its own choice minus its logit of the
        reference's choice. reference_gap: the reference's logit of its own choice minus its logit of the engine's
        choice. None if a logit was not recorded.
    """
    expected = {(one.unit, one.step): one for one in reference.choices}
    differing = []
    for choice in measured.choices:
        other = expected.get((choice.unit, choice.step))
        if other is None or other.token == choice.token:
            continue
        here, there = own_logits.get((choice.unit, choice.step), {}), dict(zip(other.ids, other.logits, strict=True))
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
        "n_units": len(measured.sounds),
        "n_choices": len(measured.choices),
        "n_not_compared": len(expected.keys() ^ {(one.unit, one.step) for one in measured.choices}),
        "n_differ": len(differing),
        "first": differing[0] if differing else None,
        "differing": differing[:50],
        "median_gap_of_best_two": sorted(gaps)[len(gaps) // 2] if gaps else None,
    }


def compare_repeats(
    running: RunningEngine,
    choices: ChoiceRecorder,
    n_units: int,
    save: Callable[[dict[str, Any]], None],
    done: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Compare a conversation with its repetition, and with the same conversation beside neighbours.

    done: results of an earlier process, which are not measured again.
    """
    result = dict(done or {})
    if "with_neighbours" in result:
        return result
    alone = run_conversation(running, choices, n_units)
    if "two_runs" not in result:
        result["two_runs"] = compare_runs(alone, run_conversation(running, choices, n_units))
        save(result)
    n = min(NEIGHBOURS, running.parts.n_slots - 1)
    beside = run_conversation(running, choices, n_units, neighbours=n)
    result["with_neighbours"] = {"neighbours": n, **compare_runs(alone, beside)}
    save(result)
    return result


def compare_regions(
    running: RunningEngine,
    weights: Weights,
    n_units: int,
    save: Callable[[dict[str, Any]], None] = lambda found: None,
    limit_s: float = float("inf"),
) -> dict[str, Any]:
    """Compare every region that units call with plain eager float32, for one session and for several at once.

    Args:
        weights: those of the engine before they are quantised, in the served dtype.
        n_units: units whose calls are compared.
        save: called with the result after each unit.
        limit_s: seconds after which calls are not compared.
    Returns: {regions, regions_left_out, narrow}. regions: errors by number of sessions, table and region.
        regions_left_out: description of what was not compared, or empty. narrow: {dtype, error} of the twin in the
        served dtype; error: why it was not built. narrow is None if the engine serves float32.
    """
    started_at, found, left_out = time.monotonic(), {}, []
    report.say("building the float32 twin")
    wide = replace(running.spec, way="eager", dtype="float32", plain=True, weights="bf16")
    twin = weights.float32_copy().parts(wide, wide.engine_config())
    assert not (twin.model.kernels or twin.vocoder.regions.kernels), "expected a reference without kernels"
    narrow, narrow_facts = _make_narrow_twin(running, weights, twin)
    counts = sorted({1, min(COMPARED_SLOTS, running.parts.n_slots)})
    for n_sessions in counts:
        with compare_calls(running.parts, twin, limit_s - (time.monotonic() - started_at), narrow) as tables:
            for n_done in _run_compared_units(running, n_sessions, n_units):
                found[str(n_sessions)] = {
                    table: {name: asdict(one) for name, one in named.items()}
                    for table, named in tables.errors().items()
                }
                is_complete = n_done == n_units and not tables.n_left_out
                progress = f"{n_sessions} at once: {n_done} of {n_units} units, {tables.n_left_out} calls not compared"
                rest = [f"{n} at once" for n in counts if n > n_sessions]
                unfinished = [*left_out, *([] if is_complete else [progress]), *rest]
                save({"regions": found, "regions_left_out": ", ".join(unfinished), "narrow": narrow_facts})
        left_out += [] if is_complete else [progress]
    report.say("regions compared")
    return {"regions": found, "regions_left_out": ", ".join(left_out), "narrow": narrow_facts}


def _make_narrow_twin(
    running: RunningEngine, weights: Weights, twin: EngineParts
) -> tuple[EngineParts | None, dict[str, str] | None]:
    """The plain eager engine in the served dtype. Returns: the engine or None, and `narrow` of `compare_regions`."""
    dtype = weights.model.dtype
    if dtype == torch.float32:
        return None, None
    facts = {"dtype": str(dtype).removeprefix("torch."), "error": ""}
    report.say(f"building the {facts['dtype']} twin")
    try:
        _check_free_memory(twin)
        spec = replace(running.spec, way="eager", plain=True, weights="bf16")
        narrow = weights.copy_as(dtype).parts(spec, spec.engine_config())
        assert not (narrow.model.kernels or narrow.vocoder.regions.kernels), "expected a twin without kernels"
        paired_slots(running.parts, narrow)
    except Exception as error:  # the other figures do not depend on this twin
        facts["error"] = short_error(error)
        return None, facts
    return narrow, facts


def _check_free_memory(twin: EngineParts) -> None:
    """Raises: MemoryError if a second twin, half as large, would leave too little memory for the comparison."""
    device = twin.model.device
    if device.type != "cuda":
        return
    modules = (twin.model, twin.vocoder.parts.flow, twin.vocoder.parts.hift)
    n_bytes = sum(tensor.nbytes for module in modules for tensor in module.state_dict().values())
    expected = (n_bytes + twin.unit_steps.state.nbytes() + twin.vocoder.n_bytes) // 2 + COMPARING_BYTES
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    if free < expected:
        raise MemoryError(f"expected {expected / 1e9:.1f} GB of free memory, got {free / 1e9:.1f}")


def _run_compared_units(running: RunningEngine, n_sessions: int, n_units: int) -> Iterator[int]:
    """Run units of `n_sessions` sessions, every second of which listens. Yields: units done; 0 after the prompts."""
    media, sessions = SyntheticMedia(1), []
    report.say(f"{n_sessions} at once: prompts")
    for number in range(n_sessions):
        mode = LISTEN if number % 2 else SPEAK
        sessions.append(BenchSession(running, f"{mode} {number}", context=CONTEXT, seed=number))
    yield 0
    for unit in range(n_units):
        report.say(f"{n_sessions} at once: unit {unit + 1} of {n_units}")
        run_units(running, sessions, media, 1, first=unit)
        if unit == n_units - 1:
            for session in sessions:
                session.close()
        yield unit + 1


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Index of the first difference, missing entries included; None if the sequences are equal."""
    if len(one) == len(other) and all(a == b for a, b in zip(one, other, strict=True)):
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
