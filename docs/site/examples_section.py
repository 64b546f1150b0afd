"""Our docstrings have one example under `Example:`; the parser calls such a section `Examples:`."""

import re

import griffe


class ExamplesSection(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = value
