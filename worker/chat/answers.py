"""Turn-based answers over the same slots and the same loop as units: chats, and rounds of half-duplex conversations.

Everything here runs on the engine's thread and returns at once but for `converse`, which feeds a system message; the
answers themselves run in the loop. Knows what an answer needs around it. Does not know messages, sound or threads.
"""

from collections.abc import Callable
from typing import Any

from models.errors import ContextOverflowError
from models.stages.unit_steps import UnitSteps
from worker.chat.config import HalfDuplexConfig, ReplyConfig
from worker.chat.reply_job import ReplyJob, RoundJob
from worker.chat.rounds import Rounds
from worker.loop.language import Language
from worker.loop.results import Event
from worker.loop.session import OrderError, Phase, Session
from worker.loop.sessions import Sessions
from worker.loop.unit_loop import UnitLoop
from worker.loop.voice_manager import VoiceManager


class Answers:
    """content: everywhere a `models.stages.message_reader.Content`. voice: a `models.token2wav.voice.voice.Voice` or
    None.
    """

    def __init__(self, sessions: Sessions, duplex: UnitSteps, language: Language, voices: VoiceManager, loop: UnitLoop):
        self._sessions, self._duplex, self._language, self._voices, self._loop = (
            sessions,
            duplex,
            language,
            voices,
            loop,
        )

    def chat(
        self,
        name: str,
        content: Any,
        config: ReplyConfig,
        emit: Callable[[Event], None],
        *,
        voice: Any = None,
        arrived: float,
    ) -> Session:
        """Answer a whole conversation in a session of its own, which closes by itself behind the outcome.

        Raises: as `Sessions.open` and `VoiceManager.lend`; ContextOverflowError if conversation and answer do not fit.
        """
        n_rows, llm_len = len(content) + config.max_rows, self._duplex.runner.llm_len
        if n_rows > llm_len:
            expected = f"at most {llm_len} rows, prompt and answer"
            raise ContextOverflowError("conversation", expected=expected, got=f"{len(content)} + {config.max_rows}")
        session = self._open(name, config, emit, voice)
        session.ends_itself = True
        self._loop.add(ReplyJob(session, arrived, content, config, self._language, self._voices))
        return session

    def converse(
        self,
        name: str,
        system: Any,
        config: HalfDuplexConfig,
        emit: Callable[[Event], None],
        *,
        voice: Any = None,
    ) -> Session:
        """A half-duplex conversation behind a system message.

        Raises: as `chat`; NumericsError.
        """
        session = self._open(name, config.reply, emit, voice)
        try:
            high, low = config.marks(self._duplex.runner.llm_len)
            session.rounds = Rounds(high=high, low=low)
            n_rows = self._sessions.feed_prompt(session, system.encode(self._duplex.runner))
            session.rounds.add_system(n_rows)
            if not session.reference:
                self._duplex.context.hold(session.slot, self._duplex.save_keys(session.slot, n_rows), n_rows)
        except BaseException:
            self._sessions.close(session)
            raise
        return session

    def answer(self, session: Session, content: Any, config: ReplyConfig, arrived: float) -> None:
        """Answer what the user of a half-duplex conversation said.

        Raises: OrderError while an answer runs, and for a session that is no such conversation.
        """
        if session.rounds is None or session.phase is not Phase.READY:
            got = session.phase if session.rounds is not None else "one of another kind"
            raise OrderError(f"session {session.id}: answer", expected="a conversation between rounds", got=got)
        self._duplex.begin_answer(session.slot)
        job = RoundJob(session, arrived, content, config, self._language, self._voices, session.rounds)
        self._loop.add(job)

    def take_back(self, session: Session) -> bool:
        """Forget the round that runs, as if the user had said nothing. Returns: whether there was one.

        Raises: OrderError for a session that is no half-duplex conversation.
        """
        if session.rounds is None:
            expected = "a half-duplex conversation"
            raise OrderError(f"session {session.id}: take back", expected=expected, got="one of another kind")
        if not self._loop.take_back(session):
            return False
        self._voices.cut(session)
        return True

    def _open(self, name: str, config: ReplyConfig, emit: Callable[[Event], None], voice: Any) -> Session:
        session = self._sessions.open(name, config.session_config(), emit)
        try:
            self._voices.lend(session, voice if config.speak else None)
            # Without a voice nothing is kept from being written.
            config = config.model_copy(update={"speak": self._voices.can_speak(session)})
            seed = self._sessions.seed(session.config)
            self._duplex.configure(session.slot, config.text_sampling(), config.speech_sampling(), seed)
            session.move("prepare")
        except BaseException:
            self._sessions.close(session)
            raise
        return session
