"""What environment variables say."""

_YES = ("1", "ON", "YES", "TRUE")  # as transformers and huggingface_hub read theirs


def says_yes(value: str) -> bool:
    """Whether the value of a variable means yes."""
    return value.upper() in _YES
