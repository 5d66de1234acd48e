"""Settings of cmake-format."""

with section("format"):  # noqa: F821
    line_width = 100
