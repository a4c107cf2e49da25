"""Which known name an unknown one is a misspelling of."""

import difflib
from collections.abc import Iterable
from typing import Final

from bridge.config.fields import MAX_NAME_BYTES

# How similar, from 0 to 1, an unknown name must be to a known one to be taken for a misspelling.
_LIKENESS: Final = 0.6


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Write the end of a fault that names the nearest of `names`; nothing when none is near."""
    found = nearest(name, names)
    return "" if found is None else f"; did you mean {prefix}{found}?"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` (lower case) that is most similar to a name; None if none is."""
    wanted = name[:MAX_NAME_BYTES].lower()
    found = difflib.get_close_matches(wanted, list(names), n=1, cutoff=_LIKENESS)
    return found[0] if found else None
