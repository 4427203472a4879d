"""Int8 matrices: the error of each weight is at most half its scale, and files without a fitting scale are refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.checkpoint.files import read_pt
from models.checkpoint.index import DECLARATION
from models.checkpoint.packing import SCALE, packed
from models.checkpoint.precision import MIN_ROW_VALUES
from models.checkpoint.quantized import is_matrix, quantize
from models.errors import CheckpointError

Change = dict[str, object]


@given(
    rows=st.integers(1, 6),
    inner=st.sampled_from([(MIN_ROW_VALUES,), (7, 5), (1, 33)]),
    exponents=st.lists(st.integers(-30, 30), min_size=6, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_error_is_at_most_half_a_scale(
    rows: int, inner: tuple[int, ...], exponents: list[int], seed: int, dtype: torch.dtype
) -> None:
    drawn = torch.randn(rows, *inner, generator=torch.Generator().manual_seed(seed))
    size = torch.tensor([2.0**one for one in exponents[:rows]]).view(-1, *[1] * len(inner))
    tensor = (drawn * size).to(dtype)
    tensor[0, ..., 0] = 0.0
    stored = quantize(tensor)
    assert stored.values.dtype is torch.int8 and stored.scale.dtype is torch.float32
    assert int(stored.values.abs().max()) <= 127
    error = (stored.dequantized().double() - tensor.double()).abs().flatten(1)
    # The product itself is rounded to float32.
    bound = stored.scale.double() * (0.5 + 127 * 2.0**-24)
    assert (error <= bound[:, None]).all(), f"expected at most {bound}, got {error.amax(1)}"


def test_zero_rows_stay_zero() -> None:
    tensor = torch.randn(3, 40)
    tensor[1] = 0
    got = quantize(tensor).dequantized()
    assert not got[1].any() and got[0].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(CheckpointError, match="expected finite values"):
        quantize(torch.full((2, 40), bad))


def test_small_tensors_stay_floats() -> None:
    for tensor in (torch.ones(100), torch.ones(4, MIN_ROW_VALUES - 1), torch.ones(2, 64, dtype=torch.int64)):
        assert not is_matrix(tensor)
        assert list(packed("w", tensor)) == ["w"]
    assert list(packed("w", torch.ones(4, MIN_ROW_VALUES))) == ["w", f"w{SCALE}"]


def stored_pt(folder: Path, declared: object = DECLARATION, **changes: object) -> Path:
    state: Change = {**packed("w", torch.randn(4, 40)), "bias": torch.ones(4)} | changes
    loaded = {"quantization": declared, "state_dict": state}
    torch.save({key: value for key, value in loaded.items() if value is not None}, folder / "a.pt")
    return folder / "a.pt"


def test_a_declared_pt_is_read_in_float32(tmp_path: Path) -> None:
    got = read_pt(stored_pt(tmp_path))
    assert list(got) == ["w", "bias"]
    assert got["w"].dtype is torch.float32 and got["w"].shape == (4, 40)


@pytest.mark.parametrize(
    ("declared", "changes", "expected"),
    [
        (None, {}, r"expected names with dense float tensors only, got w: torch\.int8"),
        ({"format": "int8", "version": 2}, {}, r"quantization: expected .*'version': 1.*, got .*'version': 2"),
        ({"format": "int4", "version": 1}, {}, "expected .*int8.*, got .*int4"),
        (DECLARATION, {f"w{SCALE}": torch.ones(3)}, r"w\.scale: expected F32 \[4\] beside int8 values, got F32 \[3\]"),
        (DECLARATION, {f"w{SCALE}": torch.ones(4).half()}, r"expected F32 \[4\] .*got torch\.float16 \[4\]"),
        (DECLARATION, {"v": torch.ones(2, 2, dtype=torch.int8)}, r"v\.scale: expected F32 \[2\] .*got nothing"),
        (DECLARATION, {f"w{SCALE}": torch.tensor([1, float("nan"), 1, 1])}, r"w\.scale: expected finite .*got nan"),
        (DECLARATION, {f"w{SCALE}": torch.tensor([1, -2.0, 1, 1])}, r"expected finite .* not negative, got -2\.0"),
        (DECLARATION, {"n": torch.ones(2, dtype=torch.int64)}, r"n: torch\.int64"),
    ],
)
def test_a_pt_that_does_not_fit_is_refused(tmp_path: Path, declared: object, changes: Change, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        read_pt(stored_pt(tmp_path, declared, **changes))
