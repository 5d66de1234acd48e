"""What a hybrid model's config.json says about memory: shapes of a state and of a KV token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from statecache.checkpoint.formats import DTYPE_BYTES as STATE_BYTES
from statecache.checkpoint.formats import format_named
from statecache.engine.spec import engine_named, load
from statecache.errors import SettingsError, escape_control_chars

__all__ = [
    "DRAFT_KEYS",
    "DTYPE_BYTES",
    "FAMILIES",
    "HybridModel",
    "model_of",
    "read_model",
    "sizing_of",
]

STATE_DTYPES = ("float32", "bfloat16", "float16")
DTYPE_BYTES = {**{name: STATE_BYTES[name] for name in STATE_DTYPES}, "fp8": 1}
DRAFT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_ALWAYS_DRAFT = ("qwen3_next", "qwen3_5")  # families that have a drafter unless a key says 0


class HybridModel(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes for one tensor-parallel rank; `temporal` is heads, d_v, d_k of one layer.

    `named_state_dtype` is the type of the temporal state that the file asks for, by the key that
    asks for it: engines read different ones. Of `conv_values` each of `conv_columns` tokens has its
    share. `draft_layers` are those that a model's own drafter (MTP) has, each with attention like
    the others; 0 for a model without one.
    """

    family: str
    dtype: str
    state_layers: int
    attention_layers: int
    conv_values: int
    temporal: tuple[int, int, int]
    kv_values: int
    conv_columns: int = 3
    draft_layers: int = 1
    named_state_dtype: dict[str, str | None] = {}

    def state_dtypes(self, engine: str, asked: str | None = None) -> tuple[str, str]:
        """Return the types of the convolution and the temporal state in `engine` on a GPU.

        By the engine's own rules, unless the type of the temporal state is `asked` for.
        """
        found: tuple[str, str] = sizing_of(engine).state_dtypes(self, asked)
        return found

    def layer_state_bytes(self, engine: str, asked: str | None = None) -> int:
        """Return the bytes of the state of one layer."""
        conv, temporal = self.state_dtypes(engine, asked)
        heads, d_v, d_k = self.temporal
        return self.conv_values * DTYPE_BYTES[conv] + heads * d_v * d_k * DTYPE_BYTES[temporal]

    def state_bytes(self, engine: str, asked: str | None = None) -> int:
        """Return the bytes of a state, all layers."""
        return self.state_layers * self.layer_state_bytes(engine, asked)

    def bytes_at_rest(self, checkpoints: str, engine: str, asked: str | None = None) -> int:
        """Return the bytes of a state in a checkpoint pool of the format `checkpoints`."""
        conv, temporal = self.state_dtypes(engine, asked)
        at_rest = format_named(checkpoints).bytes_per_layer(self.temporal, temporal)
        return self.state_layers * (self.conv_values * DTYPE_BYTES[conv] + at_rest)

    def kv_token_bytes(self, dtype: str | None = None) -> int:
        """Return the bytes of the KV of a token, all layers; by default in the model's type."""
        return self.attention_layers * self.kv_values * DTYPE_BYTES[dtype or self.dtype]

    def widened(self, tokens: int) -> HybridModel:
        """Return this model where its convolutions keep so many tokens more, to verify drafts."""
        more = self.conv_values // self.conv_columns * tokens
        return msgspec.structs.replace(self, conv_values=self.conv_values + more)

    def draft_kv_token_bytes(self, dtype: str | None = None) -> int:
        """Return the bytes of the KV that the drafter keeps of a token."""
        return self.draft_layers * self.kv_values * DTYPE_BYTES[dtype or self.dtype]


def sizing_of(engine: str) -> Any:
    """Return the class that divides memory for an engine. Raises `SettingsError` without one."""
    spec = engine_named(engine)
    if spec.sizing is None:
        raise SettingsError(f"--engine: memory cannot be planned for {spec.title} yet")
    return load(spec.sizing)


