"""What ends training."""


class NonFiniteLossError(RuntimeError):
    """A loss is NaN or infinite. It is raised before the update, so that all parameters are still good."""
