"""From raw values to what a network sees, and from what it says back to labels: public constants alone.

A dataset describes its preprocessing once, as plain data. Whoever reads records for training applies it with
numpy, a model that takes raw values (`models/preprocessed.py`) with torch, by the same lines, so that both
cannot come apart; a run folder keeps the description beside its models.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from coterie.data.columns import Column, Names, Range, encode, unit_interval
from coterie.data.records import Array, Task
from coterie.settings import Settings

CLASSES = 10**6
"""As many as a label may have."""
_AT_ONCE = 4096
"""Records that are scaled at a time: what lies in between takes no second table's memory."""
Numbers = Annotated[tuple[float, ...], Field(min_length=1)]


class Label(Settings):
    """What is predicted.

    Args:
        column: its column, for tables.
        classes: the classes by name, or how many if labels are 0, 1, 2, ...
        range: the values a regression target may take.
    """

    column: str | None = None
    classes: Annotated[int, Field(ge=1, le=CLASSES)] | Names | None = None
    range: Range | None = None

    def unit(self, values: Array) -> Array:
        """Targets of a regression as a model learns them: their range mapped to [0, 1], if there is one."""
        if self.range is not None:
            values = unit_interval(values.astype(np.float64), self.range)
        return values.astype(np.float32)

    def in_units(self, outputs: Any) -> Any:
        """What a model of a regression says, in the label's own units; of numpy or torch."""
        if self.range is None:
            return outputs
        low, high = self.range
        return low + outputs * (high - low)

    @property
    def names(self) -> list[str | int | float]:
        """The classes as they are called; none for a regression."""
        if isinstance(self.classes, int):
            return list(range(self.classes))
        return list(self.classes or ())


class ScalingStep(Settings):
    """One operation on raw values.

    Args:
        by: the lower and upper end of a clip; else one number for all, or one for each channel (the first
            axis of a record).
    """

    do: Literal["clip", "divide", "subtract"]
    by: Numbers

    @model_validator(mode="after")
    def _has_two_ends(self) -> Self:
        if self.do == "clip" and len(self.by) != 2:
            raise ValueError("by: a clip has a lower and an upper end")
        return self

    @property
    def is_by_channel(self) -> bool:
        """Whether every channel has a number of its own."""
        return self.do != "clip" and len(self.by) > 1


class ArrayInputs(Settings):
    """One array per record, taken as float32 and scaled step by step."""

    kind: Literal["array"] = "array"
    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    steps: tuple[ScalingStep, ...] = ()

    @property
    def raw_shape(self) -> tuple[int, ...]:
        return self.shape

    def constants(self) -> list[Array | None]:
        """For each step, what it takes for each channel, in a shape that fits all records; else None."""
        shape = (-1, *[1] * (len(self.shape) - 1))
        return [
            np.asarray(step.by, dtype=np.float32).reshape(shape) if step.is_by_channel else None
            for step in self.steps
        ]

    def scale(self, values: Any, constants: Sequence[Any]) -> Any:
        """Float32 records as the network sees them, of numpy or torch, with constants of the same."""
        for step, by_channel in zip(self.steps, constants, strict=True):
            by = step.by[0] if by_channel is None else by_channel
            match step.do:
                case "clip":
                    values = values.clip(*step.by)
                case "divide":
                    values = values / by
                case "subtract":
                    values = values - by
        return values

    def features(self, raw: Array) -> Array:
        """Raw records of any numbers as float32 features."""
        constants = self.constants()
        found = np.empty(raw.shape, dtype=np.float32)
        for first in range(0, len(raw), _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            found[part] = self.scale(raw[part].astype(np.float32), constants)
        return found


class TableInputs(Settings):
    """One row of a table per record: numbers as they are, categories by their positions, NaN for missing."""

    kind: Literal["table"] = "table"
    columns: Annotated[tuple[Column, ...], Field(min_length=1)]

    @property
    def raw_shape(self) -> tuple[int, ...]:
        return (len(self.columns),)

    def features(self, raw: Array) -> Array:
        """Raw rows, float64, as float32 features."""
        features: Array = encode(raw.astype(np.float64, copy=False), self.columns, np).astype(np.float32)
        return features


class TokenInputs(Settings):
    """A window of tokens per record, as it is.

    Args:
        alphabet: the characters that tokens stand for, of text; every other character is the last token.
    """

    kind: Literal["tokens"] = "tokens"
    length: PositiveInt
    vocabulary: PositiveInt
    alphabet: str | None = None

    @property
    def raw_shape(self) -> tuple[int, ...]:
        return (self.length,)

    def features(self, raw: Array) -> Array:
        return raw

    def tokens(self, text: str) -> Array:
        """The tokens of a text, one for each character."""
        alphabet = self.alphabet or ""
        codes = np.full(256, len(alphabet), dtype=np.int64)
        codes[np.frombuffer(alphabet.encode("ascii"), np.uint8)] = np.arange(len(alphabet))
        found: Array = codes[np.frombuffer(text.encode("ascii", "replace"), np.uint8)]
        return found


class Preprocessing(Settings):
    """What lies between raw values and a network, and between its outputs and labels."""

    inputs: Annotated[ArrayInputs | TableInputs | TokenInputs, Field(discriminator="kind")]
    label: Label

    @classmethod
    def of_array(cls, task: Task, *steps: tuple[str, Sequence[float]], label: Label | None = None) -> Self:
        """For records that are arrays of the task's shape, scaled by these steps.

        Args:
            label: by default 0, 1, 2, ..., or a target as it is.
        """
        inputs = {"kind": "array", "shape": task.shape, "steps": [{"do": do, "by": by} for do, by in steps]}
        return cls.model_validate({"inputs": inputs, "label": label or Label(classes=task.classes or None)})

    @classmethod
    def as_it_is(cls, task: Task) -> Self:
        """For records that come as the network sees them."""
        if task.vocabulary is None:
            return cls.of_array(task)
        inputs = TokenInputs(length=task.shape[0], vocabulary=task.vocabulary)
        return cls(inputs=inputs, label=Label(classes=task.classes))
