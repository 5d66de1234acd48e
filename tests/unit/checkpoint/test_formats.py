"""The table of checkpoint formats: bytes worked by hand, and nothing that loads torch."""

import subprocess
import sys

import pytest
import torch

from statecache.checkpoint import reference
from statecache.checkpoint.formats import DTYPE_BYTES, FORMATS, format_named


def test_bytes_of_a_layer_worked_by_hand() -> None:
    shape = (2, 16, 8)  # 256 values, 16 channels
    assert FORMATS["native"].bytes_per_layer(shape, "float32") == 1024
    assert FORMATS["native"].bytes_per_layer(shape, "bfloat16") == 512
    assert FORMATS["int8"].bytes_per_layer(shape, "float32") == 256 + 16 * 4
    assert FORMATS["int8"].bytes_per_layer(shape, "float16") == 256 + 16 * 4
    assert FORMATS["int8"].bytes_per_layer(shape, "bfloat16") == 256 + 16 * 2


def test_the_scales_are_of_the_type_that_the_plain_copies_make() -> None:
    for name in ("float32", "float16", "bfloat16"):
        dtype = getattr(torch, name)
        scale = FORMATS["int8"].parts((1, 8, 8), name)[1]
        assert getattr(torch, scale.dtype) == reference.scale_dtype(dtype)
        assert DTYPE_BYTES[name] == dtype.itemsize


def test_a_name_that_is_none_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="unknown checkpoint format 'int4': use native or int8"):
        format_named("int4")


def test_the_table_is_read_without_torch() -> None:
    script = "import sys, statecache.checkpoint.formats; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
