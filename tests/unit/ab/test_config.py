"""docs/ab.md names the keys of arms, servers, workloads and plans, with their defaults."""

import re
from itertools import product
from pathlib import Path

import msgspec
import pytest

from statecache.ab.arms import Arm
from statecache.ab.config import check_keys
from statecache.ab.plans import Plan
from statecache.ab.server_arm import ServerArm, ServerSettings
from statecache.ab.workloads import Workload
from statecache.errors import SettingsError

PAGE = Path(__file__).parents[3] / "docs" / "ab.md"
TABLES = {
    "An arm of the replay or of a cache layer": Arm,
    "An arm that is a server": ServerArm,
    "How servers are asked": ServerSettings,
    "A workload": Workload,
}


def told(heading: str) -> dict[str, str]:
    """Return the keys of a table, and what it says is their default."""
    section = PAGE.read_text().partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", section, re.M))


def shown(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    return "-" if field.default is None else str(field.default).replace("e-05", "e-5")


@pytest.mark.parametrize("heading", TABLES)
def test_the_page_names_each_key_and_its_default(heading: str) -> None:
    fields = msgspec.structs.fields(TABLES[heading])
    assert {key: value.lower() for key, value in told(heading).items()} == {
        field.name: shown(field).lower() for field in fields
    }


def test_the_page_names_the_keys_of_a_plan() -> None:
    assert set(told("A plan")) == set(Plan.__struct_fields__)


def test_the_page_names_each_engine_policy_and_pool() -> None:
    from statecache.ab import arms

    text = PAGE.read_text()
    named = {*arms.arm_engines(), *arms.POOLS}
    for engine, pool in product(arms.arm_engines(), arms.POOLS):
        named |= {*arms.policies_of(engine, pool), *arms.admissions_of(engine, pool)}
    assert {name for name in named if f"`{name}`" not in text} == set()


def test_a_key_like_no_other_is_told_all_of_them() -> None:
    with pytest.raises(SettingsError, match="x: unknown key 'magic': use name, driver, url, comm"):
        check_keys(["magic"], ServerArm, "x")
    with pytest.raises(SettingsError, match=r"x: unknown key 'modl': use model$"):
        check_keys(["name", "modl"], ServerArm, "x")