class _Config:
    """The keys of a config.json, checked as they are read."""

    def __init__(self, source: str, family: str, keys: Mapping[str, Any], ranks: int) -> None:
        self.source, self.family, self.ranks = source, family, ranks
        self._keys = keys

    def error(self, problem: str) -> SettingsError:
        return SettingsError(f"{self.source}: {escape_control_chars(problem)}")

    def get(self, *names: str) -> Any:
        """Return the first of these that is there and not null, or None."""
        return next((v for name in names if (v := self._keys.get(name)) is not None), None)

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        value = self.get(*names)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"lacks {' or '.join(names)}, which a {self.family} model needs")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            found = next((name for name in names if self.get(name) is not None), names[0])
            raise self.error(f"{found} is {value!r}: a number from {least} up is expected")
        return value

    def split(self, what: str, count: int) -> int:
        """Return each rank's share of `count`."""
        if count % self.ranks:
            raise self.error(f"{count} {what} cannot be shared by --tp {self.ranks} ranks")
        return count // self.ranks

    def layers(self, kinds: Mapping[str, tuple[str, ...]]) -> tuple[int, int]:
        """Count the layers of the two kinds: with states, and with attention."""
        listed = self.get("layer_types", "layers_block_type")
        if not isinstance(listed, list) or not all(isinstance(layer, str) for layer in listed):
            raise self.error(f"lacks layer_types, which a {self.family} model needs")
        states, attention = (sum(layer in kinds[kind] for layer in listed) for kind in kinds)
        return states, attention

    def kv_values(self, head_dim: int) -> int:
        heads = self.number("num_attention_heads")
        kv_heads = self.number("num_key_value_heads", default=heads)
        if kv_heads > self.ranks:
            kv_heads = self.split("KV heads", kv_heads)
        elif self.ranks % kv_heads:
            raise self.error(f"{kv_heads} KV heads cannot be shared by --tp {self.ranks} ranks")
        else:
            kv_heads = 1
        return 2 * kv_heads * head_dim

    def head_dim(self, *names: str) -> int:
        even = self.number("hidden_size") // self.number("num_attention_heads")
        return self.number(*names, default=even)

    def mamba2(
        self, inner: int, groups: int, heads: int, head_dim: int, state: int
    ) -> tuple[int, tuple[int, int, int]]:
        """Return the channels of the convolution and the temporal state of a Mamba2 layer."""
        if groups % self.ranks:  # both engines copy groups until each rank has one
            groups = self.ranks
        channels = self.split("channels", inner + 2 * groups * state)
        return channels, (self.split("state heads", heads), head_dim, state)


_KINDS = {
    "states": ("linear_attention", "mamba"),
    "attention": ("full_attention", "attention"),
}


def _gdn(config: _Config) -> HybridModel:
    """Qwen3-Next and Qwen3.5: gated delta layers."""
    if config.get("layer_types", "layers_block_type") is not None:
        states, attention = config.layers(_KINDS)
    else:
        layers = config.number("num_hidden_layers")
        attention = layers // config.number("full_attention_interval", default=4)
        states = layers - attention
    k_dim, v_dim = config.number("linear_key_head_dim"), config.number("linear_value_head_dim")
    heads, k_heads = config.number("linear_num_value_heads"), config.number("linear_num_key_heads")
    config.split("key heads", k_heads)
    channels, temporal = config.mamba2(heads * v_dim, k_heads, heads, v_dim, k_dim)
    kernel = config.number("linear_conv_kernel_dim")
    named = _named(config, "mamba_ssm_dtype")
    kv = config.kv_values(config.head_dim("head_dim"))
    return _model(config, states, attention, channels, kernel, temporal, kv, named)


def _kimi_linear(config: _Config) -> HybridModel:
    """Kimi-Linear: KDA layers; its attention keeps one latent vector, the same on every rank."""
    linear = config.get("linear_attn_config")
    kda = linear.get("kda_layers") if isinstance(linear, dict) else None
    if not isinstance(linear, dict) or not isinstance(kda, list):
        raise config.error("lacks linear_attn_config with kda_layers")
    part = _Config(config.source, config.family, linear, config.ranks)
    heads, head_dim = part.number("num_heads"), part.number("head_dim")
    channels = config.split("channels", 3 * heads * head_dim)
    temporal = (config.split("state heads", heads), head_dim, head_dim)
    if config.get("kv_lora_rank") is not None:
        kv = config.number("kv_lora_rank") + config.number("qk_rope_head_dim")
    else:
        kv = config.kv_values(config.head_dim("head_dim"))
    kernel = part.number("short_conv_kernel_size")
    attention = config.number("num_hidden_layers") - len(kda)
    return _model(config, len(kda), attention, channels, kernel, temporal, kv, {})


