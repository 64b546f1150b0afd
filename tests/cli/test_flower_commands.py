"""`coterie serve`, `join` and `keys`: what is wrong is one line that says what is allowed."""

import importlib.util
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
HERE = ("--server", "127.0.0.1:1", "--epsilon", "8", "--plaintext")
MISTAKES = [
    (["serve", "e.yaml"], "--keys"),
    (["serve", "e.yaml", "--plaintext", "--keys", "k"], "--keys"),
    (["serve", "e.yaml", "--plaintext"], "--sites"),
    (["serve", "e.yaml", "--plaintext", "--sites", "2", "--host", "0.0.0.0"], "only on loopback"),
    (["serve", "e.yaml", "--keys", "nowhere"], "ca.crt"),
    (["serve", "e.yaml", "--keys", "k", "--set", "seeds.noise=1"], "seeds.noise"),
    (["serve", "e.yaml", "--keys", "k", *DRAFTED], "privacy.mode"),
    (["join", "--data", "d", "--server", "h:1", "--epsilon", "8"], "--ca and --key"),
    (["join", "--data", "d", "--server", "h:1", "--epsilon", "8", "--plaintext"], "only on loopback"),
    (["join", "--data", "d", "--server", "h", "--epsilon", "8", "--plaintext"], "HOST:PORT"),
    (["join", "--data", "d", *HERE], "data.path"),
    (["join", "--data", "d", *HERE, "--trust-server"], "--delta"),
    (["join", "--data", "d", *HERE, "--adjacency", "replace-one"], "data.path"),
    (["keys", "k2", "--site", "a/b"], "site"),
    (["keys", "k2", "--site", "a", "--sites", "b"], "--site"),
]


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=lambda value: str(value)[:60])
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
