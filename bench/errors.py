"""What a bench raises when it cannot measure, or when what it measured is not what it should be."""


class BenchError(Exception):
    """There is no result: the text says why."""
