"""Errors of profiling."""

from headrace_proto.errors import HeadraceError


class ProfileRefusedError(HeadraceError):
    """A profile was requested that cannot be made now."""


class ProfileFailedError(HeadraceError):
    """A profile was begun, and failed. The steps that it should have recorded are not affected."""


class ProfileFolderError(HeadraceError):
    """The folder for profiles cannot be written."""
