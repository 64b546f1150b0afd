"""What mkdocs is told beside mkdocs.yml: which files are pages, and the pages that the package writes itself.

Every page lies on the site under the path that it has in the repository: one relative link works in both.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
EXECUTED = ROOT / "build" / "notebooks"
SHOWN = [
    "*.md",
    "docs/*.md",
    "docs/reference/*.md",
    "docs/reproduce/*.md",
    "docs/reproduce/*.svg",
    "docs/*.svg",
    "docs/*.png",
    "docs/demo/*",
    "docs/site/*.css",
    "benchmarks/README.md",
    "benchmarks/results/*.png",
    "examples/README.md",
    "examples/*/README.md",
]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, the repository's pages, the executed notebooks, what commands say of themselves."""
    inside = Path(config.docs_dir)
    shown = [file for file in files if not file.abs_src_path or not _is_in(file.abs_src_path, inside)]
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            shown.append(File.generated(config, name, abs_src_path=str(path)))
    for path in sorted(EXECUTED.rglob("*")):
        if path.is_file():
            name = posixpath.join("docs/notebooks", path.relative_to(EXECUTED).as_posix())
            shown.append(File.generated(config, name, abs_src_path=str(path)))
    shown.append(File.generated(config, "docs/reference/commands.md", content=commands()))
    shown.append(File.generated(config, "docs/reference/experiment-file.md", content=experiment_file()))
    return Files(shown)


def _is_in(path: str, folder: Path) -> bool:
    return Path(path).is_relative_to(folder)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A notebook's source is linked in the repository; on the site, the page of its execution is."""
    return re.sub(r"\]\(((?:[\w.-]+/)*notebooks/[\w-]+|[\w-]+)\.ipynb\)", r"](\1.md)", markdown)


# --- pages that the package writes itself -----------------------------------------------------------


def commands() -> str:
    """Every command with its arguments and options, from the same descriptions that --help prints."""
    from coterie.cli.main import COMMANDS, command_of

    lines = [
        "# Commands",
        "",
        "`--json` prints one JSON object on stdout and nothing else. Exit codes: 0 done, 2 the",
    ]
    lines += ["input is wrong, 3 the budget does not allow it, 4 a claim does not hold, 1 anything else.", ""]
    for name, told in COMMANDS.items():
        whole = command_of(name)
        lines += [f"## `coterie {name}`", "", told, ""]
        for part, command in getattr(whole, "commands", {"": whole}).items():
            if part:
                lines += [f"### `coterie {name} {part}`", "", (command.help or "").strip(), ""]
            lines += ["| argument or option | what it says | default |", "| --- | --- | --- |"]
            lines += [_option_row(each) for each in command.params if not getattr(each, "hidden", False)]
            lines += [""]
    return "\n".join(lines)


def _option_row(option: Any) -> str:
    is_flag = getattr(option, "is_flag", False)
    names = (
        [*option.opts, *option.secondary_opts] if option.opts[0].startswith("-") else [option.name.upper()]
    )
    kind = "" if is_flag or not option.opts[0].startswith("-") else f" {option.metavar or _kind(option)}"
    default = option.default
    shown = (
        "required"
        if option.required
        else ""
        if default in (None, False, (), []) or callable(default)
        else default
    )
    shown = getattr(shown, "value", shown)
    said = " ".join((option.help or "").split()).replace("|", "\\|").replace("<", "&lt;")
    code = ", ".join(f"`{name}{kind}`" for name in names)
    return f"| {code} | {said} | {f'`{shown}`' if shown != '' and shown != 'required' else shown} |"


def _kind(option: Any) -> str:
    choices = getattr(option.type, "choices", None)
    return (
        "|".join(getattr(each, "value", str(each)) for each in choices)
        if choices
        else option.type.name.upper()
    )


def experiment_file() -> str:
    """Every key of an experiment file, with its default: what `coterie run --print-default` prints."""
    from coterie.experiment.experiment_file import commented_default

    lines = [
        "# The experiment file",
        "",
        "Every key with its default, as `coterie run --print-default` prints them.",
        "",
    ]
    return "\n".join([*lines, "```yaml", commented_default().rstrip(), "```", ""])
