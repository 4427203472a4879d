"""Slots of the language models: codes do not depend on neighbours, batch, or when a request joins; fixed buckets."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import ContextOverflowError, NumericsError, SettingsError, SlotError
from models.qwen3_tts import frame_steps
from models.qwen3_tts.draws import draw_codes, final_scores
from models.qwen3_tts.generate import CodesRequest, generate_codes
from models.qwen3_tts.load import load_qwen3_tts
from models.qwen3_tts.model import Qwen3TTS
from models.qwen3_tts.prompt import PromptText, SpeechPrompt, SpeechVoice, lay_out
from models.qwen3_tts.region_table import TalkerShapes
from models.qwen3_tts.runaway import CodesEnd
from models.qwen3_tts.runner import TalkerRunner
from models.qwen3_tts.settings import CodeSampling, FrameSampling
from models.qwen3_tts.state import FIRST, TEXT_RING
from tests.parity.golden import GoldenDir

ROLE = (300, 302, 304)
SHAPES = TalkerShapes(batch=(1, 2, 3), rows=(16, 32), kv=(32, 64), text=(4,))
SPEAKERS = ("dylan", "ryan", "vivian")
N_SLOTS, MAX_LEN = 3, 64


@pytest.fixture(scope="module")
def runner(custom_model: Qwen3TTS) -> TalkerRunner:
    return TalkerRunner(custom_model, n_slots=N_SLOTS, max_len=MAX_LEN, shapes=SHAPES)


def prompt(runner: TalkerRunner, seed: int, *, streams_text: bool = False, is_open: bool = False) -> SpeechPrompt:
    """A text of 1 to 9 tokens by one of the speakers."""
    numbers = np.random.default_rng(seed)
    text = tuple(int(n) for n in 32 + numbers.integers(0, 90, 1 + seed % 9))
    voice = SpeechVoice(name=SPEAKERS[seed % 3])
    texts = PromptText(role=ROLE, text=text)
    return lay_out(runner.model.config, texts, voice, streams_text=streams_text, is_open=is_open)


def request(runner: TalkerRunner, seed: int) -> CodesRequest:
    """A request whose settings and length vary with its seed."""
    sampling = FrameSampling(
        first=CodeSampling(temperature=0.7 + 0.1 * (seed % 5), top_k=(0, 5, 50)[seed % 3], top_p=(1.0, 0.8)[seed % 2]),
        rest=CodeSampling(greedy=seed % 4 == 0, top_k=20),
    )
    return CodesRequest(prompt(runner, seed, streams_text=seed % 2 == 0), 2 + seed % 3, seed, sampling)


def answer(runner: TalkerRunner, seed: int) -> list[list[int]]:
    """The codes of a request alone in a runner of one slot."""
    (got,) = generate_codes(runner, [request(runner, seed)])
    return got.codes.tolist()


@settings(max_examples=5)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=2, max_size=4), st.data())
def test_codes_do_not_depend_on_neighbours(
    runner: TalkerRunner, alone: "Alone", arrivals: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Requests join and leave at any frame, in any slot, in batches of any order."""
    waiting, running, found = list(arrivals), {}, []
    try:
        for tick in range(60):
            for slot in runner.free_slots:
                if waiting and waiting[0][0] <= tick:
                    seed = waiting.pop(0)[1]
                    one = request(runner, seed)
                    runner.open(slot, one.sampling, seed=seed, max_frames=one.max_frames)
                    runner.feed({slot: one.prompt})
                    running[slot] = (seed, [])
            if not running and not waiting:
                break
            slots = data.draw(st.permutations(sorted(running)))
            if not slots:
                continue
            codes, outcomes = runner.frame(slots)
            for row, slot in enumerate(slots):
                if int(outcomes[row]) in (frame_steps.FRAME, frame_steps.LAST_FRAME):
                    running[slot][1].append(codes[row].tolist())
                if int(outcomes[row]) != frame_steps.FRAME:
                    found.append(running.pop(slot))
                    runner.close(slot)
        assert len(found) == len(arrivals), f"expected {len(arrivals)} answers, got {len(found)}"
        for seed, codes in found:
            assert codes == alone(seed), f"request {seed}: expected {alone(seed)}, got {codes}"
    finally:
        for slot in running:
            runner.close(slot)


