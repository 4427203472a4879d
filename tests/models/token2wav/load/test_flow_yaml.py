"""`flow.yaml`: reads the released values, refuses everything else with the key's name, and imports nothing."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from assets.build_tiny_vocoder import flow_yaml
from models.errors import ConfigError
from models.token2wav.load.flow_yaml import MAX_BYTES, load_flow_config
from models.token2wav.settings import DiTConfig, EncoderConfig, FlowConfig

RELEASED = flow_yaml(FlowConfig())
RELEASED_BYTES = 1099


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "flow.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def error_of(folder: Path, text: str | bytes) -> str:
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_flow_config(path)
    message = str(caught.value)
    assert message.startswith(str(path)), f"expected the file's name first, got {message}"
    assert len(message) < 3000, f"expected a message to read, got {len(message)} characters"
    return message


def changed(key: str, value: str, *, nth: int = 0) -> str:
    """The released file with a changed nth line of this key; an empty value removes the line."""
    lines = RELEASED.splitlines(keepends=True)
    index = [i for i, line in enumerate(lines) if line.strip().startswith(f"{key}:")][nth]
    indent = re.match(" *", lines[index]).group()
    lines[index] = f"{indent}{key}: {value}\n" if value else ""
    return "".join(lines)


def test_released_values(tmp_path: Path) -> None:
    assert len(RELEASED) == RELEASED_BYTES, "expected the size of the released file"
    assert load_flow_config(write(tmp_path, RELEASED)) == FlowConfig()


@given(
    width=st.integers(1, 9).map(lambda n: 12 * n),
    n_mels=st.integers(1, 100),
    depth=st.integers(1, 30),
    layers=st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    ratio=st.sampled_from([1.5, 2.0, 4.0]),
    cfg_rate=st.floats(0, 3).map(lambda x: round(x, 3)),
)
def test_reads_every_size(
    tmp_path_factory: pytest.TempPathFactory,
    width: int,
    n_mels: int,
    depth: int,
    layers: tuple[int, int, int],
    ratio: float,
    cfg_rate: float,
) -> None:
    config = FlowConfig(
        vocab_size=4000 + depth,
        n_mels=n_mels,
        speaker_dim=7 + depth,
        cfg_rate=cfg_rate,
        encoder=EncoderConfig(
            width=width, heads=3, inner=width + 5, n_layers=layers[0], n_up_layers=layers[1], lookahead=layers[2]
        ),
        estimator=DiTConfig(width=width + 2, heads=layers[1], head_dim=depth + 1, depth=depth, mlp_ratio=ratio),
    )
    assert load_flow_config(write(tmp_path_factory.mktemp("y"), flow_yaml(config))) == config


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("output_type", "'wave'", "flow.output_type"),
        ("input_size", "256", "flow.input_size"),
        ("vocab_size", "'6561'", "flow.vocab_size"),
        ("vocab_size", "true", "flow.vocab_size"),
        ("spk_embed_dim", "[1, 2]", "flow.spk_embed_dim"),
        ("input_layer", "'conv2d'", "flow.encoder.input_layer"),
        ("up_stride", "4", "flow.encoder.up_stride"),
        ("up_scale_factor", "4", "flow.encoder.up_scale_factor"),
        ("pos_enc_layer_type", "'abs_pos'", "flow.encoder.pos_enc_layer_type"),
        ("selfattention_layer_type", "'selfattn'", "flow.encoder.selfattention_layer_type"),
        ("key_bias", "false", "flow.encoder.key_bias"),
        ("key_bias", "1", "flow.encoder.key_bias"),
        ("normalize_before", "false", "flow.encoder.normalize_before"),
        ("dropout_rate", "'a lot'", "flow.encoder.dropout_rate"),
        ("in_channels", "240", "flow.decoder.estimator.in_channels"),
        ("out_channels", "79", "flow.decoder.estimator.out_channels"),
        ("encoder", "3", "flow.encoder"),
        ("depth", "1" * 400, "flow.decoder.estimator.depth"),
        ("mlp_ratio", ".nan", "flow.decoder.estimator.mlp_ratio"),
        ("mlp_ratio", ".inf", "flow.decoder.estimator.mlp_ratio"),
        ("inference_cfg_rate", "null", "flow.decoder.inference_cfg_rate"),
        ("inference_cfg_rate", "0.7\n        n_timesteps: two", "flow.decoder.n_timesteps"),
    ],
)
def test_refuses_unsupported_values(tmp_path: Path, key: str, value: str, where: str) -> None:
    text = changed(key, value)
    if key == "encoder":
        text = re.sub(r"(    encoder: 3\n)(        .*\n)+", r"\1", text)
    assert f"{where}: expected " in error_of(tmp_path, text)


@pytest.mark.parametrize(
    "key", sorted(set(re.findall(r"^ +(\w+):", RELEASED, re.M)) - {"encoder", "decoder", "estimator"})
)
def test_refuses_missing_keys(tmp_path: Path, key: str) -> None:
    assert re.search(rf"flow[\w.]*\.{key}: expected .*, got nothing", error_of(tmp_path, changed(key, "")))


@pytest.mark.parametrize(
    ("above", "where"), [("vocab_size", "flow"), ("key_bias", "flow.encoder"), ("depth", "flow.decoder.estimator")]
)
def test_refuses_unknown_keys(tmp_path: Path, above: str, where: str) -> None:
    text = re.sub(rf"^( +)({above}: .*)$", r"\1\2\n\1causal_pad: 3", RELEASED, flags=re.M)
    message = error_of(tmp_path, text)
    assert f"{where}: expected no other keys" in message
    assert "causal_pad" in message


def test_refuses_impossible_sizes(tmp_path: Path) -> None:
    message = error_of(tmp_path, changed("attention_heads", "7"))
    assert "7 heads" in message
    assert "512" in message
    assert "depth" in error_of(tmp_path, changed("depth", "0"))
    assert "depth" in error_of(tmp_path, changed("depth", "2.5"))


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system",
        "!!python/name:os.system",
        "!apply:os.system",
        "!name:os.system",
        "!new:os.system",
        "!new:cosyvoice2.flow.decoder_dit.DiTX",
        "!ref",
    ],
)
def test_refuses_other_tags(tmp_path: Path, tag: str) -> None:
    for line in ("vocab_size", "depth"):
        assert tag.removeprefix("!!python/") in error_of(tmp_path, changed(line, f"{tag} ['echo no']"))


def test_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "cosyvoice2").mkdir()
    (tmp_path / "cosyvoice2/__init__.py").write_text("raise SystemExit('imported')")
    sys.path.insert(0, str(tmp_path))
    try:
        load_flow_config(write(tmp_path, RELEASED))
    finally:
        sys.path.remove(str(tmp_path))
    assert "cosyvoice2" not in sys.modules


def test_refuses_swapped_sections(tmp_path: Path) -> None:
    text = RELEASED.replace("flow_matching.CausalConditionalCFM", "decoder_dit.DiT")
    assert "flow.decoder: expected !new:cosyvoice2.flow.flow_matching" in error_of(tmp_path, text)
    text = re.sub(r"decoder: !new\S+", "decoder:", RELEASED)
    assert "flow.decoder: expected !new:cosyvoice2.flow.flow_matching" in error_of(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    ["", "flow", "- 1", "flow: {}", "a: 1\n" + RELEASED, RELEASED + "b: 1\n", "flow: [", b"\xff\xfe\x00", b"\x80"],
)
def test_refuses_foreign_files(tmp_path: Path, text: str | bytes) -> None:
    assert "expected" in error_of(tmp_path, text)


def test_refuses_repeated_keys(tmp_path: Path) -> None:
    assert "depth given twice" in error_of(tmp_path, RELEASED + "            depth: 3\n")

    assert "flow given twice" in error_of(tmp_path, "flow: 1\n" + RELEASED)


def test_refuses_repeated_keys_by_alias(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 15))]
    value = "!new:cosyvoice2.flow.decoder_dit.DiT {" + ", ".join(levels) + ", ? *a14 : 1, ? *a14 : 2}"
    assert "unhashable" in error_of(tmp_path, changed("depth", value))


def test_finds_repeated_keys_in_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairwise comparison would need 10^8 comparisons for the largest accepted file."""
    n_compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal n_compared
            n_compared += 1
            return str.__eq__(self, other)

    init = yaml.ScalarNode.__init__

    def named(node: yaml.ScalarNode, tag: str, value: str, *marks: object, **style: object) -> None:
        init(node, tag, Name(value) if value.startswith("more") else value, *marks, **style)

    monkeypatch.setattr(yaml.ScalarNode, "__init__", named)
    keys = "".join(f"            more{i}: 1\n" for i in range(200))
    assert "flow.decoder.estimator: expected no other keys" in error_of(tmp_path, RELEASED + keys)
    assert n_compared < 5000, f"expected a few comparisons per key, got {n_compared}"


