"""The base of every error that Headrace raises on purpose."""


class HeadraceError(Exception):
    """An error with a sentence on what is wrong and what the user can do; shown without a stack trace."""


class ModelSourceError(HeadraceError):
    """The MODEL argument names no model that can be loaded."""


class ModelUnsupportedError(HeadraceError):
    """The model was found, but this build cannot run it; the sentence names the feature."""


class ModelLoadError(HeadraceError):
    """Weights are missing, corrupt or do not fit the model's config."""


class MemoryTooSmallError(HeadraceError):
    """Weights and the smallest useful KV cache do not fit into the memory that is free."""


class DeviceError(HeadraceError):
    """The requested device or dtype is not available here."""


class ListenError(HeadraceError):
    """An address cannot be bound."""


class EngineDeadError(HeadraceError):
    """The step loop has ended; the replica cannot serve requests any more."""
