"""Reads the texts of Parquet and Arrow files, one column of them, with the package pyarrow.

Arrow files come in two forms: files (also called Feather), and streams, as Hugging Face's datasets writes them.
"""

import os
import sys

from programs import DataError

SUFFIXES = (".parquet", ".arrow", ".feather")
PARQUET, ARROW_FILE = b"PAR1", b"ARROW1\0\0"   # a stream has no magic bytes
ROWS = 256   # read at a time


def is_columns(path):
    """By the name, or the first bytes."""
    named = path.lower().endswith(SUFFIXES)
    if named or not os.path.isfile(path):
        return named
    with open(path, "rb") as file:
        return file.read(8).startswith((PARQUET, ARROW_FILE))


class Column:
    """A column of texts. DataError: no pyarrow, not such a file, damaged, or without this column of texts."""

    def __init__(self, path, name):
        self.path, self.name = path, name
        try:
            import pyarrow
            import pyarrow.ipc
            import pyarrow.parquet
        except ImportError:
            raise DataError(f"{path}: Parquet and Arrow files need the Python package 'pyarrow'; install it with: python3 -m "
                            f"venv .venv && .venv/bin/pip install pyarrow, then run .venv/bin/python {sys.argv[0]} ...") from None
        if not os.path.isfile(path):
            raise DataError(f"{path}: not a file; Parquet and Arrow are not read from a pipe")
        self.errors = (pyarrow.ArrowException, OSError)
        with open(path, "rb") as file:
            start = file.read(8)
        try:
            if start.startswith(PARQUET):
                self.form, self.open = "Parquet", lambda: pyarrow.parquet.ParquetFile(path)
                schema = self.open().schema_arrow
            elif start == ARROW_FILE:
                self.form, self.open = "Arrow", lambda: pyarrow.ipc.open_file(pyarrow.memory_map(path))
                schema = self.open().schema
            else:
                self.form, self.open = "Arrow stream", lambda: pyarrow.ipc.open_stream(pyarrow.memory_map(path))
                schema = self.open().schema
        except self.errors as error:
            raise self._damaged(error) from None
        if schema.names.count(name) != 1:
            raise DataError(f"{path}: no column '{name}', only {', '.join(map(repr, schema.names[:8])) or 'none'}; name the "
                            "column of the texts with --json-field")
        kind = schema.field(name).type
        value = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if str(value) not in ("string", "large_string", "string_view"):
            raise DataError(f"{path}: column '{name}' holds {kind}, expected string; name the column of the texts with "
                            "--json-field")

    def bytes(self):
        """About the size of the texts, decompressed."""
        try:
            if self.form != "Parquet":
                return sum(batch.column(self.name).nbytes for batch in self._batches())
            parquet = self.open().metadata
            groups = map(parquet.row_group, range(parquet.num_row_groups))
            return sum(group.column(i).total_uncompressed_size for group in groups for i in range(group.num_columns)
                       if group.column(i).path_in_schema == self.name)
        except self.errors as error:
            raise self._damaged(error) from None

    def texts(self):
        """Yields the text of each row, "" where there is none."""
        row = 0
        try:
            for batch in self._batches():
                for begin in range(0, batch.num_rows, ROWS):
                    values = batch.column(self.name).slice(begin, ROWS)
                    yield from (text or "" for text in values.to_pylist())
                    row += len(values)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: column '{self.name}' has a text that is not UTF-8 in rows {row + 1} to "
                            f"{row + ROWS} ({error.reason}); correct it") from None
        except self.errors as error:
            raise self._damaged(error, f" after row {row}") from None

    def _batches(self):
        file = self.open()
        if self.form == "Parquet":   # without threads, because workers are forked
            return file.iter_batches(ROWS, columns=[self.name], use_threads=False)
        return map(file.get_batch, range(file.num_record_batches)) if self.form == "Arrow" else file

    def _damaged(self, error, where=""):
        form = getattr(self, "form", "Parquet or Arrow")
        return DataError(f"{self.path}: not readable as {form}{where} ({' '.join(str(error).split())[:200]}); expected a whole "
                         "Parquet or Arrow file: get it again")
