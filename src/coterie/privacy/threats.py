"""Who watches what, by unit: the threat models of all algorithms here, in simulations and at sites alike."""

from coterie.privacy.units import ThreatModel, Unit

MASTERS = "the group masters"
SERVER = ThreatModel(observers="the server", sees="all updates and selections")
"""Against whom a plan for one client speaks, when nothing is known about others."""

_OTHERS = ThreatModel(
    observers="the server and all other clients", sees="every release of every round", trusted="nobody"
)
THREATS: dict[Unit, ThreatModel] = {
    Unit.RECORD: _OTHERS,
    Unit.PERSON: _OTHERS,
    Unit.CLIENT: ThreatModel(
        observers="whoever sees the models", sees="every model of every round", trusted="the server"
    ),
    Unit.WORKER: ThreatModel(
        observers="the other workers", sees="every model of their own groups", trusted=MASTERS
    ),
}
