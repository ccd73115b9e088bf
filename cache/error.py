"""The root of every error that loadplan raises on purpose."""


class LoadplanError(Exception):
    """Something loadplan refuses or cannot do; the message says what, the numbers, and what to do next.

    Each subclass lives beside the code that raises it and is also the built-in error that it resembles.
    """
