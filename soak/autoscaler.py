"""KEDA and the HorizontalPodAutoscaler that it makes, played from the chart's ScaledObject.

What they ask RabbitMQ is in KEDA's `rabbitmq_scaler.go`; how KEDA goes from none to one and back
is in "Scaling Deployments" of its documentation, how the autoscaler decides in between is in
"Horizontal Pod Autoscaling" of Kubernetes'.
"""

import math
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote_plus

# The autoscaler leaves the number alone while the measure is this near its target.
TOLERANCE: Final = 0.1


class Autoscaler:
    """Decides how many workers there are to be.

    It knows one trigger, on the length of a queue, and scaling down by a number of pods. Scaling
    up has no limit but the most: Kubernetes' default allows four pods at once.
    """

    def __init__(self, scaled_object: Mapping[str, Any]) -> None:
        spec = scaled_object["spec"]
        (trigger,) = spec["triggers"]
        scale_down = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        (policy,) = scale_down["policies"]
        assert (trigger["metricType"], policy["type"]) == ("AverageValue", "Pods")
        self.polling_seconds: int = spec["pollingInterval"]
        self._fewest: int = spec["minReplicaCount"]
        self._most: int = spec["maxReplicaCount"]
        self._cooldown_seconds: int = spec["cooldownPeriod"]
        self._window_seconds: int = scale_down["stabilizationWindowSeconds"]
        self._step: int = policy["value"]
        self._step_seconds: int = policy["periodSeconds"]
        self._trigger: Mapping[str, str] = trigger["metadata"]
        self._active_at = -math.inf
        self._wanted: list[tuple[float, int]] = []
        self._removed: list[tuple[float, int]] = []

    @property
    def url(self) -> str:
        """Where it asks the management API for the length."""
        host = self._trigger["host"]
        # What follows the last slash counts as the virtual host, which is given apart.
        base = host.rpartition("/")[0] if "/" in host.partition("://")[2] else host
        queues = f"{base}/api/queues/{quote_plus(self._trigger['vhostName'])}"
        name = quote_plus(self._trigger["queueName"])
        if not self._matches:
            return f"{queues}/{name}"
        asked = f"page=1&use_regex=true&pagination=false&name={name}&page_size=100"
        return f"{queues}?{asked}"

    def read(self, answer: Mapping[str, Any]) -> int:
        """Return the length that an answer to `url` tells; what the broker does not tell is 0."""
        queues = answer["items"] if self._matches else [answer]
        is_ready_only = self._trigger["excludeUnacknowledged"] == "true"
        key = "messages_ready" if is_ready_only else "messages"
        return sum(queue.get(key) or 0 for queue in queues)

    def decide(self, messages: int, replicas: int, now: float) -> int:
        """Return how many workers there are to be; `now` is in seconds and never goes back."""
        is_active = messages > float(self._trigger["activationValue"])
        if is_active:
            self._active_at = now
        if not replicas:
            return max(self._fewest, 1 if is_active else 0)
        has_cooled = now - self._active_at > self._cooldown_seconds
        if not self._fewest and not is_active and has_cooled:
            # Whatever the autoscaler may remove at a time.
            return 0
        return self._decide_from_one_on(messages, replicas, now)

    @property
    def _matches(self) -> bool:
        return self._trigger.get("useRegex") == "true"

    def _decide_from_one_on(self, messages: int, replicas: int, now: float) -> int:
        for_each = float(self._trigger["value"])
        is_near = abs(messages / (for_each * replicas) - 1) <= TOLERANCE
        wanted = replicas if is_near else math.ceil(messages / for_each)
        wanted = min(max(wanted, self._fewest, 1), self._most)
        self._wanted.append((now, wanted))
        if wanted >= replicas:
            return wanted
        recent = max(n for at, n in self._wanted if at >= now - self._window_seconds)
        removed = sum(n for at, n in self._removed if at > now - self._step_seconds)
        least = replicas - max(0, self._step - removed)
        decided = min(replicas, max(recent, least))
        if decided < replicas:
            self._removed.append((now, replicas - decided))
        return decided
