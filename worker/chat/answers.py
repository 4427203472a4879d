"""Turn-based replies over the same slots and the same loop as units: chats, and rounds of half-duplex conversations.

Everything runs on the engine thread. Only `converse` runs the model, to feed a system message; replies run in the loop.
Contains what a reply needs before its job starts. Does not contain messages, sound or threads.
"""

from collections.abc import Callable

from models.errors import ContextOverflowError
from models.stages.message_reader import Content
from models.stages.unit_steps import UnitSteps
from models.token2wav.voice.voice import Voice
from worker.chat.config import USUAL, HalfDuplexConfig, ReplyConfig
from worker.chat.reply_job import ReplyJob, RoundJob
from worker.config.session import SessionConfig
from worker.loop.language import Language
from worker.loop.results import Event
from worker.loop.rounds import Rounds
from worker.loop.session import OrderError, Session, SessionPhase
from worker.loop.sessions import Sessions
from worker.loop.unit_loop import UnitLoop
from worker.loop.voice_manager import VoiceManager


class Answers:
    """Starts replies. voice: None everywhere for a reply without sound."""

    def __init__(
        self,
        sessions: Sessions,
        unit_steps: UnitSteps,
        language: Language,
        voices: VoiceManager,
        loop: UnitLoop,
        usual: SessionConfig = USUAL,
    ):
        """usual: the worker's settings of duplex sessions, for replies without settings of their speech."""
        self._usual = usual
        self._sessions, self._unit_steps, self._loop = sessions, unit_steps, loop
        self._language, self._voices = language, voices

    def chat(
        self,
        name: str,
        content: Content,
        config: ReplyConfig,
        emit: Callable[[Event], None],
        *,
        voice: Voice | None = None,
        arrived: float,
    ) -> Session:
        """Answer a whole conversation in a session that closes after its result.

        Raises: as `Sessions.open` and `VoiceManager.lend`; ContextOverflowError if conversation and reply do not fit.
        """
        n_new, limit = (
            config.max_rows if content.answer is None else len(content.answer),
            self._unit_steps.max_context_len,
        )
        if len(content) + n_new > limit:
            expected = f"at most {limit} rows, prompt and answer"
            raise ContextOverflowError("conversation", expected=expected, got=f"{len(content)} + {n_new}")
        # The hypotheses of a search share the slot's rows.
        n_rows = len(content) + n_new if config.num_beams == 1 else limit
        session = self._open(name, config, emit, voice, n_rows)
        session.close_when_idle()
        self._loop.add(ReplyJob(session, arrived, content, config, self._language, self._voices))
        return session

    def converse(
        self,
        name: str,
        system: Content,
        config: HalfDuplexConfig,
        emit: Callable[[Event], None],
        *,
        voice: Voice | None = None,
    ) -> Session:
        """Open a half-duplex conversation that starts with a system message.

        Raises: as `chat`; NumericsError.
        """
        unit_steps = self._unit_steps
        session = self._open(name, config.reply, emit, voice)
        try:
            high, low = config.marks(unit_steps.max_context_len)
            rounds = Rounds(high=high, low=low)
            session.keep_rounds(rounds)
            n_rows = self._sessions.feed_prompt(session, unit_steps.encode_content(system))
            rounds.add_system(n_rows)
            if not session.reference:
                unit_steps.context.hold(session.slot, unit_steps.save_keys(session.slot, n_rows), n_rows)
        except BaseException:
            self._sessions.close(session)
            raise
        return session

    def answer(self, session: Session, content: Content, config: ReplyConfig, arrived: float) -> None:
        """Answer a user turn of a half-duplex conversation.

        Raises: OrderError while a reply runs, and for a session that is no such conversation.
        """
        rounds = session.rounds
        if rounds is None or session.phase is not SessionPhase.READY:
            got = session.phase if rounds is not None else "one of another kind"
            raise OrderError(f"session {session.id}: answer", expected="a conversation between rounds", got=got)
        self._unit_steps.begin_answer(session.slot)
        self._loop.add(RoundJob(session, arrived, content, config, self._language, self._voices, rounds))

    def take_back(self, session: Session) -> bool:
        """Remove the round in flight together with its user turn. Returns: whether there was one.

        Raises: OrderError for a session that is no half-duplex conversation.
        """
        if session.rounds is None:
            expected = "a half-duplex conversation"
            raise OrderError(f"session {session.id}: take back", expected=expected, got="one of another kind")
        if not self._loop.take_back(session):
            return False
        self._voices.cut(session)
        return True

    def _open(
        self,
        name: str,
        config: ReplyConfig,
        emit: Callable[[Event], None],
        voice: Voice | None,
        n_rows: int | None = None,
    ) -> Session:
        session = self._sessions.open(name, config.session_config(), emit, n_rows)
        try:
            self._voices.lend(session, voice if config.speak else None)
            # Without a voice the sampler allows tokens that cannot be voiced.
            config = config.model_copy(update={"speak": self._voices.can_speak(session)})
            seed = self._sessions.seed(session.config)
            speech = config.speech_sampling(self._usual, in_units=self._voices.speaks_in_units(session))
            self._unit_steps.configure(session.slot, config.text_sampling(), speech, seed)
            session.move("prepare")
        except BaseException:
            self._sessions.close(session)
            raise
        return session
