"""How far an operation on files is."""


class Progress:
    """Shows nothing; what shows something overrides its methods."""

    def begin(self, num_bytes: int) -> None:
        """The operation will read and write this many bytes of data in all."""

    def advance(self, what: str, num_bytes: int) -> None:
        """It has read or written so many more, of the tensor `what`."""
