"""Names that settings had before: they mean what the new ones do, and say so once."""

import argparse
import logging

import msgspec
import pytest

from statecache.engine.settings import Settings, add_flags, given_on
from statecache.engine.spec import engine_named

ON = {"kv_cache_plugin": "statecache"}
OLD = [
    ({"int8": True}, {"checkpoints": "int8"}, "--statecache-int8 is now --statecache-checkpoints"),
    (
        {"checkpoints": "native", "int8_slots": 4},
        {"checkpoints": "native", "checkpoint_slots": 4},
        "--statecache-int8-slots is now --statecache-checkpoint-slots",
    ),
    (
        {"block_order": "stock"},
        {"block_policy": "stock"},
        "--statecache-block-order is now --statecache-block-policy",
    ),
    (
        {"admission": "ends+fork"},
        {"admission": "branch-points"},
        "--statecache-admission ends+fork is now --statecache-admission branch-points",
    ),
]


@pytest.mark.parametrize(("old", "new", "said"), OLD)
def test_an_old_name_means_what_the_new_one_does_and_says_so_once(
    old, new, said, monkeypatch, caplog
):
    monkeypatch.setattr("statecache.engine.settings_aliases._said", set())
    with caplog.at_level(logging.WARNING):
        found = [Settings.from_given({**ON, **old}, {}) for _ in range(2)]
    assert found == [Settings.from_given({**ON, **new}, {})] * 2
    (record,) = caplog.records
    assert record.getMessage().startswith(f"statecache: {said}")
    assert record.getMessage().endswith("the old name goes with the next release")


@pytest.mark.parametrize(("old", "new", "_"), OLD)
def test_an_old_name_is_read_from_the_environment_and_not_passed_on(old, new, _):
    text = msgspec.json.encode({**ON, **old}).decode()
    settings = Settings.from_environment({"STATECACHE_CONFIG": text})
    assert settings == Settings.from_given({**ON, **new}, {})
    environment: dict[str, str] = {}
    settings.to_environment(environment)
    assert msgspec.json.decode(environment["STATECACHE_CONFIG"]) == {**ON, **new}


def test_the_old_flags_are_still_there():
    words = "--kv-cache-plugin statecache --statecache-int8 --statecache-int8-slots 4"
    words += " --statecache-block-order stock"
    new = {"checkpoints": "int8", "checkpoint_slots": 4, "block_policy": "stock"}
    parser = argparse.ArgumentParser()
    add_flags(parser, engine_named("vllm"))
    given = given_on(parser.parse_args(words.split()))
    assert Settings.from_given(given, {}) == Settings.from_given({**ON, **new}, {})


def test_an_old_switch_that_is_off_takes_back_what_the_environment_says():
    environment = {"STATECACHE_CONFIG": '{"kv_cache_plugin":"statecache","int8":true}'}
    assert Settings.from_environment(environment).checkpoints == "int8"
    assert Settings.from_given({"int8": False}, environment).checkpoints is None