@pytest.mark.parametrize(
    "value",
    [
        "!!int ''",
        "!!float ''",
        "!!bool maybe",
        "!!timestamp x",
        "!!timestamp '2000-99-99'",
        "!!float '" + "1:" * 400 + "1.0'",
        "{? !new:cosyvoice2.flow.decoder_dit.DiT {} : 1}",
    ],
)
def test_refuses_values_that_do_not_match_their_tags(tmp_path: Path, value: str) -> None:
    assert "expected YAML with no tags but" in error_of(tmp_path, changed("depth", value))


def test_reports_an_integer_too_long_for_decimal(tmp_path: Path) -> None:
    assert "depth: expected a number below 1000000, got an integer of 20000 bits" in error_of(
        tmp_path, changed("depth", "0x" + "f" * 5000)
    )


def test_refuses_merge_keys(tmp_path: Path) -> None:
    for merge in ("<<", "!!merge more"):
        text = re.sub(r"^( +)(depth: .*)$", rf"\1{merge}: {{\2}}", RELEASED, flags=re.M)
        assert "a merge key" in error_of(tmp_path, text)


@pytest.mark.parametrize(
    ("key", "name"), [("num_blocks", "n_layers"), ("num_up_blocks", "n_up_layers"), ("depth", "depth")]
)
def test_refuses_too_many_layers(tmp_path: Path, key: str, name: str) -> None:
    load_flow_config(write(tmp_path, changed(key, "1000")))
    message = error_of(tmp_path, changed(key, "1001"))
    assert f"{name} (" in message and "less than or equal to 1000, got 1001" in message


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_flow_config(tmp_path / "flow.yaml")


def test_does_not_parse_a_large_file(tmp_path: Path) -> None:
    assert str(MAX_BYTES) in error_of(tmp_path, RELEASED + "#" * MAX_BYTES)


def test_reports_nested_aliases_briefly(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 25)]
    for text in ("\n".join(levels), changed("depth", "{" + ", ".join(levels) + "}")):
        error_of(tmp_path, text)
    error_of(tmp_path, changed("depth", "&a [*a]"))
    error_of(tmp_path, "flow: " + "[" * 20_000)
