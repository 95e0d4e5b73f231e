"""Why there is no profile."""

from headrace_proto.errors import HeadraceError


class ProfileRefusedError(HeadraceError):
    """A profile was asked for where none can be made now."""


class ProfileFailedError(HeadraceError):
    """A profile was begun, and came to nothing. The steps that it should have recorded are not touched by that."""


class ProfileFolderError(HeadraceError):
    """The folder for profiles cannot be written."""