class Alone:
    """Codes of requests that run alone, in a runner with one slot."""

    def __init__(self, model: Qwen3TTS):
        runner = TalkerRunner(model, n_slots=1, max_len=MAX_LEN, shapes=SHAPES)
        self._answer = cache(lambda seed: answer(runner, seed))

    def __call__(self, seed: int) -> list[list[int]]:
        return self._answer(seed)


@pytest.fixture(scope="module")
def alone(custom_model: Qwen3TTS) -> Alone:
    return Alone(custom_model)


def test_many_requests_share_few_slots(runner: TalkerRunner, alone: Alone) -> None:
    seeds = [3, 8, 13, 21]
    got = generate_codes(runner, [request(runner, seed) for seed in seeds])
    assert [one.codes.tolist() for one in got] == [alone(seed) for seed in seeds]
    assert {one.end for one in got} == {CodesEnd.LENGTH} and runner.free_slots == [0, 1, 2]
    assert alone(8) != alone(3)


def test_live_text_waits_and_equals_known_text(runner: TalkerRunner) -> None:
    """Text that arrives in pieces, with waits between, gives the codes of the same text known before."""
    whole = prompt(runner, 8, streams_text=True)
    sampling = FrameSampling()
    (expected,) = generate_codes(runner, [CodesRequest(whole, 7, 6)])
    assert len(expected.codes) == 7
    live = SpeechPrompt(whole.text, whole.codes, whole.speaker_row, None, whole.trailing[:1], is_open=True)
    pieces = [whole.trailing[1:1], whole.trailing[1:3], whole.trailing[3:]]
    slot, codes, waits = 1, [], 0
    runner.open(slot, sampling, seed=6, max_frames=7)
    runner.feed({slot: live})
    while len(codes) < len(expected.codes):
        drawn, outcomes = runner.frame([slot])
        if int(outcomes[0]) == frame_steps.WAITED:
            runner.take_back(slot)
            waits += 1
            piece = pieces.pop(0)
            runner.append_text(slot, piece, is_open=bool(pieces), n_read=len(codes) - 1)
        else:
            codes.append(drawn[0].tolist())
    runner.close(slot)
    assert codes == expected.codes.tolist()
    assert waits == 3 and not pieces


def test_long_prompts_are_fed_in_parts(runner: TalkerRunner, custom_model: Qwen3TTS) -> None:
    texts = PromptText(role=ROLE, text=tuple(range(40, 72)))
    long = lay_out(custom_model.config, texts, SpeechVoice(name="dylan"), language="german")
    whole = TalkerRunner(custom_model, n_slots=1, max_len=MAX_LEN, shapes=TalkerShapes(rows=(64,), kv=(64,)))
    assert len(long) > SHAPES.rows[-1]
    expected, got = (generate_codes(one, [CodesRequest(long, 3, 1)])[0].codes for one in (whole, runner))
    assert got.tolist() == expected.tolist()


def test_frames_allocate_no_new_shapes(runner: TalkerRunner) -> None:
    """Every call of a region has the shapes of one of its buckets."""
    seen: set[tuple[str, tuple[int, ...]]] = set()
    uncaptured = runner.table.uncaptured

    def noted(name, *given, **static):
        seen.add((name, tuple(given[0].shape)))
        sizes = {"rows": given[1].shape[1]} if name == "feed_prompt" else {}
        sizes |= {"text": given[1].shape[1]} if name == "append_text" else {}
        sizes |= {"kv": static["kv_len"]} if "kv_len" in static else {}
        bucket = {"batch": given[0].shape[0], **sizes}
        assert bucket in list(runner.table.table[name].buckets(runner.shapes)), f"{name}: unexpected sizes {bucket}"
        return uncaptured(name, *given, **static)

    runner.table.uncaptured = noted
    try:
        generate_codes(runner, [request(runner, seed) for seed in (5, 6, 7)])
    finally:
        del runner.table.uncaptured
    assert {name for name, _ in seen} == set(runner.table.table)


def test_scratch_slot_and_warm_up_leave_sessions_alone(runner: TalkerRunner, alone: Alone) -> None:
    one = request(runner, 20)
    runner.open(0, one.sampling, seed=20, max_frames=one.max_frames)
    runner.feed({0: one.prompt})
    first, _ = runner.frame([0])
    first = first[0].tolist()
    runner.table.warm_up(["reset", "append_text", "start", "first_frame"])
    rest = [runner.frame([0])[0][0].tolist() for _ in range(len(alone(20)) - 1)]
    runner.close(0)
    assert [first, *rest] == alone(20)


