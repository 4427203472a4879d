"""`flow.yaml` of a vocoder folder to `FlowConfig`.

The file names four Python classes as YAML tags. The tags only identify sections: nothing is imported, and any other tag
is an error. Contains the released keys and, of the decoder, `n_timesteps`. Does not contain the networks.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from models.errors import ConfigError
from models.token2wav.settings import DiTConfig, EncoderConfig, FlowConfig

MAX_BYTES = 65_536  # the released file has 1,099
LARGEST = 1_000_000  # far above every size; the comparison also excludes infinity and NaN

TAGS = {
    "flow": "!new:cosyvoice2.flow.flow.CausalMaskedDiffWithXvec",
    "flow.encoder": "!new:cosyvoice2.transformer.upsample_encoder_v2.UpsampleConformerEncoderV2",
    "flow.decoder": "!new:cosyvoice2.flow.flow_matching.CausalConditionalCFM",
    "flow.decoder.estimator": "!new:cosyvoice2.flow.decoder_dit.DiT",
}

_MERGE = "tag:yaml.org,2002:merge"
# PyYAML raises its own errors and, where a value does not match its tag, other ones.
_YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class _Section:
    """A tagged mapping of the file."""

    tag: str
    values: dict[Any, Any]


class _FlowLoader(yaml.SafeLoader):
    """Plain YAML values and the four tags; rejects merge keys and repeated keys."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Called before a mapping is constructed; the base class resolves merge keys here."""
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if any(key.tag == _MERGE for key in keys):
            raise yaml.constructor.ConstructorError(None, None, "a merge key", node.start_mark)
        if twice := sorted(name for name, count in Counter(key.value for key in keys).items() if count > 1):
            raise yaml.constructor.ConstructorError(None, None, f"{', '.join(twice)} given twice", node.start_mark)


def _construct_section(loader: _FlowLoader, node: yaml.Node) -> _Section:
    if not isinstance(node, yaml.MappingNode):
        raise yaml.constructor.ConstructorError(None, None, f"{node.tag} without keys", node.start_mark)
    return _Section(node.tag, loader.construct_mapping(node, deep=True))


for _tag in TAGS.values():
    _FlowLoader.add_constructor(_tag, _construct_section)


def load_flow_config(path: str | Path) -> FlowConfig:
    """The flow's hyper-parameters.

    Raises: ConfigError with file and key if the file is missing, is not such a YAML file, is larger than 64 kB, lacks a
        key, has an unknown key, or describes an unsupported variant of the networks.
    """
    path = Path(path)
    flow = _Reader(path, "flow", _parse(path))
    encoder, decoder = flow.section("encoder"), flow.section("decoder")
    estimator = decoder.section("estimator")

    n_mels, width = flow.number("output_size"), encoder.number("output_size")
    flow.fixed({"output_type": "mel", "input_size": width})
    encoder.fixed({"input_size": width, "up_stride": 2, "up_scale_factor": 2})
    encoder.fixed({"input_layer": "linear", "normalize_before": True, "key_bias": True})
    encoder.fixed({"pos_enc_layer_type": "rel_pos_espnet", "selfattention_layer_type": "rel_selfattn"})
    for key in ("dropout_rate", "positional_dropout_rate", "attention_dropout_rate"):
        encoder.number(key)  # used in training only
    # The estimator's input is noise, encoder output, speaker and prompt, each as wide as a mel frame.
    estimator.fixed({"in_channels": 4 * n_mels, "out_channels": n_mels})

    values: dict[str, Any] = {
        "vocab_size": flow.number("vocab_size"),
        "n_mels": n_mels,
        "speaker_dim": flow.number("spk_embed_dim"),
        "cfg_rate": float(decoder.number("inference_cfg_rate")),
    }
    encoder_values: dict[str, Any] = {
        "width": width,
        "heads": encoder.number("attention_heads"),
        "inner": encoder.number("linear_units"),
        "n_layers": encoder.number("num_blocks"),
        "n_up_layers": encoder.number("num_up_blocks"),
        "lookahead": encoder.number("pre_lookahead_len"),
    }
    estimator_values: dict[str, Any] = {
        "width": estimator.number("hidden_size"),
        "heads": estimator.number("num_heads"),
        "head_dim": estimator.number("head_dim"),
        "depth": estimator.number("depth"),
        "mlp_ratio": float(estimator.number("mlp_ratio")),
    }
    if "n_timesteps" in decoder.left:
        values["n_timesteps"] = decoder.number("n_timesteps")
    for reader in (flow, encoder, decoder, estimator):
        reader.finish()
    try:
        # Pydantic checks the types, such as whole numbers.
        values |= {"encoder": EncoderConfig(**encoder_values), "estimator": DiTConfig(**estimator_values)}
        return FlowConfig(**values)
    except ValidationError as error:
        got = "; ".join(f"{'.'.join(map(str, e['loc']))} ({e['msg']}, got {e['input']!r})" for e in error.errors())
        raise ConfigError(str(path), expected="sizes that the networks support", got=got) from None


def _parse(path: Path) -> object:
    """The value of the only top-level key."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(path), expected="a readable file", got=error.strerror or error) from None
    if len(text) > MAX_BYTES:
        raise ConfigError(str(path), expected=f"at most {MAX_BYTES} bytes", got="more")
    try:
        content = yaml.load(text, Loader=_FlowLoader)  # noqa: S506 - a SafeLoader
    except _YAML_ERRORS as error:
        expected = "YAML with no tags but " + ", ".join(TAGS.values())
        got = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(str(path), expected=expected, got=got) from None
    if not isinstance(content, dict) or list(content) != ["flow"]:
        got = ", ".join(map(_short, content)) if isinstance(content, dict) else type(content).__name__
        raise ConfigError(str(path), expected="the one top-level key flow", got=got)
    return content["flow"]


def _short(value: object) -> str:
    """The text of a scalar, or the type of any other value: aliases can make a value of a small file infinite."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python limits the conversion to decimal
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | int | float | None):
        return repr(value)[:80]
    return f"a {type(value).__name__.strip('_').lower()}"


class _Reader:
    """Reads the keys of one section one by one and reports those that were not read."""

    def __init__(self, path: Path, name: str, value: object):
        self.path, self.name = path, name
        if not isinstance(value, _Section) or value.tag != TAGS[name]:
            got = value.tag if isinstance(value, _Section) else type(value).__name__
            raise self._error("", TAGS[name], got)
        self.left = dict(value.values)

    def section(self, key: str) -> "_Reader":
        return _Reader(self.path, f"{self.name}.{key}", self._take(key, "a section"))

    def number(self, key: str) -> int | float:
        value = self._take(key, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
            raise self._error(f".{key}", f"a number below {LARGEST}", _short(value))
        return value

    def fixed(self, expected: dict[str, object]) -> None:
        """Require these values: other values describe a different network."""
        for key, supported in expected.items():
            value = self._take(key, repr(supported))
            if type(value) is not type(supported) or value != supported:
                raise self._error(f".{key}", repr(supported), _short(value))

    def finish(self) -> None:
        """Raises: ConfigError if the section has keys that were not read."""
        if self.left:
            raise self._error("", "no other keys", ", ".join(sorted(map(_short, self.left))))

    def _take(self, key: str, expected: str) -> object:
        if key not in self.left:
            raise self._error(f".{key}", expected, "nothing")
        return self.left.pop(key)

    def _error(self, key: str, expected: str, got: object) -> ConfigError:
        return ConfigError(f"{self.path}: {self.name}{key}", expected=expected, got=got)
