"""The one exception that users see: a sentence that says what to do, no traceback needed."""


class HandspanError(Exception):
    """A mistake of the user's, or of the world's, told in one sentence with its remedy."""


def nearest(name: str, known: list[str]) -> str:
    """Suggest the known names closest to a mistyped one: ``"; did you mean 'fedavg'?"``."""
    from difflib import get_close_matches

    if not known:
        return "; it has none"
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"
