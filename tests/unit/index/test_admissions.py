"""The table of admissions: what each place offers, and names of before."""

import pytest

from statecache.engine.settings import ADMISSIONS as SERVER_ADMISSIONS
from statecache.index.admissions import (
    ADMISSIONS,
    POOL,
    SERVER,
    SLOTS,
    admission_names,
    admission_summaries,
    current_admission,
    find_admission,
)


def test_names_are_given_once() -> None:
    names = [name for spec in ADMISSIONS for name in (spec.name, *spec.old_names)]
    assert len(names) == len(set(names))


def test_a_server_takes_what_the_table_says() -> None:
    assert set(SERVER_ADMISSIONS) == set(admission_names(SERVER))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("junctions", "branch-points"),
        ("ends+fork", "branch-points"),
        ("dense+junctions", "dense+branch-points"),
        ("dense", "dense"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_name_of_before_is_known(old: str, new: str) -> None:
    assert current_admission(old) == new


def test_what_a_place_does_not_offer_is_refused_with_what_it_does() -> None:
    assert find_admission("junctions", POOL).name == "branch-points"
    with pytest.raises(ValueError, match="'junctions': use dense, ends, aligned"):
        find_admission("junctions", SLOTS)


@pytest.mark.parametrize("place", [SLOTS, POOL, SERVER])
def test_the_help_of_a_place_has_each_admission(place: str) -> None:
    parts = admission_summaries(place).split("; ")
    assert [part.partition(":")[0] for part in parts] == list(admission_names(place))
