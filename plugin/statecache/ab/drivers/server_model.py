"""What a server says of its model, and what its files add."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from statecache.ab.drivers.server_client import RequestError

if TYPE_CHECKING:
    from statecache.ab.drivers.server_client import Client
    from statecache.ab.server_arm import ServerArm

__all__ = ["ServedModel", "served_model", "vocabulary_of"]


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model to ask for; `most_tokens` is None where the server does not say.

    `tells_ids` is whether answers come as token ids too.
    """

    name: str
    vocabulary: int
    most_tokens: int | None
    server: str
    tells_ids: bool = False


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    owned_by: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str


class _Config(msgspec.Struct):
    vocab_size: int | None = None
    text_config: _Config | None = None


async def served_model(client: Client, arm: ServerArm) -> ServedModel:
    """Ask the server. Raises `RequestError`, or `SettingsError` for what the arm must say."""
    try:
        cards = msgspec.json.decode(await client.get("v1/models"), type=_Cards).data
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"v1/models: {error}") from error
    card = next((card for card in cards if arm.model in (None, card.id)), None)
    if card is None:
        known = ", ".join(card.id for card in cards) or "none"
        raise arm.error(f"the server has no model {arm.model or ''!r}: use {known}")
    vocabulary = arm.vocabulary or vocabulary_of(card.root or card.id)
    if vocabulary is None:
        raise arm.error(f"how many tokens {card.id} knows is not known here: give vocabulary")
    return ServedModel(
        name=card.id,
        vocabulary=vocabulary,
        most_tokens=card.max_model_len,
        server=f"{card.owned_by or 'server'} {await _version(client)}",
    )


async def _version(client: Client) -> str:
    """Return the version, which engines tell in different places."""
    for path in ("version", "server_info"):
        with suppress(RequestError, msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(await client.get(path), type=_Version).version
    return "of unknown version"


def vocabulary_of(model: str) -> int | None:
    """Return the number of tokens by the model's files: a folder, or the cache of its hub."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    stored = home / "hub" / f"models--{model.replace('/', '--')}" / "snapshots"
    for path in (Path(model) / "config.json", *sorted(stored.glob("*/config.json"))):
        with suppress(OSError, msgspec.DecodeError, RecursionError):
            config = msgspec.json.decode(path.read_bytes(), type=_Config)
            found = config.vocab_size or (config.text_config and config.text_config.vocab_size)
            if found:
                return found
    return None
