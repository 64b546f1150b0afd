"""A pickled data frame as an Arrow stream, in a process of its own:

    python -I unpickling.py FILE.pkl.compress COLUMN... > table.arrow

A pickle is a program. This one, from a package that was installed, may call the few functions that make a
data frame of numbers and text and no others, and it runs where no records but its own are.
"""

import lzma
import pickle
import sys
from typing import Any

ALLOWED = {
    "builtins": {"slice"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct"},
    "numpy.core.numeric": {"_frombuffer"},
    "pandas._libs.internals": {"_unpickle_block"},
    "pandas.core.frame": {"DataFrame"},
    "pandas.core.indexes.base": {"Index", "_new_Index"},
    "pandas.core.indexes.range": {"RangeIndex"},
    "pandas.core.internals.managers": {"BlockManager"},
}


class FrameUnpickler(pickle.Unpickler):
    """Makes data frames, and refuses a pickle that asks for anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a data frame")
        # Where numpy 2 keeps what older versions pickled.
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def main(path: str, columns: list[str]) -> None:
    import pyarrow as pa

    with lzma.open(path) as stream:
        frame = FrameUnpickler(stream).load()
    table = pa.Table.from_pandas(frame[columns], preserve_index=False)
    with pa.ipc.new_stream(sys.stdout.buffer, table.schema) as writer:
        writer.write_table(table)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
