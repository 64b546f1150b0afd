"""The base of every section of the experiment file.

Each room declares the options it understands beside the code that uses them;
`coterie.experiment` puts the sections together.
"""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen group of options; keys it does not know are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)
