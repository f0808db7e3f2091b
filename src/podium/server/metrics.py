"""What the server counts, as Prometheus reads it."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from podium.server.served import Served

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    def __init__(self, served: Served, routes: frozenset[str]) -> None:
        self._routes, self._registry = routes, CollectorRegistry()
        self._requests = self._counter("requests", "Answered requests; 499: the client went away.", "route", "status")
        self.rollouts = self._counter("rollouts", "Rollouts written.")
        self.tokens = self._counter("tokens", "Tokens written.")
        self.reloads = self._counter("reloads", "New weights, taken or refused.", "result")
        self.seconds = Histogram(
            "podium_generate_seconds", "Whole /generate calls.", registry=self._registry, buckets=SECONDS
        )
        self._gauge("running", "Calls that the engine works on.").set_function(lambda: served.gate.running)
        self._gauge("waiting", "Calls that wait for the engine.").set_function(lambda: served.gate.waiting)
        self._gauge("policy_version", "Of the weights that are served.").set_function(lambda: served.version)

    def count(self, path: str, status: int) -> None:
        self._requests.labels(path if path in self._routes else "other", status).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, help_: str, *labels: str) -> Counter:
        return Counter(f"podium_{name}", help_, labels, registry=self._registry)

    def _gauge(self, name: str, help_: str) -> Gauge:
        return Gauge(f"podium_{name}", help_, registry=self._registry)
