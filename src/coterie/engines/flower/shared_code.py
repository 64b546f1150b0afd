"""Code that server and sites have installed themselves: by name, package and version; none is ever sent."""

from collections.abc import Iterator
from dataclasses import dataclass

from coterie.models import ModelSettings
from coterie.plugins import FEATURES, MODEL, PluginKind
from coterie.privacy.plain import Plain


@dataclass(frozen=True)
class SharedCode(Plain):
    """Where a part of an experiment comes from that is not coterie's own.

    Args:
        key: of the experiment file, that names it.
        name: `package.module:function`, or as a package announces it.
        package, version: that it is installed from; None where it is from no package.
        sha256: of its files, which then take the version's place.
    """

    called = "code"
    key: str
    name: str
    package: str | None
    version: str | None
    sha256: str | None

    @classmethod
    def here(cls, kind: PluginKind, name: str) -> "SharedCode":
        """As it is installed here."""
        package, version, digest = kind.installed(name)
        return cls(kind.key, name, package, version, digest if version is None else None)

    def __str__(self) -> str:
        if self.version is not None:
            return f"{self.package} {self.version}"
        return "no file" if self.sha256 is None else f"files with SHA-256 {self.sha256[:12]}"


def own_code(model: ModelSettings) -> Iterator[tuple[PluginKind, str]]:
    """The parts of a model that run at a site and are not coterie's own."""
    if model.own:
        yield MODEL, model.name
    if model.own_features:
        yield FEATURES, model.features
