"""Forced speech, inserted text, limits of turns, early ends of units and counters over a real socket."""

from itertools import pairwise
from typing import Any

import pytest

from tests.worker.http.client_scripts import ALOUD, QUIET, chunk, sound_of
from tests.worker.http.processes import WorkerProcess
from tests.worker.http.scripted_client import ScriptedClient
from worker.protocol.adjust_messages import Adjusted
from worker.protocol.messages import Paused, Result, Resumed
from worker.protocol.text_messages import TextInserted

pytestmark = pytest.mark.usefixtures("all_slots_free")
COUNTERS = {"counters": True}


def insert(client: ScriptedClient, text: str = "The caller is Ada.", **fields: Any) -> TextInserted:
    client.send({"type": "insert_text", "text": text, **fields})
    answer: TextInserted = client.expect(TextInserted)
    return answer


def test_greets_before_the_start_guard_ends(worker: WorkerProcess) -> None:
    """A text, then a unit that must speak and ends at once: what a client sends that asks for a greeting."""
    with ScriptedClient(worker) as client:
        prepared = client.prepare({**QUIET, "force_listen_count": 1000}, spec=COUNTERS)
        assert prepared.spec.counters
        n_rows = insert(client, "Greet the caller.", role="system").n_rows
        client.send(chunk(sound=sound_of(0)[:100], force_speak=True, close_early=True))
        greeting, after = client.expect(Result), client.unit(1)
        assert not greeting.is_listen and greeting.text and after.is_listen, (greeting, after)
        assert greeting.usage.text_rows == n_rows + 1, f"expected {n_rows} rows and <unit>, got {greeting.usage}"
        rows = greeting.usage.text_rows + greeting.usage.audio_rows + greeting.n_tokens + 1
        assert greeting.kv_cache_length == prompt_rows(worker) + rows, (greeting, rows)


def prompt_rows(worker: WorkerProcess) -> int:
    """Context rows of the default prompt."""
    with ScriptedClient(worker) as client:
        client.prepare({**QUIET, "force_listen_count": 1000}, spec=COUNTERS)
        first = client.unit(0)
        assert first.usage.text_rows == 1, first.usage
        return first.kv_cache_length - 11


def test_texts_keep_their_place_among_units_and_pauses(worker: WorkerProcess) -> None:
    with ScriptedClient(worker) as client:
        client.send({"type": "insert_text", "text": "Too early."})
        assert client.expect_error("not_prepared").error == "Not prepared yet"
        client.prepare(QUIET)
        for message in (
            chunk(0),
            {"type": "insert_text", "text": "While it speaks."},
            {"type": "pause"},
            {"type": "insert_text", "text": "While it pauses.", "role": "system"},
            {"type": "resume"},
            {"type": "insert_text", "text": "word " * 2000},
            chunk(1),
        ):
            client.send(message)
        first = client.expect(Result)
        n_rows = [client.expect(TextInserted).n_rows]
        client.expect(Paused)
        n_rows.append(client.expect(TextInserted).n_rows)
        client.expect(Resumed)
        client.expect_error("context_full")
        second = client.expect(Result)
        assert not first.is_listen and not second.is_listen, "expected the turn to go on"
        closing, unit = 2, 1 + 10 + second.n_tokens + 1  # at most: the last token may be cut
        grown = second.kv_cache_length - first.kv_cache_length - closing - sum(n_rows)
        assert 11 < grown <= unit, f"expected a unit beside {n_rows} rows, got {grown}"


def test_turns_end_at_the_limit_of_the_session(worker: WorkerProcess) -> None:
    """As prepared, and as adjusted within a turn; marks grow up to the end of each turn."""
    with ScriptedClient(worker) as client:
        client.prepare({**ALOUD, "max_turn_tokens": 5, "drain_s": 1}, spec=COUNTERS)
        turn = results_of_turn(client)
        assert turn[-1].turn_limit is True and len(turn) > 1, turn
        assert [one.turn_limit for one in turn[:-1]] == [None] * (len(turn) - 1)
        assert sum(one.n_tokens for one in turn) == 6, "expected five tokens and the end of the turn"
        marks = [mark for one in turn for mark in one.marks]
        assert len(marks) == len(turn) and marks[-1].text_chars == sum(len(one.text) for one in turn)
        assert all(one.audio_ms <= other.audio_ms for one, other in pairwise(marks)), marks
        seconds = sum(len(one.audio_data.samples("sound")) for one in turn if one.audio_data) / 24_000
        assert marks[-1].audio_ms == pytest.approx(1000 * seconds)
        client.send({"type": "adjust", "config": {"max_turn_tokens": 1}})
        client.expect(Adjusted)
        turn = results_of_turn(client)
        assert sum(one.n_tokens for one in turn) == 2 and turn[-1].turn_limit, turn
        assert turn[0].marks[0].text_chars == len(turn[0].text), "expected marks of the new turn"


def results_of_turn(client: ScriptedClient) -> list[Result]:
    """The results up to the end of a turn."""
    results: list[Result] = []
    while not results or not results[-1].end_of_turn:
        results.append(client.unit(len(results), force_speak=not results))
        assert len(results) < 12, "expected a turn that ends"
    return results


def test_outputs_of_functions_and_a_checkpoint_without_side_lane(worker: WorkerProcess) -> None:
    """The setting of a side lane is noted as ignored; the output of a function is a message of the user."""
    with ScriptedClient(worker) as client:
        [note] = client.prepare({**QUIET, "max_side_tokens_per_chunk": 32}).notes
        assert "max_side_tokens_per_chunk has no effect" in note
        n_user, n_tool = (insert(client, "Rain.", role=role).n_rows for role in ("user", "tool"))
        assert n_tool > n_user, f"expected rows of the markers beside {n_user}, got {n_tool}"
        result = client.unit(0)
        assert result.side_texts is None and result.usage is None
        client.send({"type": "adjust", "config": {"max_side_tokens_per_chunk": 16}})
        [note] = client.expect(Adjusted).notes
        assert "no side lane" in note
