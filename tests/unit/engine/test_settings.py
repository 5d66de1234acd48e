"""Settings: the same meaning from the command line, the environment and keyword arguments."""

import argparse
import dataclasses
import re

import pytest

from statecache.engine.cost import cost_text
from statecache.engine.settings import (
    ENGINE_BLOCK_POLICIES,
    FIELDS,
    OPTIONAL,
    Settings,
    add_flags,
    flag_of,
    given_on,
    memory_in,
)
from statecache.engine.spec import EngineSpec, engines
from statecache.errors import SettingsError
from statecache.index import policies
from statecache.replay.block_policies import block_policy_names

KNOWN_POLICIES = " or ".join(policies.policy_names(policies.ENGINE))
ENGINE = EngineSpec(
    name="any",
    title="Any",
    plugin_group="any.plugins",
    tested_versions=("1.0",),
    seams=(),
    version=lambda: "1.0",
    own_settings=OPTIONAL,
)
BARE = dataclasses.replace(
    ENGINE,
    own_settings=(),
    refused={("admission", "dense"): "is not for it: it caches what it likes"},
)
ON = {"kv_cache_plugin": "statecache"}


def parse(*words: str) -> dict[str, object]:
    parser = argparse.ArgumentParser()
    add_flags(parser, ENGINE)
    return given_on(parser.parse_args(words))


@pytest.mark.parametrize("words", [("--statecache-cost=-1,2",), ("--statecache-cost", "-1,2")])
def test_a_negative_cost_is_refused_by_its_name_however_it_is_given(words: tuple[str, ...]):
    with pytest.raises(SettingsError, match=r"^--statecache-cost cannot be '-1,2': "):
        Settings.from_given({**ON, **parse(*words)}, {})


def test_a_flag_with_a_comma_in_its_value_stays_one():
    parser = argparse.ArgumentParser()
    parser.add_argument("-x")
    add_flags(parser, ENGINE)
    assert parser.parse_args(["-xa,b"]).x == "a,b"
    assert parser.parse_args(["-x", "-1"]).x == "-1"


def test_nothing_given_is_off():
    settings = Settings.from_given(parse(), {})
    assert not settings.enabled
    assert settings.given == ()


def test_defaults_are_those_of_the_design():
    settings = Settings.from_given(ON, {})
    assert (settings.policy, cost_text(settings.cost_model())) == ("learned", "1.862e-5,3.33e-6")
    assert (settings.checkpoints, settings.checkpoint_slots) == (None, None)
    assert (settings.block_policy, settings.strict) == ("reuse", False)
    assert (settings.checkpoint_interval, settings.wait_for_head) == (None, "on")
    assert settings.given == ("kv_cache_plugin",)


def test_a_share_may_be_a_whole_number_and_travels():
    environment = {}
    Settings.from_given({**ON, "checkpoints": "int8", "verify": 1}, {}).to_environment(environment)
    assert Settings.from_environment(environment).verify == 1.0
    assert Settings.from_given({**ON, "verify": 0}, {}).verify == 0.0
    assert Settings.from_given(ON, {}).verify == 0.0


def test_flags_are_named_as_documented():
    assert [flag_of(name) for name in FIELDS] == [
        "--kv-cache-plugin",
        "--statecache-policy",
        "--statecache-admission",
        "--statecache-wait-for-head",
        "--statecache-cost",
        "--statecache-strict",
        "--statecache-block-policy",
        "--statecache-checkpoints",
        "--statecache-checkpoint-slots",
        "--statecache-checkpoint-memory",
        "--statecache-checkpoint-interval",
        "--statecache-verify",
        "--statecache-record",
        "--statecache-record-mib",
        "--statecache-dry-run",
    ]


