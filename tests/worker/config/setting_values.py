"""Arbitrary JSON values, and the error of refused settings."""

import pytest
from hypothesis import strategies as st

from worker.config.settings import SettingError, Settings

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def refused(settings: type[Settings], **given: object) -> SettingError:
    with pytest.raises(SettingError) as caught:
        settings(**given)
    return caught.value
