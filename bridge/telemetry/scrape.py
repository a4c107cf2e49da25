"""Parses a role's /metrics page, for the status commands and the sandbox.

A module of its own, so that the roles do not load the parser.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """The samples of one scrape; raises ValueError if the text is not in Prometheus' format."""

    def __init__(self, text: str = "") -> None:
        try:
            families = list(text_string_to_metric_families(text))
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"no metrics: {type(error).__name__}") from None
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self.samples(name, **labels))

    def by(self, label: str, name: str, **labels: str) -> dict[str, int]:
        """Return the sums of the samples by the value of a label; leave out zeros."""
        totals: Counter[str] = Counter()
        for found, value in self.samples(name, **labels):
            totals[found[label]] += int(value)
        return {key: total for key, total in totals.items() if total}

    def samples(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Yield the labels and the value of each sample with this name and these labels."""
        for sample in self._samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample.labels, sample.value
