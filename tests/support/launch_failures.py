"""Copies whose launches fail, as those of a build without code for the GPU do."""

from dataclasses import replace

from statecache.checkpoint.ops import native_ops

LAUNCH_ERRORS = [
    "no kernel image is available for execution on the device",
    "CUDA driver version is insufficient for CUDA runtime version",
    "invalid argument",
]


def failing(error, *names, ops=None, after=0):
    """Copies of which those in `names` raise, from the call number `after` of all of them on."""
    ops = ops or native_ops()
    calls = []

    def fail(call):
        def made(*arguments):
            calls.append(call)
            if len(calls) > after:
                raise RuntimeError(error)
            return call(*arguments)

        return made

    return replace(ops, **{name: fail(getattr(ops, name)) for name in names})


def launch_error(reason):
    """As torch says it: a second line tells where in C++."""
    return f"statecache: launch failed: {reason}\nException raised from operator() at x.cpp:1"
