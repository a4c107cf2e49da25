"""One reading of a role's /metrics, by those who ask a process from outside."""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """The samples of one reading; raises ValueError for what is not Prometheus' text format."""

    def __init__(self, text: str = "") -> None:
        try:
            families = list(text_string_to_metric_families(text))
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"no metrics: {type(error).__name__}") from None
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Add up the samples of a name that have these labels."""
        return sum(value for _, value in self.samples(name, **labels))

    def by(self, label: str, name: str, **labels: str) -> dict[str, int]:
        """Add up the samples of a name for each value of a label; leave out the zeros."""
        totals: Counter[str] = Counter()
        for found, value in self.samples(name, **labels):
            totals[found[label]] += int(value)
        return {key: total for key, total in totals.items() if total}

    def buckets(self, name: str, **labels: str) -> list[tuple[float, float]]:
        """Return a histogram as its upper bounds, ascending, and the counts up to each."""
        counts: Counter[float] = Counter()
        for found, value in self.samples(f"{name}_bucket", **labels):
            counts[float(found["le"])] += int(value)
        return sorted(counts.items())

    def samples(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Yield the labels and the value of each sample of a name that has these labels."""
        for sample in self._samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                yield sample.labels, sample.value
