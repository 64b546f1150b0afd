"""Between sites: each keeps its persons whole, says how many there are, and signs for persons alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_federation import MemoryFederation
from test_parity import state_arrays
from tiny_site import LIMITS, contract, deliver, site

from coterie.audit.declared import audited_contract
from coterie.engines.flower import messages
from coterie.engines.flower.contract import Limits, promised
from coterie.engines.flower.joining import Joining, open_site
from coterie.engines.flower.messages import SiteFacts
from coterie.errors import InputError
from coterie.experiment import local
from coterie.experiment.folder import RunFolder
from coterie.experiment.proposing import NOT_COMPARED, calibrate_sites, contracts_of
from coterie.experiment.schema import Experiment
from coterie.experiment.sites import Sites
from coterie.experiment.verify import verify
from coterie.files import write_json
from coterie.privacy import Budget, HeldOut, PersonBounds, Unit

DECLARED = """
task: classification
label: {column: ill, classes: 2}
person: patient
features: [{column: age, range: [0, 90]}]
"""
NAMES = ("east", "north", "south", "west")


def wards(folder: Path) -> dict[str, Path]:
    """A folder for each of four sites, and one with all of them (`together`)."""
    rng = np.random.default_rng(3)
    folders = {name: folder / name for name in (*NAMES, "together")}
    for path in folders.values():
        path.mkdir(parents=True)
        (path / "federation.yaml").write_text(DECLARED)
    for name in NAMES:
        rows = ["patient,age,ill"]
        for patient in range(30):
            for _ in range(rng.integers(1, 6)):
                age = rng.integers(90)
                rows.append(f"{name} {patient},{age},{int(age + 20 * rng.normal() > 45)}")
        for path in (folders[name], folders["together"]):
            (path / f"{name}.csv").write_text("\n".join(rows) + "\n")
    return folders


def experiment(folder: Path, **changes: Any) -> Experiment:
    sections: dict[str, Any] = {
        "data": {"name": "folder", "path": str(folder)},
        "federation": {"kind": "natural"},
        "privacy": {"unit": "person", "records_per_person": 3, "epsilon": 8, "delta": 1e-3},
        "algorithm": {"name": "r-dpcfl", "clusters": 2},
        "schedule": {"rounds": 4, "batch": 8},
        "seeds": {"noise": 5},
    }
    for name, keys in changes.items():
        sections[name] = {**sections.get(name, {}), **keys}
    return Experiment.model_validate(sections)


def test_served_persons_reach_the_state_of_a_simulation_bit_for_bit(tmp_path: Path) -> None:
    chosen = experiment(wards(tmp_path / "data")["together"])
    limits = Limits(Budget(8.0, 1e-3), reported=HeldOut(0, 1.0, 1))
    federation = MemoryFederation(chosen, tmp_path / "sites", limits)
    alone = local.run(chosen, tmp_path / "alone")
    served = federation.serve(tmp_path / "served")
    expected, found = (state_arrays(chosen, tmp_path / out) for out in ("alone", "served"))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    ledgers = [RunFolder(tmp_path / out).ledger.read_bytes() for out in ("alone", "served")]
    assert ledgers[0] == ledgers[1]
    assert served.accuracy == alone.accuracy  # private scores of held-out persons, with the same noise
    assert "one person's records at any of 4 clients" in served.guarantee
    assert NOT_COMPARED.split(" (")[0] in str(served.guarantee_text).lower()
    assert verify(tmp_path / "served").verdict == "holds"
    assert all(each.finished for each in federation.sites.values())
    federation.close()


def test_a_site_keeps_its_persons_as_a_simulation_of_all_would(tmp_path: Path) -> None:
    folders = wards(tmp_path)
    everyone = local.load_federation(experiment(folders["together"]))
    for place, client in enumerate(everyone.clients):
        joining = Joining(folders[client.name], 8.0, held_out=0.2, split=(0, place), records_per_person=3)
        opened = open_site(joining)
        [own] = opened.alone.clients
        for part in ("train", "test"):
            for name, array in getattr(client, part).arrays.items():
                np.testing.assert_array_equal(getattr(own, part).arrays[name], array)
        facts = SiteFacts.from_content(deliver(opened, messages.FACTS, messages.pack({})))
        assert (facts.records, facts.held_out, facts.records_per_person) == (24, 6, 3)
        assert opened.limits.budget.delta == pytest.approx(0.2 / 30)


def test_what_an_operator_says_of_persons_must_be_possible(tmp_path: Path) -> None:
    folders = wards(tmp_path)
    with pytest.raises(InputError, match=r"--trust-server: .*one of them"):
        Joining(folders["east"], 8.0, delta=1e-3, trust_server=True, records_per_person=3)
    with pytest.raises(InputError, match=r"--records-per-person: 0"):
        Joining(folders["east"], 8.0, records_per_person=0)
    declared = folders["east"] / "federation.yaml"
    declared.write_text(declared.read_text().replace("person: patient\n", ""))
    with pytest.raises(InputError, match=r"--records-per-person: 3; .* does not say whose each record is"):
        open_site(Joining(folders["east"], 8.0, records_per_person=3))


def offered(folder: Path, most: int | None, bounds: PersonBounds | None) -> str | None:
    """How a site that counts so answers a contract with these bounds."""
    plan = replace(contract().plan, unit=Unit.RECORD if bounds is None else Unit.PERSON, persons=bounds)
    made = site(folder, LIMITS)
    made.alone = replace(made.alone, records_per_person=most)
    answer = messages.is_refusal(deliver(made, messages.OFFER, contract(plan=plan).to_content()))
    made.close()
    return answer


def test_a_site_signs_for_what_its_operator_counts_and_for_nothing_else(tmp_path: Path) -> None:
    for number, (most, bounds) in enumerate(
        [(None, PersonBounds(1)), (None, PersonBounds(3)), (1, None), (1, PersonBounds(2)), (3, None)]
    ):
        assert offered(tmp_path / str(number), most, bounds) == "other data", (most, bounds)
    assert offered(tmp_path / "record", None, None) is None
    assert offered(tmp_path / "person", 1, PersonBounds(1, 5)) is None


def test_a_site_promises_for_its_own_records_whatever_is_declared_of_others() -> None:
    plan = replace(contract().plan, unit=Unit.PERSON, persons=PersonBounds(2, 2))
    promise = promised(contract(plan=plan), [])
    assert promise.epsilon_across_clients is None
    assert "whoever is at several pays at each of them" in promise.text
    assert promise.protected == "one person's records at a"


def test_a_server_asks_all_sites_to_count_alike_and_as_its_file_does(tmp_path: Path) -> None:
    folder = wards(tmp_path / "data")["together"]
    task = local.load_federation(experiment(folder)).task
    counts = dict.fromkeys(NAMES, 24)
    for most, unit, said in (
        (None, {}, r"privacy.unit: person; every site counts records"),
        (5, {}, r"privacy.records_per_person: 3; every site counts persons, up to 5 records"),
        (3, {"unit": "record", "records_per_person": 4}, r"privacy.unit: record; every site counts persons"),
    ):
        sites = Sites("x", task, counts, dict.fromkeys(NAMES, 0), {}, False, most)
        with pytest.raises(InputError, match=said):
            calibrate_sites(experiment(folder, privacy=unit), sites, None)
    sites = Sites("x", task, counts, dict.fromkeys(NAMES, 0), {}, False, 3)
    several = experiment(folder, privacy={"clients_per_person": 3})
    promise = calibrate_sites(several, sites, None).guarantee
    assert promise.epsilon_across_clients is not None
    assert NOT_COMPARED in promise.caveats
    assert Sites.from_json(sites.to_json()) == sites
    assert "records_per_person" not in replace(sites, records_per_person=None).to_json()


def test_a_contract_for_persons_is_audited_against_as_many_of_them(tmp_path: Path) -> None:
    folders = wards(tmp_path / "data")
    chosen = experiment(folders["together"])
    counts = dict.fromkeys(NAMES, 30)
    sites = Sites("x", local.load_federation(chosen).task, counts, dict.fromkeys(NAMES, 0), {}, False, 3)
    agreed = contracts_of(calibrate_sites(chosen, sites, None), sites)["east"]
    write_json(tmp_path / "contract.json", {"contract": agreed.to_json()})
    audited, _ = audited_contract(folders["east"], tmp_path / "contract.json", ())
    assert audited.plan.persons == PersonBounds(3)
    declared = folders["east"] / "federation.yaml"
    declared.write_text(declared.read_text().replace("person: patient\n", ""))
    with pytest.raises(InputError, match="is about 30 persons; --data has 0"):
        audited_contract(folders["east"], tmp_path / "contract.json", ())
