"""What only the operator of a run can say in its card: questions, and the file that keeps the answers."""

from collections.abc import Callable, Mapping
from pathlib import Path

from coterie.errors import InputError
from coterie.files import parse_yaml, regular, write_text, yaml_text
from coterie.privacy import Unit

ANSWERS = "card.yaml"
QUESTIONS = {
    "justification": "Why is this epsilon right for these data and this use?",
    "contact": "Who answers questions about this model (a name and an address)?",
    "tuning": "How were hyper-parameters chosen: on public data, accounted for, or unaccounted?",
    "records_per_person": "How many records may one person have in the data (a number, or unknown)?",
    "name": "How is what is published called?",
    "data_curators": "Who holds the data (separated by commas)?",
    "intended_use": "What is the model for?",
    "description": "What is it, in a sentence or two?",
    "data_product_region": "Which region do the data come from?",
    "data_product_sector": "Which sector (health, education, ...)?",
    "publication_date": "When was or will it be published (2026-11-18)?",
    "sources": "Where can one read more (addresses, separated by commas)?",
    "registry_authors": "Who filled in this card (separated by commas)?",
}
"""By the key under which the answer is kept."""
CLAIMS = ("justification", "contact", "tuning", "records_per_person")
"""Those that a claim cannot do without; the others are for registries."""


class OperatorAnswers:
    """What was answered so far."""

    def __init__(self, said: Mapping[str, str]) -> None:
        self.said = {key: value for key, value in said.items() if value}

    @classmethod
    def read(cls, folder: Path) -> "OperatorAnswers":
        """From the file in a run's folder; nothing where there is none."""
        path = folder / ANSWERS
        if not path.exists():
            return cls({})
        try:
            content = parse_yaml(regular(path).read_text(encoding="utf-8"))
        except (ValueError, OSError) as problem:
            raise InputError(f"{path}: not YAML, {problem}") from None
        if not isinstance(content, dict):
            raise InputError(f"{path}: allowed: keys with texts: {', '.join(QUESTIONS)}")
        for key, value in content.items():
            if key not in QUESTIONS:
                raise InputError(f"{path}: key {key!r} is not allowed; allowed: {', '.join(QUESTIONS)}")
            if not (value is None or isinstance(value, str | int)) or isinstance(value, bool):
                raise InputError(f"{path}: {key}: {value!r} is not allowed, a text is")
        return cls({key: "" if value is None else str(value).strip() for key, value in content.items()})

    def asked(self, unit: Unit) -> dict[str, str]:
        """The questions that a card of a run with this unit has."""
        return {
            key: text for key, text in QUESTIONS.items() if key != "records_per_person" or unit is Unit.RECORD
        }

    def missing(self, unit: Unit) -> list[str]:
        """Which of them have no answer yet."""
        return [key for key in self.asked(unit) if key not in self.said]

    def get(self, key: str) -> str | None:
        return self.said.get(key)

    def listed(self, key: str) -> list[str]:
        """An answer of several parts."""
        return [part.strip() for part in self.said.get(key, "").split(",") if part.strip()]


def ask(folder: Path, unit: Unit, prompt: Callable[[str], str]) -> OperatorAnswers:
    """Have the operator answer what is open, once: the file then has every key, answered or not."""
    known = OperatorAnswers.read(folder)
    if (folder / ANSWERS).exists():
        return known
    answers = {key: prompt(text).strip() for key, text in known.asked(unit).items()}
    write_text(folder / ANSWERS, yaml_text(answers, default_flow_style=False, width=100))
    return OperatorAnswers(answers)