def test_logits_that_are_not_finite_end_their_slot_only(runner: TalkerRunner, alone: Alone) -> None:
    requests = {slot: request(runner, seed) for slot, seed in ((0, 20), (1, 13))}
    for slot, one in requests.items():
        runner.open(slot, one.sampling, seed=one.seed, max_frames=one.max_frames)
    runner.feed({slot: one.prompt for slot, one in requests.items()})
    runner.state.hidden[1] = float("nan")
    codes, outcomes = runner.frame([0, 1])
    assert outcomes[:2].tolist() == [frame_steps.FRAME, frame_steps.BAD] and codes[0].tolist() == alone(20)[0]
    codes, outcomes = runner.frame([0, 1])
    assert outcomes[:2].tolist() == [frame_steps.FRAME, frame_steps.WAITED] and codes[0].tolist() == alone(20)[1]
    for slot in requests:
        runner.close(slot)
    assert generate_codes(runner, [request(runner, 13)])[0].codes.tolist() == alone(13), "a slot is clean when reused"


def test_misuse_is_refused(runner: TalkerRunner) -> None:
    sampling = FrameSampling()
    runner.open(2, sampling, seed=0, max_frames=1)
    with pytest.raises(SlotError, match=r"slot 2: expected one of the free slots \[0, 1\]"):
        runner.open(2, sampling, seed=0, max_frames=1)
    with pytest.raises(ContextOverflowError, match=f"expected at most {TEXT_RING} tokens"):
        runner.append_text(2, [1] * (TEXT_RING + 1), is_open=False)
    one = prompt(runner, 1)
    long = SpeechPrompt(np.tile(one.text, 9), np.tile(one.codes, (9, 1)), -1, None, ())
    with pytest.raises(ContextOverflowError, match="prompt: expected fewer than 64 rows"):
        runner.feed({2: long})
    runner.close(2)
    with pytest.raises(SettingsError, match="seed"):
        runner.open(0, sampling, seed=-1, max_frames=1)
    with pytest.raises(SettingsError, match="expected its whole text"):
        generate_codes(runner, [CodesRequest(prompt(runner, 1, streams_text=True, is_open=True), 1)])
    assert runner.free_slots == [0, 1, 2]


def test_not_finite_logits_fail_a_generation(talker_golden: GoldenDir) -> None:
    model = load_qwen3_tts(talker_golden.model("tiny_b"))
    model.talker.text_rows.fill_(torch.nan)
    runner = TalkerRunner(model, n_slots=1, max_len=MAX_LEN, shapes=SHAPES)
    with pytest.raises(NumericsError, match="logits of the talker"):
        generate_codes(runner, [request(runner, 1)])
    assert runner.free_slots == [0]


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.integers(0, 30), st.sampled_from([1.0, 0.9, 0.4, 0.01]))
def test_draws_stay_inside_what_the_settings_keep(runner: TalkerRunner, seed: int, top_k: int, top_p: float) -> None:
    """A plain formulation of the warpers, probability by probability."""
    state, slots = runner.state, torch.tensor([0, 1])
    sampling = FrameSampling(CodeSampling(top_k=top_k, top_p=top_p, temperature=0.8))
    for slot in (0, 1):
        state.configure(slot, sampling, seed + slot, 1)
    scores = torch.randn(2, 40, generator=torch.Generator().manual_seed(seed))
    scores[:, 7] = scores[:, 3]  # a tie
    got = final_scores(scores, slots, state, FIRST)
    for row in range(2):
        values = (scores[row] / 0.8).double()
        kept = values >= values.sort(descending=True).values[(top_k or 40) - 1]
        odds = values.masked_fill(~kept, -torch.inf).softmax(0)
        order = odds.argsort()
        tail = odds[order].cumsum(0) <= 1 - top_p
        tail[-1] = False
        if top_p < 1:
            kept[order[tail]] = False
        unsure = abs(odds[order].cumsum(0) - (1 - top_p)).min() < 1e-6  # rounding decides
        assert unsure or got[row].isfinite().tolist() == kept.tolist()
        few = 64 if top_k > 0 else None
        drawn = draw_codes(scores, slots, state, slots, FIRST, few)
        assert bool(got[row, drawn[row]].isfinite())
    runner.state.reset(slots)
