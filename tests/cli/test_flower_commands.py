"""`coterie serve`, `join` and `keys`: what is wrong is one line that says what is allowed."""

import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from command import coterie

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="the extra 'flower' is not installed"
)

DRAFTED = (
    "--set",
    "privacy.unit=worker",
    "--set",
    "algorithm.name=dp-ogl-plus",
    "--set",
    "privacy.mode=paper",
)
ROBUST = ("--set", "algorithm.name=dp-fedavg", "--set", "schedule.aggregation=median", "--set")
HERE = ("--server", "127.0.0.1:1", "--epsilon", "8", "--plaintext")
MISTAKES = [
    (["serve", "e.yaml"], "--keys"),
    (["serve", "e.yaml", "--plaintext", "--keys", "k"], "--keys"),
    (["serve", "e.yaml", "--plaintext"], "--sites"),
    (["serve", "e.yaml", "--plaintext", "--sites", "2", "--host", "0.0.0.0"], "only on loopback"),
    (["serve", "e.yaml", "--keys", "nowhere"], "ca.crt"),
    (["serve", "e.yaml", "--keys", "k", "--set", "seeds.noise=1"], "seeds.noise"),
    (["serve", "e.yaml", "--keys", "k", *DRAFTED], "privacy.mode"),
    (["serve", "e.yaml", "--keys", "k", *ROBUST, "privacy.unit=client"], "schedule.aggregation"),
    (["serve", "e.yaml", "--keys", "k", *ROBUST, "privacy.unit=worker"], "schedule.aggregation"),
    (["run", "e.yaml", *ROBUST, "privacy.unit=client"], "schedule.aggregation"),
    (["join", "--data", "d", "--server", "h:1", "--epsilon", "8"], "--ca and --key"),
    (["join", "--data", "d", "--server", "h:1", "--epsilon", "8", "--plaintext"], "only on loopback"),
    (["join", "--data", "d", "--server", "h", "--epsilon", "8", "--plaintext"], "HOST:PORT"),
    (["join", "--data", "d", *HERE], "data.path"),
    (["join", "--data", "d", *HERE, "--trust-server"], "--delta"),
    (["join", "--data", "d", *HERE, "--adjacency", "replace-one"], "data.path"),
    (["keys", "k2", "--site", "a/b"], "site"),
    (["keys", "k2", "--site", "a", "--sites", "b"], "--site"),
]


SERVE = ("serve", "e.yaml", "--plaintext", "--sites", "2")
JOIN = ("join", "--data", "d", *HERE)
SCORED = (*JOIN, "--held-out", "0.2", "--evaluation-epsilon", "1")
NO_NUMBERS = ("nan", "inf", "-inf", "-1", "1e308")
NUMBERS: list[tuple[tuple[str, ...], str, tuple[str, ...]]] = [
    (SERVE, "--port", ("nan", "-1", "65536", "9" * 30)),
    (SERVE, "--wait", NO_NUMBERS),
    (SERVE, "--answer", (*NO_NUMBERS, "0", "5e-324")),
    (SERVE, "--rejoin", NO_NUMBERS),
    (SERVE, "--most-records", ("nan", "-1", "0", "9" * 30)),
    (SERVE, "--sites", ("0", "-1", "nan", "9" * 30)),
    (JOIN, "--epsilon", ("nan", "-inf", "-1", "0", "1e308", "5e-324")),
    (JOIN, "--delta", (*NO_NUMBERS, "0", "1", "5e-324")),
    (JOIN, "--held-out", (*NO_NUMBERS, "0", "1", "5e-324")),
    (SCORED, "--split", ("nan", "-1", "0:-1", "9" * 5000, "0:" + "9" * 30, "1" * 20, "0:1000001", "²")),
    (SCORED, "--evaluation-epsilon", (*NO_NUMBERS, "0", "5e-324")),
    (SCORED, "--evaluation-reports", ("nan", "-1", "0", "9" * 30)),
    (JOIN, "--noise-seed", ("nan", "-1", "9" * 30)),
    (JOIN, "--server", ("127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:²", "127.0.0.1:" + "9" * 5000, "a b:1")),
    (SERVE, "--host", ("", "a b", "-x")),
]


def as_shown(value: str) -> Iterator[str]:
    """How a line may show a value: as it was written, its wrong part alone, or as a number is printed."""
    yield value[:15] or "''"
    yield from (part for part in value.split(":") if part.strip("0"))
    with suppress(ValueError):
        yield repr(float(value))


@pytest.mark.parametrize(("command", "option", "values"), NUMBERS, ids=lambda value: str(value)[:30])
def test_a_number_out_of_range_is_refused_by_its_option_before_anything_is_made(
    command: tuple[str, ...],
    option: str,
    values: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.yaml").write_text("algorithm: {name: global}\n")
    for value in values:
        done = coterie(capsys, monkeypatch, *command, f"{option}={value}")
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), (value, done)
        assert option in done.err
        assert any(shown in done.err for shown in as_shown(value)), done.err
        assert [path.name for path in tmp_path.iterdir()] == ["e.yaml"]


IN_VAIN = [
    (["serve", "e.yaml", "--keys", "k", "--sites", "2"], "--sites"),
    ([*JOIN, "--split", "3"], "--split"),
    ([*JOIN, "--held-out", "0.2", "--evaluation-reports", "2"], "--evaluation-reports"),
    ([*JOIN, "--evaluation-epsilon", "1"], "--evaluation-epsilon"),
]


@pytest.mark.parametrize(("arguments", "named"), [*MISTAKES, *IN_VAIN], ids=lambda value: str(value)[:60])
def test_a_mistake_is_one_line(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.yaml").write_text("algorithm: {name: global}\n")
    done = coterie(capsys, monkeypatch, *arguments)
    assert done.code == 2, done.err
    assert len(done.err.strip().splitlines()) == 1
    assert named in done.err


def test_keys_are_made_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = partial(coterie, capsys, monkeypatch)
    assert run("keys", "k", "--host", "fed.example.org", "--sites", "a, b").code == 0
    assert sorted(path.name for path in Path("k/sites").iterdir()) == ["a.key", "a.pub", "b.key", "b.pub"]
    assert run("keys", "k").code == 2
    assert run("keys", ".", "--site", "c").code == 0
    assert Path("c.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
