"""A whole federation in memory: real sites with real ledgers, a real algorithm, no network."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memory_grid import MemoryGrid

from coterie.data import Federation
from coterie.engines.flower.contract import Limits
from coterie.engines.flower.site import Site
from coterie.engines.flower.transport import Timeouts, Transport
from coterie.experiment.callbacks import Callbacks
from coterie.experiment.folder import RunFolder
from coterie.experiment.local import load_federation, truth_of
from coterie.experiment.result import RunResult
from coterie.experiment.schema import Experiment
from coterie.experiment.served_run import ServedRun
from coterie.privacy import Budget

BASE: dict[str, Any] = {
    "federation": {"kind": "clusters", "sizes": [2, 2], "shift": "rotation", "records_per_client": 60},
    "schedule": {"rounds": 5, "batch": 20},
    "privacy": {"epsilon": 8, "delta": 1e-3},
    "seeds": {"simulation": 3, "noise": 5},
    "evaluation": {"every": 5, "references": False},
}
LIMITS = Limits(Budget(8.0, 1e-3))
QUICK = Timeouts(answer=60.0, rejoin=0.0, poll=0.001)


def one_client(name: str, federation: Federation) -> Federation:
    """A client of a federation, alone."""
    [client] = [client for client in federation.clients if client.name == name]
    return Federation((client,), federation.task, records_per_person=federation.records_per_person)


def experiment(**sections: Any) -> Experiment:
    return Experiment.model_validate({**BASE, **sections})


@dataclass
class MemoryFederation:
    """Sites of an experiment's own federation, in folders of their own."""

    experiment: Experiment
    folder: Path
    limits: Limits = LIMITS
    noise_seed: int | None = 5
    sites: dict[str, Site] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.federation = load_federation(self.experiment)
        for client in self.federation.clients:
            self.start(client.name)
        self.nodes = {name: number for number, name in enumerate(self.sites, start=100)}
        self.grid = MemoryGrid({node: self._handler(name) for name, node in self.nodes.items()})

    def start(self, name: str) -> Site:
        """Start a site, or start it again from what is on its disk."""
        if name in self.sites:
            self.sites[name].close()
        self.sites[name] = Site(
            one_client(name, self.federation),
            self.folder / name,
            self.limits,
            noise_seed=self.noise_seed,
        )
        return self.sites[name]

    def _handler(self, name: str) -> Any:
        return lambda message: self.sites[name].handle(message)

    def serve(self, out: Path, *, callbacks: Callbacks | None = None) -> RunResult:
        transport = Transport(self.grid, self.nodes, QUICK)
        truth = truth_of(self.federation)
        files = RunFolder(out)
        return ServedRun(self.experiment, files, transport, truth=truth, callbacks=callbacks).finish()

    def close(self) -> None:
        for site in self.sites.values():
            site.close()
