"""Import-only."""

from torchvision.transforms import InterpolationMode, __getattr__  # noqa: F401