def test_every_flag_reaches_its_setting():
    words = "--kv-cache-plugin statecache --statecache-policy lru --statecache-cost 2,0.5"
    words += " --statecache-admission dense --statecache-wait-for-head off"
    words += " --statecache-checkpoints int8 --statecache-checkpoint-slots 7 --statecache-strict"
    words += " --statecache-block-policy stock --statecache-checkpoint-memory host"
    words += " --statecache-checkpoint-interval 512 --statecache-verify 1e-2"
    words += " --statecache-record traffic.gz --statecache-record-mib 5 --statecache-dry-run"
    settings = Settings.from_given(parse(*words.split()), {})
    assert settings == Settings(
        kv_cache_plugin="statecache",
        policy="lru",
        admission="dense",
        wait_for_head="off",
        cost=(2.0, 0.5),
        strict=True,
        block_policy="stock",
        checkpoints="int8",
        checkpoint_slots=7,
        checkpoint_memory="host",
        checkpoint_interval=512,
        verify=0.01,
        record="traffic.gz",
        record_mib=5,
        dry_run=True,
        given=FIELDS,
    )


def test_an_engine_gets_only_the_flags_it_has_a_use_for():
    parser = argparse.ArgumentParser()
    add_flags(parser, BARE)
    assert "--statecache-policy" in parser.format_help()
    assert "--statecache-checkpoints" in parser.format_help()
    assert "--statecache-block-" not in parser.format_help()
    settings = Settings.from_given({**ON, "block_policy": "stock"}, {})
    settings.require_engine(ENGINE)
    with pytest.raises(SettingsError, match="--statecache-block-policy is for vllm only"):
        settings.require_engine(BARE)
    Settings.from_given({**ON, "policy": "lru"}, {}).require_engine(BARE)


def test_a_value_that_an_engine_cannot_do_is_refused_with_its_reason():
    settings = Settings.from_given({**ON, "admission": "dense"}, {})
    settings.require_engine(ENGINE)
    with pytest.raises(SettingsError, match=r"^--statecache-admission dense is not for it: it cac"):
        settings.require_engine(BARE)


def test_sglang_keeps_its_native_pool_to_itself():
    settings = Settings.from_given({**ON, "checkpoints": "native"}, {})
    settings.require_engine(engines()["vllm"])
    with pytest.raises(SettingsError, match=r"^--statecache-checkpoints native is for vllm only: "):
        settings.require_engine(engines()["sglang"])


@pytest.mark.parametrize(
    ("given", "mode", "slots"),
    [
        ({}, None, None),
        ({"checkpoints": "native", "checkpoint_slots": 5}, "native", 5),
        ({"checkpoints": "int8", "checkpoint_slots": 5}, "int8", 5),
        ({"int8": True}, "int8", None),
        ({"int8": True, "int8_slots": 4}, "int8", 4),
    ],
)
def test_how_checkpoints_are_kept(given, mode, slots):
    settings = Settings.from_given({**ON, **given}, {})
    assert (settings.checkpoints, settings.checkpoint_slots) == (mode, slots)


def test_a_default_given_explicitly_is_told_apart_from_one_that_was_not():
    settings = Settings.from_given({**ON, "policy": "learned"}, {})
    assert settings.policy == Settings.from_given(ON, {}).policy
    assert "policy" in settings.given
    assert "policy" not in Settings.from_given(ON, {}).given


def test_the_environment_carries_all_of_it_to_a_child():
    environment: dict[str, str] = {}
    given = {
        **ON,
        "policy": "lru",
        "cost": "0.1,3e-7",
        "checkpoints": "int8",
        "checkpoint_slots": 3,
    }
    settings = Settings.from_given(given, {})
    settings.to_environment(environment)
    assert list(environment) == ["STATECACHE_CONFIG"]
    assert Settings.from_environment(environment) == settings


def test_the_command_line_wins_over_the_environment():
    environment = {"STATECACHE_CONFIG": '{"kv_cache_plugin":"statecache","policy":"lru"}'}
    assert Settings.from_environment(environment).policy == "lru"
    assert Settings.from_given({"policy": "gds"}, environment).policy == "gds"


@pytest.mark.parametrize(
    ("text", "place", "size"),
    [
        ("device", "device", None),
        ("host", "host", None),
        ("host:4096", "host", 4096),
        ("host:1.5 KiB", "host", 1536),
        ("host:64GiB", "host", 64 * 2**30),
        ("host:2TB", "host", 2 * 10**12),
    ],
)
def test_where_checkpoints_are_kept(text, place, size):
    assert memory_in(text) == (place, size)
    asked = Settings.from_given({**ON, "checkpoints": "int8", "checkpoint_memory": text}, {})
    assert asked.on_host is (place == "host")
    dry = Settings.from_given(
        {**ON, "checkpoints": "int8", "checkpoint_memory": text, "dry_run": True}, {}
    )
    assert not dry.in_force.on_host
    assert "--statecache-checkpoint-memory" in dry.left_out


