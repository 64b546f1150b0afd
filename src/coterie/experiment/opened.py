"""A run folder in the hands of the process that works in it: written, or checked and gone on with."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from coterie.algorithms.protocol import State
from coterie.engines.secret import RunSecret
from coterie.errors import InputError
from coterie.experiment import checkpoint, folder
from coterie.experiment.calibrated import CalibratedRun
from coterie.experiment.checkpoint import Checkpoint, Personal
from coterie.experiment.experiment_file import to_yaml
from coterie.experiment.folder import RunFolder
from coterie.experiment.recorded import check_folder
from coterie.experiment.seal import DROPPED, METRICS, ChainedLines, Seal
from coterie.files import Json, read_json, write_json, write_text
from coterie.privacy import Guarantee, Ledger, SecretKey


@dataclass(frozen=True)
class OpenRunFolder:
    """A folder whose ledger is open and locked.

    Args:
        state: what the run goes on from.
        personal: what clients have kept to themselves so far.
        guarantee: with everything that must be said from now on.
        secret: None where the noise keys are those of sites.
    """

    files: RunFolder
    ledger: Ledger
    seal: Seal
    metrics: ChainedLines
    state: State
    personal: Personal
    guarantee: Guarantee
    secret: RunSecret | None

    @property
    def key(self) -> SecretKey:
        """The noise key of a run that has one here."""
        assert self.secret is not None
        return self.secret.key

    def save(self, state: State, personal: Personal) -> None:
        """Keep what the rounds so far have led to."""
        heads = {"ledger": self.ledger.head, "metrics": self.metrics.head, "seal": self.seal.lines.head}
        checkpoint.save(self.files.checkpoint, Checkpoint(state, heads, personal))

    def finish(self, result: Json) -> None:
        """Write the result, sealed with all that it tells of; then nobody needs the noise key any more."""
        heads = {"ledger": self.ledger.head.to_json(), "metrics": self.metrics.head.to_json()}
        if (saved := checkpoint.stored(self.files.checkpoint)) is not None:
            heads["checkpoint"] = {"digest": saved.digest}
        self.seal.write_json(self.files.result, result, **heads)
        self.files.secret.unlink(missing_ok=True)


def drop_models(files: RunFolder) -> None:
    """Remove the models of a finished run, on purpose: that they are gone is sealed before they go."""
    if not files.checkpoint.exists():
        return
    seal = Seal(files.path)
    if not seal.models_dropped:
        seal.lines.append({DROPPED: files.checkpoint.name})
    for saved in files.checkpoint.glob("round-*"):
        saved.rename(saved.with_name(f".{saved.name}"))  # a crash leaves a whole checkpoint, or none
    shutil.rmtree(files.checkpoint)


@contextmanager
def open_folder(
    files: RunFolder, calibrated: CalibratedRun, data: str | None, sites: Json | None = None
) -> Iterator[OpenRunFolder]:
    """Write down what will be run, or check that it is what was being run, and open the ledger.

    Args:
        data: what the noise key of this run is for; None where noise keys are those of sites.
        sites: public facts of the sites, where clients are sites.
    """
    if files.exists:
        secret = _check(files, calibrated, data)
    else:
        secret = create_folder(files, calibrated, data, sites)
    saved = checkpoint.load(files.checkpoint, calibrated.algorithm.state_type)
    state = saved.state if saved else calibrated.start()
    with Ledger.open(
        files.ledger,
        calibrated.plan,
        budget=calibrated.budgets,
        accountant=calibrated.accountant,
        anchor=saved.heads["ledger"] if saved else Seal(files.path).ledger(),
    ) as ledger:
        # Only now: the ledger's lock says that no other process works in this folder.
        seal = Seal(files.path)
        seal.settle()
        seal.keep_ledger(ledger.head)
        said = _keep_caveats(files, seal, calibrated.guarantee)
        metrics = _metrics_of(files, state.round)
        folder.keep_rounds(files.timing, state.round)
        personal = saved.personal if saved else {}
        yield OpenRunFolder(files, ledger, seal, metrics, state, personal, said, secret)


def create_folder(
    files: RunFolder, calibrated: CalibratedRun, data: str | None, sites: Json | None
) -> RunSecret | None:
    """Write down what will be run, before anything is charged."""
    secret, key = None, None
    if data is not None:
        seed = calibrated.experiment.seeds.noise
        key = SecretKey.from_os() if seed is None else SecretKey.from_seed(seed)
        secret = RunSecret(key, data, calibrated.plan.digest())
    with folder.new_folder(files.path) as scratch:
        new = RunFolder(scratch)
        if secret is not None:
            secret.save(new.secret)
        facts = calibrated.population.facts(calibrated.facts.parameters)
        contents = {
            new.sites: sites,
            new.federation: facts,
            new.plan: calibrated.plan.to_json(),
            new.guarantee: calibrated.guarantee.to_json(),
            new.leakage: calibrated.leakage_facts(),
        }
        for path, content in contents.items():
            if content is not None:
                write_json(path, content)
        write_text(new.experiment, to_yaml(calibrated.experiment))
        Seal.create(scratch, key=None if key is None else key.fingerprint)
    return secret


def _check(files: RunFolder, calibrated: CalibratedRun, data: str | None) -> RunSecret | None:
    secret = None
    if data is not None:
        secret = RunSecret.load(files.secret, Seal(files.path).key)
        if secret.data != data:
            raise InputError(
                f"{files.path}: the data changed since this run began, or its noise key belongs to another "
                "run; start a new run"
            )
        seeded = calibrated.experiment.seeds.noise is not None
        if (secret.plan, secret.key.simulation) != (calibrated.plan.digest(), seeded):
            raise InputError(f"{files.path}: the plan changed since this run began; start a new run")
    check_folder(files)
    return secret


def _keep_caveats(files: RunFolder, seal: Seal, promised: Guarantee) -> Guarantee:
    """What was true of the rounds so far (noise of a GPU, say) stays said, wherever the run goes on."""
    stored = Guarantee.from_json(read_json(files.guarantee)).caveats
    both = replace(promised, caveats=tuple(dict.fromkeys((*stored, *promised.caveats))))
    if both.caveats != stored:
        seal.write_json(files.guarantee, both.to_json())
    return both


def _metrics_of(files: RunFolder, rounds: int) -> ChainedLines:
    """The metrics of so many rounds, to be gone on with: later ones will run again."""
    lines = ChainedLines(files.metrics, METRICS)
    try:
        lines.cut(sum(int(body["round"]) <= rounds for body in lines.bodies))
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{files.metrics}: a line without the number of its round") from None
    return lines
