"""Whether sound and video files can be used. Packages that may be missing are imported where they are used."""

import subprocess
from pathlib import Path

from worker.doctor.facts import MediaFacts, ProgramFacts, UnknownFact

VIDEO_S = 30


def sound_facts(path: Path) -> MediaFacts:
    """A reference voice. Raises: UnknownFact without the package that reads it."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise UnknownFact(f"sound files need a package that is not installed: {error}") from None
    try:
        info = soundfile.info(str(path))
    except Exception as error:
        return MediaFacts(error="no such file" if not path.is_file() else str(error))
    if not 0.5 <= info.duration <= 30:
        return MediaFacts(error=f"expected 0.5 to 30 s of sound, got {info.duration:.2f} s")
    return MediaFacts(f"{info.duration:.1f} s at {info.samplerate} Hz")


def video_facts(path: Path, ffmpeg: ProgramFacts) -> MediaFacts:
    """A video, of which ffmpeg decodes a second. Raises: UnknownFact without ffmpeg."""
    if not path.is_file():
        return MediaFacts(error="no such file")
    if not ffmpeg.path:
        raise UnknownFact("reading videos needs ffmpeg")
    command = [ffmpeg.path, "-nostdin", "-hide_banner", "-i", str(path), "-t", "1", "-f", "null", "-"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=VIDEO_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return MediaFacts(error=f"ffmpeg: {error}")
    log = done.stderr.strip().splitlines()
    if done.returncode:
        return MediaFacts(error=f"ffmpeg: {log[-1] if log else done.returncode}")
    kinds = [kind for kind in ("Video", "Audio") if any("Stream #0" in line and f" {kind}: " in line for line in log)]
    if len(kinds) < 2:
        return MediaFacts(error=f"expected frames and sound, got {kinds[0] + ' only' if kinds else 'neither'}")
    length = next((line.split()[1].rstrip(",") for line in log if line.strip().startswith("Duration:")), "unknown")
    return MediaFacts(f"frames and sound, {length}")
