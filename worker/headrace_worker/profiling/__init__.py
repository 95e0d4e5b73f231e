"""Profiles of steps: a bounded window of this rank's steps as a Chrome trace, on request."""

from headrace_worker.profiling.errors import ProfileFailedError, ProfileFolderError, ProfileRefusedError
from headrace_worker.profiling.profiler import StepProfiler, Window, make_profiler
from headrace_worker.profiling.report import DEFAULT_SECONDS, DEFAULT_STEPS, Operator, ProfileReport

__all__ = [
    "DEFAULT_SECONDS",
    "DEFAULT_STEPS",
    "Operator",
    "ProfileFailedError",
    "ProfileFolderError",
    "ProfileRefusedError",
    "ProfileReport",
    "StepProfiler",
    "Window",
    "make_profiler",
]
