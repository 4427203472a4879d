"""Reasons for failures of compiling and capturing, in one line, with a remedy if one is known."""

import torch

from worker.log import first_line

OUT_OF_MEMORY = (
    "turn off one of: the target (compile.targets), CUDA graphs (compile.cuda_graphs: off), autotuning "
    "(compile.mode: default), or lower max_sessions"
)


def reason_of(error: BaseException) -> str:
    """An error's type and first line, and the remedy for exhausted memory."""
    error = _cause(error)
    text = first_line(error)
    return f"{text}; {OUT_OF_MEMORY}" if isinstance(error, torch.cuda.OutOfMemoryError) else text


def is_size_mismatch(error: BaseException) -> bool:
    """Whether a graph ran on sizes that it was not compiled for."""
    return isinstance(_cause(error), AssertionError) and "stride" in str(error)


def _cause(error: BaseException) -> BaseException:
    """The error that a compiler backend raised, without Dynamo's wrapper."""
    cause: BaseException = getattr(error, "inner_exception", error)
    return cause
