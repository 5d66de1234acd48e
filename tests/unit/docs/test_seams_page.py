"""docs/seams.md is what the adapters' tables say, and every change of an engine has its reason."""

from pathlib import Path

import pytest

from seams_page import seams_page
from statecache.engine.spec import engines

ROOT = Path(__file__).parents[3]


def test_the_page_is_current() -> None:
    written = (ROOT / "docs" / "seams.md").read_text()
    assert written == seams_page(), "run: python tests/seams_page.py > docs/seams.md"


@pytest.mark.parametrize("engine", engines())
def test_every_change_says_why_and_when_it_can_go_and_is_there_once(engine: str) -> None:
    spec = engines()[engine]
    assert spec.patches
    patches = (*spec.patches, *spec.hooks)
    for patch in patches:
        assert patch.why, patch.target
        assert patch.upstream, patch.target
        assert patch.remove_when, patch.target
    targets = [patch.target for patch in patches]
    assert len({*targets}) == len(targets)


@pytest.mark.parametrize("engine", engines())
def test_every_patch_is_a_seam_that_is_probed(engine: str) -> None:
    """Or an attribute of a view, where it is one object's."""
    spec = engines()[engine]
    known = {seam.target for seam in spec.seams}
    known |= {f"{view.target}.{name}" for view in spec.views for name in _members(view.protocol)}
    assert {patch.target for patch in spec.patches} <= known


def _members(protocol: type) -> list[str]:
    from statecache.engine.views import members_of

    return members_of(protocol)