@pytest.mark.parametrize(("text", "strict"), [("", False), ("0", False), ("1", True)])
def test_strict_from_its_own_variable(text, strict):
    assert Settings.from_environment({"STATECACHE_STRICT": text}).strict is strict


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_cache_plugin": "other"}, "--kv-cache-plugin cannot be 'other': use statecache"),
        (
            {**ON, "policy": "x"},
            f"--statecache-policy cannot be 'x': use {KNOWN_POLICIES}",
        ),
        (
            {**ON, "cost": "1"},
            "--statecache-cost cannot be '1': use two numbers, LINEAR,QUADRATIC",
        ),
        ({**ON, "cost": "1,x"}, "use two numbers, LINEAR,QUADRATIC"),
        ({**ON, "cost": "nan,1"}, "must be finite numbers"),
        ({**ON, "cost": "0,0"}, "cost coefficients must not both be 0"),
        ({**ON, "cost": "-1,0"}, "cost coefficients must not be negative"),
        (
            {**ON, "wait_for_head": "true"},
            "--statecache-wait-for-head cannot be 'true': use on or off",
        ),
        ({**ON, "admission": "x"}, "--statecache-admission cannot be 'x': use engine or branch-"),
        ({**ON, "int8": True, "int8_slots": 0}, "--statecache-int8-slots cannot be '0'"),
        (
            {**ON, "int8_slots": 4},
            "--statecache-checkpoint-slots needs --statecache-checkpoints",
        ),
        ({"policy": "lru"}, "--statecache-policy needs --kv-cache-plugin statecache"),
        (
            {**ON, "block_policy": "x"},
            "--statecache-block-policy cannot be 'x': use reuse or stock",
        ),
        (
            {**ON, "block_policy": "gds"},
            "--statecache-block-policy cannot be 'gds': it lost to every other one in all that was"
            " measured (docs/tuning.md): use reuse or stock",
        ),
        ({**ON, "checkpoints": "x"}, "--statecache-checkpoints cannot be 'x': use native or int8"),
        ({**ON, "checkpoints": "native", "int8": True}, "exclude each other"),
        (
            {**ON, "checkpoints": "native", "checkpoint_slots": 0},
            "--statecache-checkpoint-slots cannot be '0'",
        ),
        (
            {**ON, "checkpoint_slots": 2},
            "-slots needs --statecache-checkpoints",
        ),
        ({**ON, "int8": True, "int8_slots": 1, "checkpoint_slots": 1}, "not both"),
        *(
            (
                {**ON, "int8": True, "checkpoint_memory": text},
                f"--statecache-checkpoint-memory cannot be '{text}': use device, host or host:SIZE",
            )
            for text in ("disk", "host:", "host:0", "host:many", "device:1GiB", "host:1XB", "")
        ),
        (
            {**ON, "checkpoint_memory": "host"},
            "--statecache-checkpoint-memory needs --statecache-checkpoints",
        ),
        (
            {**ON, "int8": True, "checkpoint_memory": "host:1GiB", "checkpoint_slots": 2},
            "--statecache-checkpoint-memory host:SIZE and --statecache-checkpoint-slots exclude",
        ),
        ({**ON, "checkpoint_interval": -1}, "--statecache-checkpoint-interval cannot be '-1'"),
        ({**ON, "int8": True, "verify": 1.5}, "--statecache-verify cannot be '1.5': use a number"),
        ({**ON, "int8": True, "verify": -0.1}, "--statecache-verify cannot be '-0.1'"),
        ({**ON, "int8": True, "verify": float("nan")}, "--statecache-verify cannot be 'nan'"),
        ({**ON, "int8": True, "verify": "some"}, "from 0 (none) to 1 (all)"),
        ({**ON, "int8": True, "verify": True}, "--statecache-verify cannot be 'True'"),
        ({**ON, "verify": 0.1}, "--statecache-verify needs --statecache-checkpoints"),
        ({**ON, "record": ""}, "--statecache-record cannot be '': name a file"),
        (
            {**ON, "record": "\udcacfile"},
            "--statecache-record cannot be '\\udcacfile': name a file in UTF-8",
        ),
        ({**ON, "record": "f", "record_mib": 0}, "--statecache-record-mib cannot be '0'"),
        ({**ON, "record_mib": 1}, "--statecache-record-mib needs --statecache-record"),
        ({**ON, "int8": "yes"}, "--statecache-int8 cannot be 'yes': use true or false"),
        ({**ON, "policy": 1}, "--statecache-policy cannot be '1': use a text"),
        (
            {**ON, "int8_slots": "8"},
            "--statecache-int8-slots cannot be '8': use a number of states from 1 to 1000000000",
        ),
        ({**ON, "record_mib": True}, "--statecache-record-mib cannot be 'True': use a number"),
        ({**ON, "policyy": "gds"}, "no setting 'statecache_policyy': statecache_policy is one"),
        ({**ON, "zzz": 1}, "there is no setting 'statecache_zzz'"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(SettingsError) as caught:
        Settings.from_given(given, {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", [10**9 + 1, 10**22, -1])
@pytest.mark.parametrize(
    "name", ["int8-slots", "checkpoint-slots", "checkpoint-interval", "record-mib"]
)
def test_a_number_that_cannot_be_is_refused_by_its_flag(name, number):
    flag = f"--statecache-{name}"
    given = parse("--kv-cache-plugin", "statecache", f"{flag}={number}")
    with pytest.raises(SettingsError, match=rf"^{flag} cannot be '{number}': use a number of "):
        Settings.from_given(given, {})


@pytest.mark.parametrize("text", ["abc", "", "1.5", "0x10", "9" * 5000])
@pytest.mark.parametrize(
    "name", ["int8-slots", "checkpoint-slots", "checkpoint-interval", "record-mib"]
)
def test_a_text_in_the_place_of_a_number_is_refused_without_a_usage(capsys, name, text):
    """By argparse it would be below the usage of an engine, hundreds of lines."""
    flag = f"--statecache-{name}"
    given = parse("--kv-cache-plugin", "statecache", f"{flag}={text}")
    with pytest.raises(SettingsError) as caught:
        Settings.from_given(given, {})
    assert str(caught.value).startswith(f"{flag} cannot be '{text}': use a number of ")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"STATECACHE_CONFIG": "{"}, "STATECACHE_CONFIG: Input data was truncated"),
        (
            {"STATECACHE_CONFIG": '{"pace":"gds"}'},
            "STATECACHE_CONFIG: Object contains unknown field `pace`",
        ),
        ({"STATECACHE_CONFIG": '{"policy":"\udcff"}'}, "STATECACHE_CONFIG: Invalid UTF-8"),
        ({"STATECACHE_CONFIG": "\ud800"}, "STATECACHE_CONFIG: 'utf-8' codec can't encode"),
        ({"STATECACHE_STRICT": "maybe"}, "STATECACHE_STRICT must be 0 or 1, not 'maybe'"),
    ],
)
def test_a_bad_environment_names_its_variable(environment, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        Settings.from_environment(environment)


def test_under_a_dry_run_nothing_that_changes_an_engine_is_in_force():
    given = {**ON, "policy": "lru", "checkpoints": "int8", "checkpoint_interval": 512}
    given["checkpoint_slots"] = 7
    settings = Settings.from_given(given, {})
    assert settings.in_force == settings
    dry = Settings.from_given({**given, "dry_run": True, "record": "file"}, {})
    in_force = dry.in_force
    assert (in_force.checkpoints, in_force.checkpoint_slots) == (None, None)
    assert (in_force.block_policy, in_force.checkpoint_interval) == ("stock", None)
    assert in_force.wait_for_head == "off"
    assert (in_force.record, in_force.dry_run) == ("file", True)
    assert (dry.checkpoint_slots, dry.checkpoints) == (7, "int8")
    assert dry.left_out == (
        "--statecache-checkpoints",
        "--statecache-checkpoint-slots",
        "--statecache-checkpoint-interval",
    )


def test_an_engine_takes_a_block_policy_of_the_replay_or_its_own():
    known = {*block_policy_names(), "stock"}
    assert set(ENGINE_BLOCK_POLICIES) <= known
