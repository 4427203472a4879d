from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from server.doors.realtime.session_config import TurnDetection
from server.doors.realtime.turns.turn_policy import TurnPolicy, UnitDecision

FREE, LISTEN, SPEAK = UnitDecision(), UnitDecision(force_listen=True), UnitDecision(force_speak=True)
SEMANTIC = TurnDetection()
SERVER = TurnDetection(type="server_vad")
MANUAL = TurnDetection(create_response=False)


def test_semantic_vad_leaves_every_unit_to_the_model() -> None:
    policy = TurnPolicy(SEMANTIC)
    policy.begin_user_turn()
    policy.end_user_turn()
    assert policy.next_unit(is_responding=False) == FREE


def test_server_vad_forces_speech_after_the_users_turn() -> None:
    policy = TurnPolicy(SERVER)
    policy.end_user_turn()
    assert policy.next_unit(is_responding=False) == SPEAK
    assert policy.next_unit(is_responding=False) == FREE


def test_server_vad_does_not_force_a_model_that_speaks_already() -> None:
    policy = TurnPolicy(SERVER)
    policy.record_result(is_listen=False, end_of_turn=False)
    policy.end_user_turn()
    assert policy.next_unit(is_responding=True) == FREE
    policy.record_result(is_listen=False, end_of_turn=True)
    assert policy.next_unit(is_responding=False) == FREE, "expected the answer to have been given"


def test_a_user_who_goes_on_is_not_interrupted() -> None:
    policy = TurnPolicy(SERVER)
    policy.end_user_turn()
    policy.begin_user_turn()
    assert policy.next_unit(is_responding=False) == FREE


def test_without_create_response_only_a_request_makes_the_model_speak() -> None:
    policy = TurnPolicy(MANUAL)
    policy.end_user_turn()
    assert policy.next_unit(is_responding=False) == LISTEN
    policy.ask()
    assert policy.is_answer_due and policy.next_unit(is_responding=True) == SPEAK
    policy.record_result(is_listen=False, end_of_turn=False)
    assert policy.next_unit(is_responding=True) == FREE, "expected the turn to go on"
    policy.record_result(is_listen=False, end_of_turn=True)
    assert policy.next_unit(is_responding=False) == LISTEN


def test_a_cancelled_turn_is_ended_before_the_next_one_begins() -> None:
    policy = TurnPolicy(SEMANTIC)
    policy.record_result(is_listen=False, end_of_turn=False)
    policy.cut(is_running=True)
    policy.ask()
    assert policy.next_unit(is_responding=True) == LISTEN
    policy.record_result(is_listen=True, end_of_turn=True)
    assert policy.next_unit(is_responding=True) == SPEAK


def test_a_request_that_is_cancelled_before_its_unit_costs_none() -> None:
    policy = TurnPolicy(SEMANTIC)
    policy.ask()
    policy.cut(is_running=False)
    assert policy.next_unit(is_responding=False) == FREE


class PolicyRules(RuleBasedStateMachine):
    """Any order of requests, cancellations, turns and results."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = TurnPolicy(SERVER)
        self.in_flight = False

    @rule()
    def ask(self) -> None:
        self.policy.ask()

    @rule()
    def end_user_turn(self) -> None:
        self.policy.end_user_turn()

    @rule()
    def cancel(self) -> None:
        self.policy.cut(is_running=self.in_flight or self.policy.is_turn_open)
        assert not self.policy.is_answer_due

    @precondition(lambda self: not self.in_flight)
    @rule()
    def unit(self) -> None:
        was_due = self.policy.is_answer_due
        decision = self.policy.next_unit(is_responding=False)
        assert not (decision.force_listen and decision.force_speak)
        assert not was_due or decision.force_speak or self.policy.is_answer_due, (
            "expected the request to stay or be met"
        )
        self.in_flight = True

    @precondition(lambda self: self.in_flight)
    @rule()
    def listened(self) -> None:
        self.in_flight = False
        self.policy.record_result(is_listen=True, end_of_turn=False)

    @precondition(lambda self: self.in_flight)
    @rule()
    def spoke(self) -> None:
        self.in_flight = False
        self.policy.record_result(is_listen=False, end_of_turn=False)

    @invariant()
    def a_request_is_met_within_two_units(self) -> None:
        if self.policy.is_answer_due and not self.in_flight:
            again = TurnPolicy(SERVER)
            again.__dict__.update(self.policy.__dict__)
            first = again.next_unit(is_responding=False)
            again.record_result(is_listen=first.force_listen, end_of_turn=True)
            assert first.force_speak or again.next_unit(is_responding=False).force_speak


TestPolicyRules = PolicyRules.TestCase
TestPolicyRules.settings = settings(max_examples=30, stateful_step_count=20)


def test_all_sound_before_a_request_is_heard_before_the_answer() -> None:
    policy = TurnPolicy(TurnDetection())
    policy.ask(n_waiting=3)
    decisions = [policy.next_unit(is_responding=False, n_waiting=left) for left in (2, 1, 0)]
    assert [decision.force_listen for decision in decisions] == [True, True, False] and decisions[-1].force_speak
    policy.ask(n_waiting=3)
    assert policy.next_unit(is_responding=False, n_waiting=0).force_speak, "expected that cleared sound is not awaited"
