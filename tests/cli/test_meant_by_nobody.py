"""Numbers and names that nobody means are refused at once, in one line that names where they stand."""

from pathlib import Path

import pytest
from command import coterie

HUGE = "99999999999999999999"
RING = ["leakage", "--structure", "ring", "--groups", "4", "--rate", "0.5", "--noise", "2", "--delta", "1e-5"]
PAIR = [*RING, "--workers", "20", "--epochs", "10", "--target-pair", "0,1"]
LABEL = [*RING[:2], "label", *RING[3:]]
SAMPLE = ["plan", "sample", "--records", "100", "--batch", "10", "--rounds", "3", "--delta", "1e-5"]
CLIENT = ["plan", "client", "--clients", "100", "--rate", "0.1", "--rounds", "3", "--delta", "1e-5"]


def plan(*changes: str) -> list[str]:
    return ["plan", *(part for change in changes for part in ("--set", change))]


def client(name: str, *changes: str) -> list[str]:
    return plan("privacy.unit=client", f"algorithm.name={name}", *changes)


REFUSED = {
    "privacy.mode": client("dp-fedavg", "privacy.mode=paper"),
    "privacy.mode: paper": client("gmfsc", "privacy.mode=paper"),
    "privacy.epsilon: 1e-12": plan("privacy.epsilon=1.0e-12"),
    "privacy.epsilon: 5e-324": plan("algorithm.name=global", "privacy.epsilon=5.0e-324"),
    "privacy.epsilon: 1e+300": plan("algorithm.name=global", "privacy.epsilon=1.0e+300"),
    "privacy.epsilon: nan": plan("algorithm.name=global", "privacy.epsilon=.nan"),
    "privacy.budgets.a.epsilon": plan("privacy.budgets={a: {epsilon: 5.0e-324}}"),
    "evaluation.epsilon: inf": plan("evaluation={kind: private, epsilon: .inf}"),
    "algorithm.clusters": client("dp-ifca", f"algorithm.clusters={HUGE}"),
    "algorithm.period": plan("privacy.unit=worker", "algorithm.name=dp-ogl", f"algorithm.period={HUGE}"),
    "evaluation.every": plan(f"evaluation.every={HUGE}"),
    "federation.clients": plan("federation={kind: dirichlet, clients: 1000000000000, alpha: 1}"),
    "federation.alpha": plan("federation={kind: dirichlet, clients: 3, alpha: 1.0e+308}"),
    "federation.sizes": plan("federation.sizes=[1000000000000]"),
    "data.size": plan("data.name=glyphs", "data.size=1000000000000"),
    "--epsilon: 1e-12": [*SAMPLE, "--epsilon", "1e-12"],
    "--epsilon: 1e-308": [*CLIENT, "--epsilon", "1e-308"],
    "--epsilon: nan": [*SAMPLE, "--epsilon", "nan"],
    "noise_multiplier: 1e+308": [*SAMPLE, "--noise", "1e308"],
    "--epsilon: 5e-324": [*PAIR, "--epsilon", "5e-324"],
    "period": [*PAIR, "--period", HUGE],
    "epochs": [*RING, "--workers", "20", "--epochs", HUGE],
    "--workers": [*RING, "--workers", HUGE, "--epochs", "3"],
    "--workers: 9999999": [*RING, "--workers", "9999999", "--epochs", "3"],
    "--workers: 999999999": [*LABEL, "--workers", "999999999", "--epochs", "3"],
    "--groups": [*LABEL[:3], "--groups", HUGE, *LABEL[5:], "--workers", "20", "--epochs", "3"],
    "--seed": [*LABEL, "--workers", "20", "--epochs", "3", "--seed", "-1"],
    "privacy.epsilon": ["reproduce", "rdpcfl-mnist", "--epsilon", "nan"],
    "--host: ''": ["keys", "k", "--host", ""],
    "--host: 'a b\\nc'": ["keys", "k", "--host", "a b\nc"],
    "--host: 'aaa": ["keys", "k", "--host", "a" * 300],
    "--host: 'ä.example'": ["keys", "k", "--host", "ä.example"],
    "--out needs a value, and --json after it is an option": ["export", "run", "--out", "--json"],
    "--noise needs a value, and --rounds after it": ["plan", "sample", "--noise", "--rounds", "3"],
    "no runs to choose": ["reproduce", "rdpcfl-illustration", "--epsilon", "nan"],
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_nobody_means_is_refused_in_one_line(
    named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = coterie(capsys, monkeypatch, *REFUSED[named])
    assert (printed.code, printed.out) == (2, ""), printed.err
    assert printed.err.count("\n") == 1
    assert named in printed.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("epsilon", ["inf", "1e-4"])
def test_any_budget_of_a_pair_is_one_object(
    epsilon: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    far = [*PAIR[:-1], "0,7", "--epsilon", epsilon, "--json"]
    printed = coterie(capsys, monkeypatch, *far)
    assert printed.code == 0, printed.err
    assert f'"wanted": {chr(34) + epsilon + chr(34) if epsilon == "inf" else float(epsilon)}' in printed.out


@pytest.mark.parametrize("name", ["groups.yaml", "groups.json"])
def test_half_a_character_names_nobody(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / name).write_text('{"groups": {"a": ["\\ud800", "x"], "b": ["x", "y"]}}')
    named = ["leakage", "--structure", str(tmp_path / name), "--epochs", "3", *RING[5:]]
    printed = coterie(capsys, monkeypatch, *named)
    assert (printed.code, printed.out, printed.err.count("\n")) == (2, "", 1)
    assert f"{name}: not" in printed.err


def test_a_bound_is_given_once_a_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("who,age,y\na,1,0\nb,2,1\n")
    drafted = ["init", "--data", "t.csv", "--client", "who", "--label", "y"]
    printed = coterie(capsys, monkeypatch, *drafted, "--bound", "age=0 to 9", "--bound", "age=0 to 99")
    assert (printed.code, printed.out) == (2, "")
    assert printed.err == "error: --bound: age is given twice, as '0 to 9' and '0 to 99'\n"
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]
