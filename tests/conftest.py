"""Fixtures that every folder may use."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A test fails by what it finds, not by how busy the machine is.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without a GPU, Triton kernels run in the interpreter; it must be chosen before Triton is first imported.
if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def smollm2():
    """The ``ModelSource`` of the built-in model: from the user's cache, or fetched (93 MB, once)."""
    from transect.models.resolve import resolve

    return resolve("smollm2-135m")
