"""The public implementation's rules on the host side: its last windows, its fade, its sample counts."""

import torch

from models.token2wav.settings import SAMPLES_PER_TOKEN
from models.token2wav.stream.vocode import REFERENCE_RULES
from models.token2wav.stream.vocoder import Chunk
from models.token2wav.stream.windows import TokenWindows
from tests.models.compare import assert_close
from tests.models.token2wav.stream.vocoders import copies, make_codes, make_vocoder, make_voice, say, slot_of

HELD = 3840


def test_samples_of_each_kind_of_chunk():
    """The same as without it, as long as a turn ends once."""
    vocoder = make_vocoder(compat="reference")
    session = vocoder.open(make_voice())
    lengths = [len(wave) for wave in say(vocoder, session, make_codes(1, 90), [25, 25, 5, 20])]
    assert lengths == [20160, 24000, 4800, 19200, 960 * 15 + HELD]


def test_a_turn_that_ends_twice_says_its_look_ahead_twice():
    """75 codes at once: two whole windows, both last, and their look-ahead once more. Each but the first is joined to
    the tail before it, which has gone out already, and gives it again."""
    vocoder = make_vocoder(compat="reference")
    session, speech_tokens = vocoder.open(make_voice()), make_codes(1, 78)
    windows = TokenWindows(silence=False, compat="reference")
    given = [*windows.push(speech_tokens[:28]), *windows.push(speech_tokens[28:], last=True)]
    assert [(len(w.speech_tokens), w.last) for w in given] == [(28, False), (28, True), (28, True), (3, True)]
    lengths = []
    for window in given:
        (wave,) = vocoder.speak([Chunk(session, *window)])
        lengths.append(len(wave))
        assert vocoder.vocode_state.n_tail[slot_of(vocoder, session)] == 8, "the tail stays, whatever is last"
    voiced = [25, 28, 28, 3]
    assert lengths == [SAMPLES_PER_TOKEN * 25 - HELD, *(SAMPLES_PER_TOKEN * n + HELD for n in voiced[1:])]


def test_a_tail_kept_after_the_end_fades_into_what_follows():
    """Once more the tail that has gone out, with both halves of the window at each end: 1.00 to 0.08."""
    vocoder = make_vocoder(compat="reference")
    session = vocoder.open(make_voice())
    (first,) = say(vocoder, session, make_codes(1, 20), [])
    (second,) = vocoder.speak([Chunk(session, make_codes(2, 3), last=True)])
    assert len(second) == SAMPLES_PER_TOKEN * 3 + HELD
    assert_close(second[:1], first[-HELD:][:1], 0.08 * 0.99 + 1e-3, "the first sample of the seam")
    correlation = torch.corrcoef(torch.stack((first[-HELD:][:480], second[:480])))[0, 1]
    assert correlation > 0.9, f"expected the tail again, got a correlation of {correlation}"
    vocoder.begin_turn(session)
    assert len(vocoder.speak([Chunk(session, make_codes(2, 3), last=True)])[0]) == SAMPLES_PER_TOKEN * 3


def test_without_it_an_ended_turn_keeps_nothing_of_its_sound():
    vocoder = make_vocoder()
    session = vocoder.open(make_voice())
    say(vocoder, session, make_codes(1, 20), [])
    assert vocoder.rules != REFERENCE_RULES
    assert not any(tensor[slot_of(vocoder, session)].any() for tensor in vocoder.vocode_state.tensors())
    assert len(vocoder.speak([Chunk(session, make_codes(2, 3), last=True)])[0]) == SAMPLES_PER_TOKEN * 3


def test_the_rules_are_heard_from_the_first_cut_on():
    """Nothing is cut, faded or restarted in a first chunk; its harmonics stand still at its ends, though."""
    plain, reference = make_vocoder(), make_vocoder(compat="reference")
    speech_tokens = make_codes(1, 110)
    waves = [say(v, v.open(make_voice()), speech_tokens, [25, 25, 25, 25]) for v in (plain, reference)]
    for i, (mine, other) in enumerate(zip(*waves, strict=True)):
        assert len(mine) == len(other)
        assert (mine - other).abs().max() > 1e-3, f"chunk {i}"
    states = [copies(v) for v in (plain, reference)]
    assert any(a.shape != b.shape for a, b in zip(*states, strict=True)), "its rings keep as much as the prompt has"
