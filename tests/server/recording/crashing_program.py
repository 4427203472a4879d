"""Records without an end until it is killed: `python -m tests.server.recording.crashing_program DATA_DIR`.

Writes the recording's id to standard output, and then the number of each unit when it was passed to the recording.
"""

import sys
import time
from pathlib import Path

from server.recording.recordings import NoMetrics, recordings_of
from tests.server.recording.recorded import Conversation, result, tone

UNIT_S = 0.02  # at least, between two units


def main() -> None:
    recordings = recordings_of(Path(sys.argv[1]), NoMetrics(), is_enabled=True)
    recordings.open()
    recording = recordings.start("omni_duplex", "omni_crash")
    print(recording.recording_id, flush=True)
    talk, user, model = Conversation(recording), tone(440, 1, 16_000), tone(1000, 1, 24_000)
    number = 0
    while True:
        number += 1
        talk.chunk(user)
        talk.worker(result(number, text=f"{number} ", sound=model))
        print(number, flush=True)
        time.sleep(UNIT_S)


if __name__ == "__main__":
    main()
