"""`python -m tests.worker.http.brief_worker`: a worker that speaks four seconds at most for a part of a text.

The random weights of the embedded model hardly ever end the speech of a part, which the limit of the model would end
after twenty seconds.
"""

import sys
from functools import partial
from unittest import mock

from models.stages.speech_stream import SpeechStream
from worker.loop import voice_manager
from worker.main import main

MAX_SPEECH_TOKENS = 100

if __name__ == "__main__":
    with mock.patch.object(voice_manager, "SpeechStream", partial(SpeechStream, max_speech_tokens=MAX_SPEECH_TOKENS)):
        sys.exit(main())
