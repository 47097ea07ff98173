"""The one exception that launch scripts turn into a sentence, and how such a sentence shows a value."""


class UserError(Exception):
    """A mistake that the user can mend; launch scripts print it as one sentence and exit with status 2."""


def shorten(value: object, limit: int = 80) -> str:
    """`repr(value)` in at most `limit` characters, cut in the middle, safe to print on any terminal."""
    text = ascii(value) if has_surrogate(repr(value)) else repr(value)
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def has_surrogate(value: str) -> bool:
    """Whether text holds half of a surrogate pair, which UTF-8 has no bytes for."""
    return any("\ud800" <= character <= "\udfff" for character in value) if not value.isascii() else False
