"""Import-only: text models never call it."""

__version__ = "0.0.0"


def disable_beta_transforms_warning():
    pass
