"""Keeps the torch operators that run, so that a test can count launches and uploads."""

from torch.utils._python_dispatch import TorchDispatchMode

from statecache.checkpoint import launches

# Make a view of what is there, on the host alone.
_VIEWS = {"aten::detach", "aten::lift_fresh", "aten::split_with_sizes", "aten::view", "aten::slice"}


class Operators(TorchDispatchMode):
    """The names of the operators that run within, without views: `seen`."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        if name not in _VIEWS:
            self.seen.append(name.removeprefix("statecache::checkpoint_"))
        return func(*args, **(kwargs or {}))


def count_uploads(monkeypatch):
    """Return the list of what pools will upload: how many lists of slots, and how many zeros."""
    made = []
    upload = launches.upload

    def counted(lists, zeros, device):
        made.append((len(lists), zeros))
        return upload(lists, zeros, device)

    monkeypatch.setattr(launches, "upload", counted)
    return made
