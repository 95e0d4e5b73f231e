"""A file whose reader may have closed: a terminal that is closed while a process shuts down."""

import io


class LossyFile(io.FileIO):
    """Drops data that cannot be written."""

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Returns the number of bytes written or dropped."""
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)