def _nemotron_h(config: _Config) -> HybridModel:
    """Nemotron-H: Mamba2 layers, in a pattern of letters or a list."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        states, attention = pattern.count("M"), pattern.count("*")
    else:
        states, attention = config.layers(_KINDS)
    heads, head_dim = config.number("mamba_num_heads"), config.number("mamba_head_dim")
    channels, temporal = config.mamba2(
        heads * head_dim,
        config.number("n_groups"),
        heads,
        head_dim,
        config.number("ssm_state_size"),
    )
    kernel = config.number("conv_kernel")
    named = _named(config, "mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    kv = config.kv_values(config.head_dim("head_dim", "attention_head_dim"))
    return _model(config, states, attention, channels, kernel, temporal, kv, named)


def _granite(config: _Config) -> HybridModel:
    """Granite 4: Mamba2 layers."""
    states, attention = config.layers(_KINDS)
    inner = config.number("mamba_expand") * config.number("hidden_size")
    channels, kernel, temporal = _mamba_keys(config, inner)
    kv = config.kv_values(config.head_dim("head_dim"))
    return _model(config, states, attention, channels, kernel, temporal, kv, {})


def _falcon_h1(config: _Config) -> HybridModel:
    """Falcon-H1: every layer has attention and a Mamba2 state."""
    layers = config.number("num_hidden_layers")
    if config.get("mamba_d_ssm") is not None:
        inner = config.number("mamba_d_ssm")
    else:
        inner = config.number("mamba_expand") * config.number("hidden_size")
    channels, kernel, temporal = _mamba_keys(config, inner)
    named = _named(config, "mamba_ssm_dtype")
    kv = config.kv_values(config.head_dim("head_dim"))
    return _model(config, layers, layers, channels, kernel, temporal, kv, named)


def _mamba_keys(config: _Config, inner: int) -> tuple[int, int, tuple[int, int, int]]:
    heads = config.number("mamba_n_heads")
    written = config.get("mamba_d_head")
    head_dim = inner // heads if written in (None, "auto") else config.number("mamba_d_head")
    if head_dim * heads != inner:
        raise config.error(f"{heads} state heads of {head_dim} are not {inner} channels")
    groups, state = config.number("mamba_n_groups"), config.number("mamba_d_state")
    channels, temporal = config.mamba2(inner, groups, heads, head_dim, state)
    return channels, config.number("mamba_d_conv"), temporal


FAMILIES: dict[str, tuple[str, Callable[[_Config], HybridModel]]] = {
    "qwen3_next": ("qwen3_next", _gdn),
    "qwen3_5_text": ("qwen3_5", _gdn),
    "qwen3_5_moe_text": ("qwen3_5", _gdn),
    "kimi_linear": ("kimi_linear", _kimi_linear),
    "nemotron_h": ("nemotron_h", _nemotron_h),
    "granitemoehybrid": ("granitemoehybrid", _granite),
    "falcon_h1": ("falcon_h1", _falcon_h1),
}


def read_model(path: Path, ranks: int = 1) -> HybridModel:
    """Read a config.json, or that of a folder, for `ranks` tensor-parallel ranks.

    A text model may be nested under text_config. Raises `SettingsError` with one line.
    """
    return model_of(*_load(path), ranks)


def model_of(keys: dict[str, Any], source: str, ranks: int = 1) -> HybridModel:
    """As `read_model`, from what the file `source` holds."""
    kind, nested = keys.get("model_type"), keys.get("text_config")
    if not _known(kind) and isinstance(nested, dict):
        keys = {"dtype": keys.get("dtype"), "torch_dtype": keys.get("torch_dtype")} | nested
        kind = nested.get("model_type")
    if not _known(kind):
        what = "names no model_type" if kind is None else f"model_type {kind!r} is not known here"
        raise SettingsError(
            f"{source}: {escape_control_chars(what)}: use one of {', '.join(FAMILIES)}"
        )
    family, read = FAMILIES[kind]
    model = read(_Config(source, family, keys, ranks))
    if model.state_layers < 1 or model.attention_layers < 1:
        what = "recurrent" if model.attention_layers >= 1 else "attention"
        raise SettingsError(f"{source}: this model has no {what} layers: there is nothing to split")
    return model


def _known(kind: object) -> TypeGuard[str]:
    return isinstance(kind, str) and kind in FAMILIES


def _load(path: Path) -> tuple[dict[str, Any], str]:
    try:
        file = path / "config.json" if path.is_dir() else path
        source = escape_control_chars(str(file))
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any]), source
    except RecursionError as error:
        raise SettingsError(f"{source}: is nested too deeply") from error
    except (OSError, ValueError) as error:
        if isinstance(error, msgspec.MsgspecError | UnicodeDecodeError):
            raise SettingsError(f"{source}: is not a JSON object ({error})") from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SettingsError(
            f"{escape_control_chars(str(path))}: cannot be read ({reason})"
        ) from error


def _named(config: _Config, *names: str) -> dict[str, str | None]:
    """Return the type of the temporal state that each of these keys names."""
    found = {name: config.get(name) for name in names}
    for name, value in found.items():
        if value is not None and not (isinstance(value, str) and value in STATE_DTYPES):
            raise config.error(f"{name} is {value!r}: use {', '.join(STATE_DTYPES)}")
    return found


def _model(
    config: _Config,
    states: int,
    attention: int,
    channels: int,
    kernel: int,
    temporal: tuple[int, int, int],
    kv: int,
    named: dict[str, str | None],
) -> HybridModel:
    dtype = config.get("dtype", "torch_dtype") or "bfloat16"
    if not isinstance(dtype, str) or dtype not in STATE_DTYPES:
        raise config.error(f"dtype is {dtype!r}: use {', '.join(STATE_DTYPES)}")
    return HybridModel(
        family=config.family,
        dtype=dtype,
        state_layers=states,
        attention_layers=attention,
        conv_values=channels * (kernel - 1),
        temporal=temporal,
        kv_values=kv,
        conv_columns=max(kernel - 1, 1),
        draft_layers=config.number(
            *DRAFT_KEYS, default=1 if config.family in _ALWAYS_DRAFT else 0, least=0
        ),
        named_state_dtype=named,
    )
