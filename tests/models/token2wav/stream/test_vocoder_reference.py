"""The public implementation's rules on the host side: last windows, cross-fade and sample counts."""

import torch

from models.token2wav.settings import SAMPLES_PER_TOKEN
from models.token2wav.stream.vocode import REFERENCE_RULES
from models.token2wav.stream.vocoder import Chunk
from models.token2wav.stream.windows import TokenWindows
from tests.models.compare import assert_close
from tests.models.token2wav.stream.vocoders import copies, make_tokens, make_vocoder, make_voice, slot_of, speak_turn

HELD_BACK = 3840


def test_samples_of_each_kind_of_chunk():
    """As with the default rules, if a turn ends once."""
    vocoder = make_vocoder(compat="reference")
    session = vocoder.open(make_voice())
    lengths = [len(wave) for wave in speak_turn(vocoder, session, make_tokens(1, 90), [25, 25, 5, 20])]
    assert lengths == [20160, 24000, 4800, 19200, 960 * 15 + HELD_BACK]


def test_turn_that_ends_twice_repeats_its_look_ahead():
    """75 tokens at once: two full windows marked as last, then their lookahead again. Each window but the first is
    joined to the previous tail, which was already sent, and sends it again."""
    vocoder = make_vocoder(compat="reference")
    session, speech_tokens = vocoder.open(make_voice()), make_tokens(1, 78)
    windows = TokenWindows(silence=False, compat="reference")
    given = [*windows.push(speech_tokens[:28]), *windows.push(speech_tokens[28:], last=True)]
    assert [(len(w.speech_tokens), w.last) for w in given] == [(28, False), (28, True), (28, True), (3, True)]
    lengths = []
    for window in given:
        (wave,) = vocoder.speak([Chunk(session, *window)])
        lengths.append(len(wave))
        assert vocoder.vocode_state.n_tail[slot_of(vocoder, session)] == 8, "expected the tail to stay"
    counts = [25, 28, 28, 3]
    assert lengths == [SAMPLES_PER_TOKEN * 25 - HELD_BACK, *(SAMPLES_PER_TOKEN * n + HELD_BACK for n in counts[1:])]


def test_tail_kept_after_the_end_fades_into_the_next_chunk():
    """The tail is sent a second time, weighted by the cross-fade, whose first weights are 1.00 and 0.08."""
    vocoder = make_vocoder(compat="reference")
    session = vocoder.open(make_voice())
    (first,) = speak_turn(vocoder, session, make_tokens(1, 20), [])
    (second,) = vocoder.speak([Chunk(session, make_tokens(2, 3), last=True)])
    assert len(second) == SAMPLES_PER_TOKEN * 3 + HELD_BACK
    assert_close(second[:1], first[-HELD_BACK:][:1], 0.08 * 0.99 + 1e-3, "the first sample of the seam")
    correlation = torch.corrcoef(torch.stack((first[-HELD_BACK:][:480], second[:480])))[0, 1]
    assert correlation > 0.9, f"expected the tail again, got a correlation of {correlation}"
    vocoder.begin_turn(session)
    assert len(vocoder.speak([Chunk(session, make_tokens(2, 3), last=True)])[0]) == SAMPLES_PER_TOKEN * 3


def test_default_rules_clear_the_sound_at_the_end_of_a_turn():
    vocoder = make_vocoder()
    session = vocoder.open(make_voice())
    speak_turn(vocoder, session, make_tokens(1, 20), [])
    assert vocoder.rules != REFERENCE_RULES
    assert not any(tensor[slot_of(vocoder, session)].any() for tensor in vocoder.vocode_state.tensors())
    assert len(vocoder.speak([Chunk(session, make_tokens(2, 3), last=True)])[0]) == SAMPLES_PER_TOKEN * 3


def test_reference_rules_change_every_chunk():
    """The first chunk has no seam, but the phases of its harmonics are constant at its ends."""
    plain, reference = make_vocoder(), make_vocoder(compat="reference")
    speech_tokens = make_tokens(1, 110)
    waves = [speak_turn(v, v.open(make_voice()), speech_tokens, [25, 25, 25, 25]) for v in (plain, reference)]
    for i, (mine, other) in enumerate(zip(*waves, strict=True)):
        assert len(mine) == len(other)
        assert (mine - other).abs().max() > 1e-3, f"chunk {i}"
    states = [copies(v) for v in (plain, reference)]
    assert any(a.shape != b.shape for a, b in zip(*states, strict=True)), "expected rings as long as the prompt"
