"""What models are for, as a file beside them: the task, and how raw values become what a network sees."""

from pathlib import Path

from pydantic import ValidationError

from coterie.data.clients import Federation
from coterie.data.preprocessing import Preprocessing
from coterie.data.records import Task
from coterie.errors import InputError
from coterie.files import Json, read_json
from coterie.privacy.plain import MalformedError, record
from coterie.settings import explain

FORMAT = 1


def task_facts(federation: Federation) -> Json:
    """What models that were trained on these records are for, as it is kept beside them."""
    described = federation.preprocessing or Preprocessing.as_it_is(federation.task)
    return {
        "format": FORMAT,
        "task": record(Task).write(federation.task),
        "preprocessing": described.model_dump(mode="json", exclude_none=True),
    }


def read_task(path: Path) -> tuple[Task, Preprocessing]:
    """What `task_facts` wrote into a file."""
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise InputError(f"{path}: of another version (format {content.get('format')}, ours is {FORMAT})")
    try:
        return record(Task).read(content["task"]), Preprocessing.model_validate(content["preprocessing"])
    except ValidationError as mistake:
        raise InputError(f"{path}: {explain(mistake, Preprocessing)}") from None
    except (KeyError, TypeError, ValueError, MalformedError) as mistake:
        raise InputError(f"{path}: not the task of a run ({type(mistake).__name__})") from None
