"""What failed while compiling or capturing, in one line, with what to do about it where that is known."""

import traceback

import torch

MAX_REASON = 400  # characters of an error's text
OUT_OF_MEMORY = (
    "turn off one of: the target (compile.targets), CUDA graphs (compile.cuda_graphs: off), autotuning "
    "(compile.mode: default), or lower max_sessions"
)


def reason_of(error: BaseException) -> str:
    """Kind and first line."""
    error = getattr(error, "inner_exception", error)  # what a backend raised, without what Dynamo says of it
    text = f"{type(error).__name__}: {first_line(error)}"
    return f"{text}; {OUT_OF_MEMORY}" if isinstance(error, torch.cuda.OutOfMemoryError) else text


def is_misfit(error: BaseException) -> bool:
    """Whether a graph was run on sizes that it was not made for."""
    return isinstance(getattr(error, "inner_exception", error), AssertionError) and "stride" in str(error)


def first_line(error: BaseException) -> str:
    """The first line of its text, or where it came from if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else _place(error)
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
